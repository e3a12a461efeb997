"""MiMo's own MTP head, from files with its names, against its modelling code in float64 NumPy.

The reference: https://github.com/XiaomiMiMo/MiMo, modeling_mimo.py (Qwen2's layers, and
`MiMoMTPLayers`); and vLLM's mimo.py and mimo_mtp.py, also by Xiaomi, for what the head is fed:
hidden states before the decoder's final norm, and embeddings of the next tokens. It reads the
tensors by their names in the file and shares no code with the package.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_specdec.device.model import llama, mtp
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.params import init_cache, init_mtp_cache
from tests.support import decoding, hf_files, quick_compile

TOLERANCE = 1e-4
CONFIG = hf_files.CONFIGS["mimo"]
IDS = np.random.default_rng(3).integers(0, CONFIG.vocab_size, 11).astype(np.int32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return hf_files.write(tmp_path_factory.mktemp("mimo"), CONFIG)


@pytest.fixture(scope="module")
def loaded(directory):
    params, config = load_model(directory)
    assert config == CONFIG
    return params, config


# The reference ---------------------------------------------------------------------------------


class Reference:
    """One sequence, everything recomputed."""

    def __init__(self, directory):
        tensors = load_file(directory / "model.safetensors")
        self.w = {name: value.astype(np.float64) for name, value in tensors.items()}

    def norm(self, x, name):
        mean = np.mean(x**2, axis=-1, keepdims=True)
        return x / np.sqrt(mean + CONFIG.norm_eps) * self.w[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def attention(self, x, name):
        n, dh = len(x), CONFIG.head_dim
        heads = {part: self.linear(x, f"{name}.{part}_proj").reshape(n, -1, dh) for part in "qkv"}
        inverse = CONFIG.rope_theta ** (-np.arange(0, dh, 2) / dh)
        angle = np.tile(np.outer(np.arange(n), inverse), 2)[:, None]
        for part in "qk":
            left, right = np.split(heads[part], 2, axis=-1)
            half = np.concatenate([-right, left], axis=-1)
            heads[part] = heads[part] * np.cos(angle) + half * np.sin(angle)
        groups = CONFIG.num_heads // CONFIG.num_kv_heads
        k, v = (np.repeat(heads[part], groups, axis=1) for part in "kv")
        scores = np.einsum("ihd,jhd->hij", heads["q"], k) / np.sqrt(dh)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear(np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1), f"{name}.o_proj")

    def layer(self, x, name):
        x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate = self.linear(y, f"{name}.mlp.gate_proj")
        y = gate / (1 + np.exp(-gate)) * self.linear(y, f"{name}.mlp.up_proj")
        return x + self.linear(y, f"{name}.mlp.down_proj")

    def embedded(self, ids):
        return self.w["model.embed_tokens.weight"][ids]

    def body(self, ids):
        """The hidden states before the final norm."""
        x = self.embedded(ids)
        for index in range(CONFIG.num_layers):
            x = self.layer(x, f"model.layers.{index}")
        return x

    def head(self, hidden, next_ids):
        """The MTP layer's output after its final norm, for `lm_head` or for the next draft."""
        name = "model.mtp_layers.0"
        tokens = self.norm(self.embedded(next_ids), f"{name}.token_layernorm")
        hidden = self.norm(hidden, f"{name}.hidden_layernorm")
        x = self.linear(np.concatenate([hidden, tokens], axis=-1), f"{name}.input_proj")
        return self.norm(self.layer(x, name), f"{name}.final_layernorm")

    def logits(self, ids):
        return self.linear(self.norm(self.body(ids), "model.norm"), "lm_head")


# Tests -----------------------------------------------------------------------------------------


@pytest.mark.fast
def test_decoder_and_head_agree_with_the_reference(directory, loaded):
    params, config = loaded

    @quick_compile.jit
    def run(ids, rows):
        hidden, _ = llama.forward(params, config, ids, rows, init_cache(config, 1, 16))
        out, _ = mtp.mtp_forward(
            params, config, hidden[:, :-1], ids[:, 1:], rows[:, :-1], init_mtp_cache(config, 1, 16)
        )
        return llama.logits(params, config, hidden)[0], llama.project(params, config, out)[0]

    reference = Reference(directory)
    rows = jnp.arange(len(IDS), dtype=jnp.int32)[None]
    target, drafts = map(np.asarray, run(jnp.asarray(IDS)[None], rows))
    np.testing.assert_allclose(target, reference.logits(IDS), atol=TOLERANCE, rtol=0)
    body = reference.body(IDS)
    want = reference.linear(reference.head(body[:-1], IDS[1:]), "lm_head")
    np.testing.assert_allclose(drafts, want, atol=TOLERANCE, rtol=0)
    # Negative controls: what the head would say if it were fed otherwise.
    normed = reference.norm(body, "model.norm")
    for fed, tokens in ((normed[:-1], IDS[1:]), (body[:-1], IDS[:-1])):
        other = reference.linear(reference.head(fed, tokens), "lm_head")
        assert np.abs(other - want).max() > 100 * TOLERANCE


@pytest.mark.slow
def test_the_loop_drafts_what_the_reference_drafts(directory, loaded):
    """First drafts come from the decoder's states, further ones from the head's own output."""
    reference, prompt = Reference(directory), IDS[:5].tolist()
    run = decoding.run([decoding.request("a", prompt, max_tokens=30)], "mtp", model=loaded)
    ids = run.token_ids("a")
    # Requests of one token have no drafts: greedy decoding gives the same, a token at a time.
    single = [
        decoding.request(str(at), prompt + ids[:at], max_tokens=1) for at in range(0, len(ids), 3)
    ]
    plain = decoding.run(single, "mtp", model=loaded)
    assert [plain.token_ids(one.id) for one in single] == [[ids[int(one.id)]] for one in single]
    assert sum(int(output.num_drafts.sum()) for output in plain.outputs) == 0

    text = np.array(prompt + ids)
    body = reference.body(text)
    clear, wrong, of = compare(reference, run, text, len(prompt), body)
    assert clear > 0.9 * of > 30
    assert wrong == 0
    # Negative control: the comparison notices a head that is fed normed states.
    normed = reference.norm(body, "model.norm")
    assert compare(reference, run, text, len(prompt), normed)[1] > 3


def compare(reference, run, text, known, body):
    """Counts of drafts: those the reference is clear about, of them the other ones, and all."""
    clear = wrong = of = 0
    for output in run.outputs:
        if output.num_tokens[0] == 0:
            continue
        hidden, fed = body[: known - 1], text[1:known]
        for token in output.drafts.token_ids[0, : output.drafts.num[0]]:
            state = reference.head(hidden, fed)
            row = reference.linear(state, "lm_head")[-1]
            second, best = np.sort(row)[-2:]
            if best - second > TOLERANCE:
                clear += 1
                wrong += token != row.argmax()
            of += 1
            hidden, fed = np.concatenate([hidden, state[-1:]]), np.append(fed, token)
        known += int(output.num_tokens[0])
    assert known == len(text)
    return clear, wrong, of

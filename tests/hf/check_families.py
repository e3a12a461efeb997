"""Checkpoints written by `transformers`, decoded by our loop, against its own forward pass.

Named so that the ordinary test run does not collect it: `.ci/heavy hf` does.
"""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from jax_specdec.device.drafting import DraftModel
from jax_specdec.device.model import llama, mtp
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.params import init_cache, init_mtp_cache
from tests.hf import checkpoints
from tests.support import decoding, quick_compile
from tests.support.greedy_checks import check_greedy, check_logprobs, log_softmax

TOLERANCE = 1e-4
CLOSE = {"atol": TOLERANCE, "rtol": 0}
K = 5
# Repeated ids, so that n-grams draft; and a prompt of a single id.
PROMPTS = [[1, 5, 6, 7, 5, 6, 7, 5, 6], [9], list(range(3, 40)), [4, 4, 4, 4, 8, 4, 4]]
# One of each kind of architecture; CI leaves the rest to `.ci/heavy hf`.
OFTEN = {"Llama 3.1", "Qwen2, tied", "Mistral, sliding", "Qwen3-MoE", "Gemma 3"}
DRAFTERS = [("Llama 3.1", "none"), ("Llama 3.1", "mtp"), ("Qwen2", "mtp"), ("Qwen3", "mtp")]


def seldom(runs):
    """Parameters of a test: those of other checkpoints than `OFTEN` are slow."""
    return [pytest.param(*one, marks=() if one[0] in OFTEN else pytest.mark.slow) for one in runs]


RUNS = seldom([(family, "ngram") for family in checkpoints.FAMILIES] + DRAFTERS)


def requests(max_tokens=40):
    return [
        decoding.request(f"r{index}", prompt, max_tokens=max_tokens, logprobs=K)
        for index, prompt in enumerate(PROMPTS)
    ]


def reference_logits(reference, ids):
    """Logits [N, V] float64 of transformers' forward pass in float32."""
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].double().numpy()


def compare(run, reference):
    """Compare ids, logprobs, ranks and top K of every request; returns the number of near ties."""
    near_ties = 0
    for index, prompt in enumerate(PROMPTS):
        records = run.records[f"r{index}"]
        ids = run.token_ids(f"r{index}")
        assert len(ids) == 40
        rows = log_softmax(reference_logits(reference, prompt + ids)[len(prompt) - 1 : -1])
        near_ties += check_logprobs(records, rows, K, own=CLOSE, top=CLOSE, tie=TOLERANCE)
        check_greedy(ids, rows, TOLERANCE)
    return near_ties


@pytest.mark.parametrize(("family", "drafter"), RUNS, ids=str)
def test_greedy_speculative_decoding_equals_transformers(family, drafter, tmp_path):
    written = checkpoints.build(family)
    sharded = "tied" in family
    checkpoints.write(tmp_path, written, shard_bytes=20_000 if sharded else None)
    assert len(list(tmp_path.glob("*.safetensors"))) > sharded
    if drafter == "mtp":
        checkpoints.add_mtp(tmp_path, written)
    params, config = load_model(tmp_path, dtype="float32")
    assert config.num_mtp_layers == (drafter == "mtp")
    run = decoding.run(requests(), drafter, model=(params, config))
    near_ties = compare(run, written)
    statistics = [records[-1].statistics for records in run.records.values()]
    drafts, accepted = (
        sum(getattr(one, f"num_{x}") for one in statistics) for x in ("drafts", "accepted")
    )
    print(f"{family}, {drafter}: {accepted} of {drafts} drafts accepted, {near_ties} near ties")
    assert (drafts > 0) == (drafter != "none")
    if drafter == "ngram":
        assert accepted > 0
    assert near_ties < 8


SMALLER = [
    ("Mistral, sliding", "Mistral"),
    ("Gemma 3", "Gemma 2"),
    ("Qwen3-MoE", "Qwen3"),
    ("Mixtral", "Mistral, sliding"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "small"), SMALLER)
def test_greedy_decoding_with_a_draft_model_equals_transformers(family, small, tmp_path):
    written = checkpoints.build(family)
    params, config = load_model(checkpoints.write(tmp_path / "model", written), dtype="float32")
    drafting = checkpoints.write(tmp_path / "draft", checkpoints.build(small, seed=4))
    draft, draft_config = load_model(drafting, dtype="float32")
    model = dataclasses.replace(params, draft=draft), config
    run = decoding.run(requests(), DraftModel(draft_config, config, 3), model=model)
    assert compare(run, written) < 8
    assert sum(records[-1].statistics.num_drafts for records in run.records.values()) > 100


OPTIONS = [
    ("Mistral, sliding", {"sliding_window": 7}),
    ("Qwen2, some layers slide", {"sliding_layers": (0,)}),
    ("Llama, yarn", {"rope_scaling": {"high_frequency_factor": 1.0}}),
    ("Qwen3, yarn with scales", {"rope_scaling": {"attention_factor": 1.1}}),
    ("Mixtral", {"renormalize_experts": False}),
    ("Qwen3-MoE", {"experts_per_token": 2}),
    ("Gemma 2", {"attention_softcap": 3.1}),
    ("Gemma 2", {"logit_softcap": 8.1}),
    ("Gemma 3", {"sliding_rope_theta": 9000.0}),
    ("Gemma 3", {"attention_scale": 12**-0.5}),
    ("Gemma 3", {"activation": "silu"}),
    ("Gemma 3, yarn, capped", {"sliding_layers": (0, 1)}),
]


def arrays(ids):
    tokens = np.array([ids], np.int32)
    return tokens, np.arange(len(ids), dtype=np.int32)[None]


def forward(params, config, ids, jit=jax.jit):
    cache = init_cache(config, 1, 64)
    return jit(llama.forward, static_argnums=1)(params, config, *arrays(ids), cache)[0]


def logits(params, config, ids, jit=jax.jit):
    return np.asarray(llama.logits(params, config, forward(params, config, ids, jit))[0])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "change"), OPTIONS, ids=str)
def test_every_option_of_a_family_shows(family, change, tmp_path):
    """Negative control: the reference is not that of a configuration that is a little off."""
    written = checkpoints.build(family)
    params, config = load_model(checkpoints.write(tmp_path, written), dtype="float32")
    ids = PROMPTS[2]
    want = reference_logits(written, ids)
    if scaling := change.get("rope_scaling"):
        change = {"rope_scaling": dataclasses.replace(config.rope_scaling, **scaling)}
    for one, fits in ((config, True), (dataclasses.replace(config, **change), False)):
        off = np.abs(logits(params, one, ids, quick_compile.jit) - want).max()
        assert off <= TOLERANCE if fits else off > 10 * TOLERANCE


def test_the_comparison_notices_another_model(tmp_path):
    """Negative control: a weight that is 1 % off is noticed."""
    written = checkpoints.build("Llama 3.1")
    checkpoints.write(tmp_path, written)
    run = decoding.run(requests(), "ngram", model=load_model(tmp_path, dtype="float32"))
    with torch.no_grad():
        written.model.layers[0].self_attn.v_proj.weight *= 1.01
    with pytest.raises(AssertionError):
        compare(run, written)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_16_bits_on_disk_are_computed_exactly_in_32(stored, tmp_path):
    checkpoints.write(tmp_path, checkpoints.build("Qwen3"), dtype=stored)
    reference = checkpoints.read(tmp_path)
    params, config = load_model(tmp_path, dtype="float32")
    assert config.dtype == "float32"
    compare(decoding.run(requests(), "ngram", model=(params, config)), reference)


def test_bfloat16_arithmetic_stays_near_the_reference(tmp_path):
    checkpoints.write(tmp_path, checkpoints.build("Llama 3.2, tied"), dtype=torch.bfloat16)
    reference = checkpoints.read(tmp_path)
    params, config = load_model(tmp_path)
    assert config.dtype == "bfloat16"  # the file's
    ids = PROMPTS[2]
    want = reference_logits(reference, ids)
    got = logits(params, config, ids).astype(np.float64)
    assert 0 < np.abs(got - want).max() < 0.1 * want.std() + 0.1
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("copies", [True, False])
def test_an_mtp_head_in_deepseeks_layout_equals_torch_modules(copies, tmp_path):
    written = checkpoints.build("Llama 3")
    checkpoints.write(tmp_path, written)
    head = checkpoints.add_mtp(tmp_path, written, copies=copies)
    params, config = load_model(tmp_path, dtype="float32")
    ids = PROMPTS[2]
    tokens, positions = arrays(ids)
    hidden = forward(params, config, ids)
    out, _ = jax.jit(mtp.mtp_forward, static_argnums=1)(
        params, config, hidden[:, :-1], tokens[:, 1:], positions[:, :-1],
        init_mtp_cache(config, 1, 64),
    )  # fmt: skip
    got = jax.nn.log_softmax(llama.logits(params, config, out)[0])
    with torch.no_grad():
        inner = written.model(torch.tensor([ids])).last_hidden_state
        embedded = written.model.embed_tokens(torch.tensor([ids]))
        expected = head(inner[:, :-1], embedded[:, 1:])
        want = torch.log_softmax(written.lm_head(expected)[0].double(), -1).numpy()
        shifted = head(inner[:, :-1], embedded[:, :-1])  # negative control: another token
    np.testing.assert_allclose(np.asarray(got), want, atol=TOLERANCE, rtol=0)
    assert (shifted - expected).abs().max() > 0.1


def test_our_sizes_agree_with_transformers(tmp_path):
    for index, family in enumerate(checkpoints.FAMILIES):
        written = checkpoints.build(family)
        params, config = load_model(checkpoints.write(tmp_path / str(index), written))
        weights = sum(parameter.numel() for parameter in written.parameters())  # tied once
        assert config.num_parameters == weights == sum(x.size for x in jax.tree.leaves(params))
        assert dataclasses.replace(config) == config

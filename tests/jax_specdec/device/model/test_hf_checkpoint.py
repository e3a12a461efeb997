"""Hugging Face directories come back as they were written; errors name what is wrong with one.

That the layout is the real one is shown by `tests/hf`, where transformers writes the files.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig, cache_bytes
from jax_specdec.device.model import llama, mtp
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.hf_weights import aligned_zeros, load_weights, needed_bytes
from jax_specdec.device.model.memory import GIB, InsufficientMemory, check_memory, host_bytes
from jax_specdec.device.model.params import init_cache, init_mtp_cache, init_params
from tests.support import hf_files, quick_compile, reference_model
from tests.support.processes import output_of

CONFIG = hf_files.CONFIGS["llama"]
MTP = hf_files.CONFIGS["llama with an MTP head"]
TIED = hf_files.CONFIGS["llama 3.1, tied"]


@pytest.fixture
def directory(tmp_path):
    return hf_files.write(tmp_path / "model", CONFIG)


@pytest.mark.parametrize(
    ("name", "files"), [(name, 1 + 2 * (n % 2)) for n, name in enumerate(hf_files.CONFIGS)]
)
def test_round_trip(name, files, tmp_path):
    config = hf_files.CONFIGS[name]
    params = hf_files.random_params(config)
    told = []
    directory = hf_files.write(tmp_path, config, params, shards=files)
    loaded, found = load_model(directory, tell=lambda *counts: told.append(counts))
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert told == [(number, told[-1][1]) for number in range(told[-1][1] + 1)]
    assert told[-1][1] >= len(jax.tree.leaves(params))  # layers are tensors of their own there


def test_a_cpu_reads_weights_without_programs_or_copies(directory, caplog):
    params = load_weights(open_model(directory))  # what the shapes are asked by is traced here
    with jax.log_compiles():
        again = load_weights(open_model(directory))
        assert "Finished XLA compilation" not in caplog.text
        jax.block_until_ready(params.embedding + len(caplog.text))
    assert "Finished XLA compilation" in caplog.text  # it would be said
    jax.tree.map(np.testing.assert_array_equal, again, params)
    with pytest.MonkeyPatch.context() as patch:  # what another device's leaves are written by
        patch.setattr(jax, "default_backend", lambda: "gpu")
        jax.tree.map(np.testing.assert_array_equal, load_weights(open_model(directory)), params)
    host = aligned_zeros((3, 5), np.dtype(jnp.bfloat16))
    assert jax.device_put(host).unsafe_buffer_pointer() == host.ctypes.data


@pytest.mark.parametrize(
    ("stored", "chosen", "expected"),
    [
        ("bfloat16", "", "bfloat16"), ("bfloat16", "float32", "float32"),
        ("float16", "", "float32"), ("float16", "bfloat16", "bfloat16"),
        ("float32", "", "float32"), ("float32", "bfloat16", "bfloat16"),
    ],
)  # fmt: skip
def test_any_type_on_disk_any_type_to_compute_in(stored, chosen, expected, tmp_path):
    params = hf_files.random_params(CONFIG)
    hf_files.write(tmp_path, CONFIG, params, dtype=stored, fields={"torch_dtype": stored})
    loaded, config = load_model(tmp_path, dtype=chosen)
    assert config.dtype == expected
    types = jnp.dtype(stored), jnp.dtype(expected)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(types[0]).astype(types[1]), params)
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {jnp.dtype(expected)}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("config", "copy", "original", "message"),
    [
        (MTP, "model.layers.2.embed_tokens.weight", "model.embed_tokens.weight", "differs from"),
        (MTP, "model.layers.2.shared_head.head.weight", "lm_head.weight", "differs from lm_head"),
        (TIED, "lm_head.weight", "model.embed_tokens.weight", "differs from model.embed_tokens"),
        # Old checkpoints store a constant, which is left out.
        (MTP, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight", None),
    ],
)
def test_a_copy_that_is_stored_too_must_be_a_copy(config, copy, original, message, tmp_path):
    params = hf_files.random_params(config)
    tensors = hf_files.hf_tensors(config, params)
    for factor in (1, 2):
        tensors[copy] = tensors[original] * factor
        hf_files.write(tmp_path, config, tensors=tensors)
        if message is None or factor == 1:
            loaded, found = load_model(tmp_path)
            jax.tree.map(np.testing.assert_array_equal, loaded, params)
            assert found == config
        else:
            with pytest.raises(CheckpointError, match=rf"{copy} {message}"):
                load_model(tmp_path)


@pytest.mark.fast
def test_a_file_that_changes_between_header_and_weights_is_named(directory):
    model = open_model(directory)
    (directory / "model.safetensors").write_bytes(b"gone")
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight \[40, 16\] cannot be r"):
        load_weights(model)


# Memory ----------------------------------------------------------------------------------------


@pytest.mark.fast
def test_too_little_memory_is_said_before_anything_is_read(directory, monkeypatch):
    model = open_model(directory)
    needed = needed_bytes(model, 4, 64)
    monkeypatch.setattr("jax_specdec.device.model.memory.available_bytes", lambda _: needed - 1)
    monkeypatch.setattr("jax_specdec.device.model.hf_weights.tensor_array", None)
    with pytest.raises(InsufficientMemory, match=r"needs 0.00 GiB in float32.*dtype bfloat16"):
        load_weights(model, num_slots=4, max_length=64)
    monkeypatch.undo()
    monkeypatch.setattr("jax_specdec.device.model.memory.available_bytes", lambda _: needed)
    load_weights(model, num_slots=4, max_length=64)


@pytest.mark.fast
def test_the_error_names_sizes_and_a_way_out():
    message = r"x needs 3.00 GiB in bfloat16, with its caches; available are 2.00 GiB: choose fewer"
    with pytest.raises(InsufficientMemory, match=message):
        check_memory(3 * GIB, "x", "bfloat16", available=2 * GIB)
    check_memory(2 * GIB, "x", "bfloat16", available=2 * GIB)


@pytest.mark.fast
def test_what_is_needed_is_what_is_made(directory):
    model = open_model(directory)
    largest = 4 * 40 * 16  # the embedding, in the file
    weights = 4 * CONFIG.num_parameters
    assert needed_bytes(model, 0, 0) == weights + largest
    caches = [init_cache(MTP, 3, 20), init_mtp_cache(MTP, 3, 20)]
    made = sum(x.nbytes for x in jax.tree.leaves(caches))
    assert cache_bytes(MTP, 3, 20) == made


@pytest.mark.fast
def test_the_memory_of_a_control_group_counts(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    group = "sys/fs/cgroup/memory."
    write(f"{group}stat", "anon 1000000\ninactive_file 300000\n")
    for name, text, expected in (
        ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:  4000 kB\n", 4000 * 1024),
        (f"{group}max", "max\n", 4000 * 1024),
        (f"{group}current", "1500000\n", 4000 * 1024),
        (f"{group}max", "2000000\n", 800_000),
        (f"{group}current", "9000000\n", 0),
    ):
        write(name, text)
        assert host_bytes(tmp_path) == expected


@pytest.mark.slow
def test_loading_takes_about_one_copy_of_the_weights(tmp_path):
    """The peak memory of a process, less its peak without the weights."""
    config = ModelConfig.tiny(
        512, hidden_size=512, num_layers=24, intermediate_size=1536, num_heads=8, head_dim=64,
        tie_embeddings=False, num_mtp_layers=0, dtype="bfloat16",
    )  # fmt: skip
    zeros = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), zeros)
    hf_files.write(tmp_path, config, params)
    size = 2 * config.num_parameters
    assert size > 100e6
    code = """if True:
        import sys, jax
        from jax_specdec.device.model.checkpoint import load_model

        def most():  # bytes that this process ever held
            status = dict(line.split(":", 1) for line in open("/proc/self/status"))
            return 1024 * int(status["VmHWM"].split()[0])

        load_model()  # the packages of everything, and jax's own memory
        before = most()
        kept = jax.block_until_ready(load_model(sys.argv[1]))
        once = most() - before
        again = jax.block_until_ready(load_model(sys.argv[1]))
        print(once, most() - before)
    """
    once, twice = map(int, output_of(code, tmp_path).split())
    assert size < once < 1.5 * size  # compiling takes some memory, too
    assert twice > 1.9 * size  # the control: a second copy shows


# MiMo's own MTP head, from files with its names --------------------------------------------------

TOLERANCE = 1e-4
MIMO = hf_files.CONFIGS["mimo"]
SIZES = MIMO.to_dict()
IDS = np.random.default_rng(3).integers(0, MIMO.vocab_size, 11).astype(np.int32)
LAYER = {
    "attention_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight",
    "query": "self_attn.q_proj.weight", "query_bias": "self_attn.q_proj.bias",
    "key": "self_attn.k_proj.weight", "key_bias": "self_attn.k_proj.bias",
    "value": "self_attn.v_proj.weight", "value_bias": "self_attn.v_proj.bias",
    "output": "self_attn.o_proj.weight", "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip
HEAD = {
    "hidden_norm": "hidden_layernorm.weight", "token_norm": "token_layernorm.weight",
    "projection": "input_proj.weight", "final_norm": "final_layernorm.weight",
}  # fmt: skip


def named(directory):
    """The weights by the names of `reference_model`, which reads them by those in the file.

    As https://github.com/XiaomiMiMo/MiMo, modeling_mimo.py, has it (Qwen2's layers, and
    `MiMoMTPLayers`); and vLLM's mimo.py and mimo_mtp.py, also by Xiaomi, for what the head is fed:
    hidden states before the decoder's final norm, and embeddings of the next tokens.
    """
    tensors = load_file(directory / "model.safetensors")
    get = {name: value.astype(np.float64).T for name, value in tensors.items()}
    layers, head = range(MIMO.num_layers), "model.mtp_layers.0"
    return {
        "embedding": get["model.embed_tokens.weight"].T,
        "final_norm": get["model.norm.weight"],
        "head": get["lm_head.weight"],
        **{f"layers.{leaf}": np.stack([get[f"model.layers.{at}.{name}"] for at in layers])
           for leaf, name in LAYER.items()},
        **{f"mtp.layers.{leaf}": get[f"{head}.{name}"][None] for leaf, name in LAYER.items()},
        **{f"mtp.{leaf}": get[f"{head}.{name}"] for leaf, name in HEAD.items()},
    }  # fmt: skip


@pytest.mark.fast
def test_decoder_and_head_agree_with_the_reference(tmp_path):
    directory = hf_files.write(tmp_path, MIMO)
    weights, (params, config) = named(directory), load_model(directory)
    assert config == MIMO

    @quick_compile.jit
    def run(ids, rows):
        hidden, _ = llama.forward(params, config, ids, rows, init_cache(config, 1, 16))
        out, _ = mtp.mtp_forward(
            params, config, hidden[:, :-1], ids[:, 1:], rows[:, :-1], init_mtp_cache(config, 1, 16)
        )
        return llama.logits(params, config, hidden)[0], llama.project(params, config, out)[0]

    rows = jnp.arange(len(IDS), dtype=jnp.int32)[None]
    target, drafts = map(np.asarray, run(jnp.asarray(IDS)[None], rows))
    want = reference_model.logits(weights, SIZES, IDS)
    np.testing.assert_allclose(target, want, atol=TOLERANCE, rtol=0)
    # The hidden states before the final norm, and behind it.
    body, normed = weights["embedding"][IDS], reference_model.hidden_states(weights, SIZES, IDS)
    for index in range(MIMO.num_layers):
        body = reference_model._layer(weights, "layers.", index, SIZES, body)

    def said(hidden, next_ids):
        return reference_model.mtp_hidden(weights, SIZES, hidden, next_ids) @ weights["head"]

    want = said(body[:-1], IDS[1:])
    np.testing.assert_allclose(drafts, want, atol=TOLERANCE, rtol=0)
    # Negative controls: what the head would say if it were fed otherwise.
    for fed, tokens in ((normed[:-1], IDS[1:]), (body[:-1], IDS[:-1])):
        assert np.abs(said(fed, tokens) - want).max() > 100 * TOLERANCE

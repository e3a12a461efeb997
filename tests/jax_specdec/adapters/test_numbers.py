"""The adapters' numbers, without their peers: what each call must give, in float64."""

import sys
from collections import namedtuple
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.adapters import maxtext, maxtext_heads, sglang_jax, tpu_inference, tunix
from jax_specdec.adapters.heads import ModelHead, linear_logprobs

V, H = 37, 6
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def log_softmax(logits):
    """[..., V] in float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def normal(*shape, scale=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


# --- tpu-inference ---


def spec_decode_metadata(dp_size, requests, lengths, num_drafts):
    """Of `dp_size` shards with padded arrays: their requests, and each one's drafts."""
    most = max(map(len, lengths))
    padded = [row + [0] * (most - len(row)) for row in lengths]
    return SimpleNamespace(
        final_logits_indices=np.zeros(dp_size * num_drafts, np.int32),
        draft_lengths_cpu=np.concatenate(padded),
        req_indices_dp=dict(enumerate(requests)),
    )


@pytest.mark.parametrize("dp_size", [1, 2])
def test_logprobs_of_accepted_drafts_come_request_by_request(dp_size):
    """Not those of rejected drafts (-1), of ids beyond the vocabulary, of padding."""
    # Three drafts of request 0 and one of request 1, a row of padding; then their bonus tokens.
    own = [4, -1, V, V - 1, 5, 0, V + 6]
    ids = np.array(own + [own[3], 2, 6, -1, 7, 1, -1][: 7 * (dp_size - 1)])
    requests, lengths = [[0, 1], [3, 2]][:dp_size], [[3, 1], [0, 2]][:dp_size]
    metadata = spec_decode_metadata(dp_size, requests, lengths, num_drafts=5)
    table = np.stack([ids, np.arange(len(ids))], axis=1)
    ranks = np.arange(len(ids)) + 100
    # Of the second shard: its first two rows are request 2's drafts, rows 12 and 13 the bonuses.
    expected = {1: ([0, 5, 3], [0, 2, 3]), 2: ([0, 5, 3, 7, 8, 12], [0, 2, 3, 5, 6])}[dp_size]
    num_requests = 2 * dp_size
    for vocab_size, rows, starts in ((V, *expected), (V + 7, None, None)):
        tokens, logprobs, kept_ranks, ends = tpu_inference.filter_speculative_logprobs(
            table, table * 0.5, ranks, metadata, vocab_size, dp_size, num_requests
        )
        if rows is None:  # nothing but -1 is filtered: the rows of V and V + 6 are kept too
            assert sorted(tokens[:, 1].tolist()) == sorted({*expected[0]} | {2, 6})
            continue
        assert tokens[:, 1].tolist() == rows
        np.testing.assert_array_equal(logprobs, table[rows] * 0.5)
        np.testing.assert_array_equal(kept_ranks, ranks[rows])
        assert ends == starts


# What vLLM's has.
COLUMNS = "logprob_token_ids", "logprobs", "selected_token_ranks"
LogprobsTensors = namedtuple("LogprobsTensors", COLUMNS)


@pytest.mark.parametrize("name", ["", "prompt_"])
@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_of_next_tokens_have_inclusive_ranks(name, k, monkeypatch):
    for module in ("vllm", "vllm.v1", "vllm.v1.outputs"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    sys.modules["vllm.v1.outputs"].LogprobsTensors = LogprobsTensors
    logits = np.round(normal(5, V, scale=2))  # with ties
    tokens = np.array([3, -1, 0, V - 1, -1])
    call = getattr(tpu_inference, f"compute_and_gather_{name}logprobs")
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        found = call(jnp.asarray(logits), jnp.asarray(tokens), k)
    for jitted in (call, tpu_inference.compute_and_gather_logprobs):
        jitted.clear_cache()  # no program keeps the stand-in
    exact = log_softmax(logits)
    for row, token in enumerate(tokens):
        ids, values = (np.asarray(x)[row] for x in found[:2])
        rank = int(found.selected_token_ranks[row])
        if token < 0:
            assert (ids == -1).all()
            assert np.isnan(values).all()
            assert rank == 0
            continue
        order = np.lexsort((np.arange(V), -logits[row]))[:k]
        assert ids.tolist() == [token, *order]
        np.testing.assert_allclose(values, exact[row, ids], **CLOSE)
        assert rank == (logits[row] >= logits[row, token]).sum()


# --- sglang-jax ---

TEMPERATURES = np.array([[1.0], [0.5], [2.0]], np.float32)


@pytest.mark.parametrize("all_greedy", [False, True])
@pytest.mark.parametrize("penalty", [None, normal(3, V, seed=2)], ids=["none", "penalties"])
@pytest.mark.parametrize(
    ("nums", "named"),
    [
        (None, None),
        ([0, 0, 0], [None] * 3),
        ([2, 0, 5], None),
        ([0, 0, 0], [[3], None, [0, V - 1, 4]]),
        ([1, 4, 0], [[3], [], [0, V - 1]]),
    ],
)
def test_logprobs_are_of_the_temperature_unless_all_are_greedy(nums, named, penalty, all_greedy):
    """After penalties; the same from the read without a rank, the one with, and blocks of rows."""
    logits, tokens = normal(3, V, scale=2), np.array([5, 0, V - 1])
    asked = SimpleNamespace(
        top_logprobs_nums=nums, token_ids_logprobs=named, temperatures=jnp.asarray(TEMPERATURES),
        is_all_greedy=jnp.asarray(all_greedy), do_penalties=penalty is not None,
        linear_penalty=jnp.zeros((3, V)) if penalty is None else jnp.asarray(penalty),
    )  # fmt: skip
    scaled = logits + (0 if penalty is None else penalty)
    exact = log_softmax(scaled if all_greedy else scaled / TEMPERATURES)
    output = SimpleNamespace(next_token_logits=jnp.asarray(logits))
    sglang_jax.add_logprobs(output, asked, jnp.asarray(tokens))
    found = vars(output)
    np.testing.assert_allclose(found["next_token_logprobs"], exact[range(3), tokens], **CLOSE)
    assert ("next_token_top_logprobs_val" in found) == any(nums or ())
    for row, count in enumerate(nums if any(nums or ()) else ()):
        order = np.argsort(-exact[row])[:count]
        assert found["next_token_top_logprobs_idx"][row] == order.tolist()
        np.testing.assert_allclose(
            found["next_token_top_logprobs_val"][row], exact[row, order], **CLOSE
        )
    is_named = any(ids is not None for ids in named or ())
    assert ("next_token_token_ids_logprobs_val" in found) == is_named
    for row, ids in enumerate(named if is_named else ()):
        assert found["next_token_token_ids_logprobs_idx"][row] == (ids or [])
        np.testing.assert_allclose(
            found["next_token_token_ids_logprobs_val"][row], exact[row, ids or []], **CLOSE
        )


def test_many_logits_without_a_rank_are_read_as_others(monkeypatch):
    logits, tokens = jnp.asarray(normal(3, V, scale=2)), jnp.array([5, 0, V - 1])
    given = tokens, None, jnp.asarray(TEMPERATURES), jnp.asarray(False), np.zeros((3, 0), np.int32)
    once = sglang_jax._read(logits, *given, 0)
    monkeypatch.setattr(sglang_jax, "MOST_AT_ONCE", 3 * V - 1)
    in_blocks = sglang_jax._read.__wrapped__(logits, *given, 0)
    exact = log_softmax(np.asarray(logits) / TEMPERATURES)[range(3), tokens]
    for found in (once, in_blocks):
        np.testing.assert_allclose(found[0], exact, **CLOSE)
        assert [x.shape for x in found[1:]] == [(3, 0)] * 3


# --- tunix ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_entropies_and_their_gradients(dtype):
    """A token of -inf adds nothing, and has no gradient; nor has a row without an entropy."""
    logits = normal(2, 3, V, scale=2)
    logits[0, 1, 4:9] = -np.inf
    logits[1, 2, 0] = np.nan
    rows = jnp.asarray(logits, dtype)
    change = jnp.asarray(normal(2, 3, seed=1), dtype)
    found, pull = jax.vjp(tunix.compute_entropy_from_logits, rows)
    (gradient,) = pull(change)
    assert (found.shape, found.dtype, gradient.dtype) == ((2, 3), dtype, dtype)
    logp = log_softmax(np.asarray(rows, np.float32))
    p = np.exp(logp)
    terms = np.where(p > 0, p * np.where(np.isneginf(logp), 0, logp), 0 * logp[..., :1])
    entropy = -terms.sum(axis=-1)
    entropy[1, 2] = np.nan
    slack = {"rtol": 1e-2, "atol": 1e-2} if dtype == jnp.bfloat16 else CLOSE
    np.testing.assert_allclose(np.asarray(found, np.float32), entropy, **slack)
    of_token = np.where(p > 0, np.where(np.isneginf(logp), 0, logp), 0) + entropy[..., None]
    expected = -p * of_token * np.asarray(change, np.float32)[..., None]
    expected = np.nan_to_num(expected)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), expected, **slack)


@pytest.mark.parametrize("axes", ["VH", "HV"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_logprobs_of_a_head_are_those_of_its_logits(axes, temperature, soft_cap):
    """A temperature of 0 divides nothing, as tunix has it; negative ids count from the end."""
    hidden, weight = normal(2, 3, H), normal(V, H, seed=1)
    ids = np.array([[0, V - 1, -1], [-V, 7, 20]])
    given = jnp.asarray(weight if axes == "VH" else weight.T)
    head = ModelHead(given, axes, None, soft_cap)
    (found,) = linear_logprobs(jnp.asarray(hidden), head, jnp.asarray(ids), temperature)
    logits = np.float64(hidden) @ np.float64(weight).T
    if soft_cap is not None:
        logits = np.tanh(logits / soft_cap) * soft_cap
    exact = log_softmax(logits / (temperature or 1.0))
    np.testing.assert_allclose(found, np.take_along_axis(exact, ids[..., None], 2)[..., 0], **CLOSE)


def test_a_call_that_asks_for_logits_is_refused():
    with pytest.raises(NotImplementedError, match="return_logits=True asks for"):
        tunix.compute_per_token_logps(0, 0, jnp.zeros(1), jnp.zeros(1), 0, 1, return_logits=True)


# --- MaxText ---


@pytest.mark.parametrize("axes", ["VH", "HV"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.25, "soft_cap": 2.0}], ids=["plain", "capped"])
def test_top_k_logits_are_the_logits_themselves(axes, dtype, options):
    """Not their logprobs; of equal ones the first."""
    rng = np.random.default_rng(3)  # products of quarters are exact: equal ones are ties
    hidden, weight = rng.integers(-8, 8, (2, 3, H)) / 4, rng.integers(-8, 8, (V, H)) / 4
    head = weight if axes == "VH" else weight.T
    values, ids = maxtext.top_k_logits(
        jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), 5, logits_dtype=dtype,
        head_axes=axes, **options,
    )  # fmt: skip
    assert (values.shape, values.dtype, ids.dtype) == ((2, 3, 5), jnp.dtype(dtype), jnp.int32)
    logits = hidden @ weight.T * options.get("scale", 1.0)
    if "soft_cap" in options:
        logits = np.tanh(logits / 2.0) * 2.0
    logits = np.asarray(jnp.asarray(logits, dtype), np.float64)
    exact = np.take_along_axis(logits, np.asarray(ids), axis=2)
    slack = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bfloat16" else CLOSE
    np.testing.assert_allclose(np.asarray(values, np.float32), exact, **slack)
    largest = -np.sort(-logits, axis=2)[..., :5]
    np.testing.assert_allclose(exact, largest, **slack)
    if not options:
        order = np.argsort(-logits, axis=2, kind="stable")[..., :5]
        np.testing.assert_array_equal(ids, order)


SERVED = {
    "normalize_embedding_logits": False, "final_logits_soft_cap": 0.0, "mtp_num_layers": 0,
    "num_vocab_tiling": 1, "parameter_memory_host_offload": False, "logits_via_embedding": False,
    "logits_dot_in_fp32": False, "shard_mode": SimpleNamespace(value="auto"),
}  # fmt: skip
REFUSED = {
    "mtp_num_layers": {"mtp_num_layers": 1},
    "num_vocab_tiling": {"num_vocab_tiling": 2},
    "parameter_memory_host_offload": {"parameter_memory_host_offload": True},
    "shard_mode=explicit": {"shard_mode": SimpleNamespace(value="explicit")},
    "without logits_dot_in_fp32": {"logits_via_embedding": True, "final_logits_soft_cap": 3.0},
    "normalize_embedding_logits": {
        "logits_via_embedding": True, "normalize_embedding_logits": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, "quantization"])
def test_a_teacher_that_is_not_served_is_refused_by_name(name):
    maxtext_heads.check_model(SimpleNamespace(config=SimpleNamespace(**SERVED), quant=None))
    config = SimpleNamespace(**SERVED | REFUSED.get(name, {}))
    quant = object() if name == "quantization" else None
    with pytest.raises(NotImplementedError, match=name):
        maxtext_heads.check_model(SimpleNamespace(config=config, quant=quant))


@pytest.mark.parametrize(
    "changes",
    [
        {"final_logits_soft_cap": 3.0},
        {"logits_via_embedding": True},
        {"logits_via_embedding": True, "final_logits_soft_cap": 3.0, "logits_dot_in_fp32": True},
    ],
)
def test_a_teacher_that_is_served_is_not_refused(changes):
    config = SimpleNamespace(**SERVED | changes)
    maxtext_heads.check_model(SimpleNamespace(config=config, quant=None))

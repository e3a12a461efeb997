"""The tokens of tpu-inference's adapter without tpu-inference: exact ones, and laws of others."""

import dataclasses
import functools
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

from jax_specdec.adapters import tpu_inference
from jax_specdec.adapters.tpu_inference import RejectionSampler, process_and_extend_logits, sample
from jax_specdec.adapters.tpu_inference_rows import Lengths
from tests.support.shards import automatic

V = 5
PACKAGE = "tpu_inference.layers"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p"],
    meta_fields=["do_sampling"],
)
@dataclasses.dataclass
class Metadata:
    """What theirs says of how requests are sampled."""

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    do_sampling: bool = False


@pytest.fixture(autouse=True)
def named_axes(monkeypatch):
    """The modules that tell the names of mesh axes, and which logits may stay unprocessed."""
    axes = SimpleNamespace(ATTN_DATA="data", MLP_TENSOR=("data", "model"))
    for name, contents in (
        ("common.sharding", {"ShardingAxisName": axes}),
        ("jax.sample.sampling",
         {"_distributed_sampling_fits": lambda mesh, size: mesh.shape["model"] > 1}),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", SimpleNamespace(**contents))


mesh_of = functools.cache(lambda data, model: automatic(data=data, model=model))


@functools.cache  # a program is kept by its sampler
def sampler(data=1, model=1):
    return RejectionSampler(mesh_of(data, model))


def options(temperature, top_k=0, top_p=1.0, number=None):
    numbers = (
        jnp.broadcast_to(jnp.asarray(x, dtype), np.shape(temperature) if number is None else number)
        for x, dtype in ((temperature, jnp.float32), (top_k, jnp.int32), (top_p, jnp.float32))
    )
    return Metadata(*numbers, do_sampling=True)


def expected_of(drafts, num, best, bonus, width):
    """Greedy tokens of one shard, request by request."""
    tokens, ends, first = [], [], 0
    for count, own_bonus in zip(num, bonus, strict=True):
        right = [drafts[i] == best[i] for i in range(first, first + count)]
        accepted = right.index(False) if False in right else count
        emitted = [best[first + i] if i <= accepted else -1 for i in range(count)]
        tokens += emitted
        ends.append(own_bonus if accepted == count else -1)
        first += count
    return [*tokens, *[-1] * (width - len(tokens)), *ends]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_greedy_drafts_of_ragged_requests(shape, dtype):
    """Requests of any number of drafts, none too; padding; each data shard its own."""
    rng, width, shards = np.random.default_rng(1), 12, shape[0]
    for num in ([3, 0, 5, 1], [0, 0, 0, 0], [12, 0, 0, 0], [0, 4, 4, 4]):
        logits = rng.normal(size=(shards * width, 8)).astype(np.float32)
        best = np.asarray(jnp.asarray(logits, dtype)).argmax(axis=1).astype(np.int32)
        drafts = np.where(rng.random(best.size) < 0.7, best, (best + 1) % 8).astype(np.int32)
        bonus = np.arange(4 * shards, dtype=np.int32)
        tokens = sampler(*shape)(
            drafts, np.tile(np.int32(num), shards), None, jnp.asarray(logits, dtype), bonus,
            Metadata(),
        )  # fmt: skip
        parts = (np.split(x, shards) for x in (drafts, best, bonus))
        expected = [
            expected_of(drafts, num, best, bonus, width)
            for drafts, best, bonus in zip(*parts, strict=True)
        ]
        np.testing.assert_array_equal(np.asarray(tokens).reshape(shards, -1), expected)


LOGITS = np.log(np.float32([[0.4, 0.3, 0.15, 0.1, 0.05], [0.1, 0.2, 0.3, 0.3, 0.1]]))
Q = np.float32([[0.1, 0.2, 0.3, 0.35, 0.05], [0.5, 0.1, 0.1, 0.1, 0.2]])


def processed(logits, temperature, top_k, top_p):
    """Probabilities [V] in float64: divided, then cut."""
    x = np.float64(logits) / temperature
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    order = np.argsort(-p, kind="stable")[: top_k or V]
    kept = p[order] / p[order].sum()
    order = order[np.cumsum(kept) - kept < top_p]
    cut = np.zeros(V)
    cut[order] = p[order]
    return cut / cut.sum()


def p_value(tokens, p):
    observed = np.bincount(tokens, minlength=V)
    assert not observed[p == 0].any()
    return scipy.stats.chisquare(observed[p > 0], len(tokens) * p[p > 0]).pvalue


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("asked", [(1.0, 0, 1.0), (0.6, 4, 0.9)], ids=["plain", "cut"])
def test_sampled_drafts_have_the_law_of_the_target(dense, asked):
    """Two drafts of each request, drawn from q or always the same; the second follows the first."""
    number = 6_000
    rng = np.random.default_rng(3)
    drafts = np.stack([rng.choice(V, number, p=q / q.sum()) for q in Q], axis=1).astype(np.int32)
    if not dense:
        drafts[:] = [1, 2]
    result = sampler()(
        drafts.reshape(-1), np.full(number, 2, np.int32),
        np.tile(Q, (number, 1)) if dense else None, np.tile(LOGITS, (number, 1)),
        np.full(number, 9, np.int32), options(*asked, number=number), jax.random.key(5),
    )  # fmt: skip
    tokens, bonus = np.split(np.asarray(result), [2 * number])
    tokens = tokens.reshape(-1, 2)
    first, second = (processed(row, *asked) for row in LOGITS)
    agrees = tokens[:, 0] == drafts[:, 0]
    assert p_value(tokens[:, 0], first) > 1e-4
    assert p_value(tokens[agrees, 1], second) > 1e-4
    # The test sees another law.
    other = second if asked[0] == 1 else processed(LOGITS[0], 1, 4, 0.9)
    assert p_value(tokens[:, 0], other) < 1e-9
    # Nothing behind a rejection, and a bonus token where there is none.
    assert (tokens[~agrees, 1] == -1).all()
    np.testing.assert_array_equal(bonus, np.where(agrees & (tokens[:, 1] == drafts[:, 1]), 9, -1))
    accepted = np.minimum(first, Q[0] / Q[0].sum()).sum() if dense else first[1]
    assert abs(agrees.mean() - accepted) < 0.03


@pytest.mark.long
def test_shards_draw_apart_and_a_split_vocabulary_alike():
    rng, number = np.random.default_rng(2), 40
    rows, probs = (
        np.tile(rng.dirichlet(np.ones(8), 20).astype(np.float32), (2, 1)) for _ in range(2)
    )
    drafts = np.tile(rows[:20].argmax(1), 2).astype(np.int32)
    arguments = (
        drafts, np.ones(number, np.int32), probs, np.log(rows), np.zeros(number, np.int32),
        options(1.0, number=number), jax.random.key(1),
    )  # fmt: skip
    drawn = [np.asarray(sampler(*shape)(*arguments))[:number] for shape in ((2, 1), (2, 2))]
    np.testing.assert_array_equal(*drawn)
    assert (drawn[0][:20] != drawn[0][20:]).any()


def test_greedy_requests_in_a_sampled_batch_stay_greedy():
    rows = np.tile(np.arange(V, dtype=np.float32), (4, 1))
    drafts = np.int32([4, 1, 4, 4])
    for q in (None, np.full((4, V), 0.2, np.float32)):
        tokens = sampler()(
            drafts, np.int32([2, 2]), q, rows, np.int32([7, 8]), options([-1.0, 0.0]),
            jax.random.key(0),
        )  # fmt: skip
        assert tokens.tolist() == [4, 4, 4, 4, -1, 8]


@pytest.mark.parametrize("asked", [(0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.75), (0.7, 4, 0.5)])
def test_tokens_and_processed_logits_are_of_one_law(asked):
    number, mesh = 4_000, mesh_of(1, 1)
    tokens, logits = sample(
        jax.random.key(2), mesh, np.tile(LOGITS[0], (number, 1)), options(*asked, number=number)
    )
    p = processed(LOGITS[0], *asked)
    np.testing.assert_allclose(jax.nn.softmax(logits[0]), p, atol=1e-6)
    assert (np.asarray(logits[0])[p == 0] == -1e12).all()
    assert p_value(np.asarray(tokens), p) > 1e-4
    lengths = Lengths(jnp.int32([0, 1]))
    two = options([9.0, asked[0]], [0, asked[1]], [1, asked[2]])
    extended = process_and_extend_logits(mesh, LOGITS[:1], logits[:2], lengths, two)
    assert extended.shape == (3, V)
    np.testing.assert_allclose(extended[0], logits[0], rtol=1e-6)
    np.testing.assert_array_equal(extended[1:], logits[:2])


def test_logits_that_nobody_reads_or_that_are_greedy_stay():
    rows, key = np.tile(LOGITS, (2, 2)), jax.random.key(0)
    for mesh, metadata, allowed in (
        (mesh_of(1, 1), Metadata(), False),
        (mesh_of(1, 2), options(0.5, number=4), True),
        (mesh_of(1, 1), options(-1.0, number=4), False),
    ):
        tokens, logits = sample(key, mesh, rows, metadata, allow_distributed_sampling=allowed)
        np.testing.assert_array_equal(logits, rows)
        if not metadata.do_sampling:
            np.testing.assert_array_equal(tokens, rows.argmax(axis=1))
    _, logits = sample(key, mesh_of(1, 2), rows, options(0.5, number=4), False)
    np.testing.assert_allclose(logits, 2 * rows, rtol=1e-6)


def test_draws_need_a_key_and_no_drafts_give_bonus_tokens():
    none, bonus = np.zeros(0, np.int32), np.int32([3])
    with pytest.raises(ValueError, match="random key must be provided"):
        sampler()(np.int32([1]), np.int32([1]), None, LOGITS[:1], bonus, options([1.0]))
    tokens = sampler()(none, np.int32([0]), None, LOGITS[:0], bonus, Metadata())
    assert tokens.tolist() == [3]


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("prompts", [True, False])
def test_install_looks_at_what_it_replaces(tokens, prompts, monkeypatch):
    """Functions that draw and verify may be others where the logprobs alone are replaced."""
    looked, made = [], SimpleNamespace()
    monkeypatch.setattr(tpu_inference, "check_functions", lambda name, names: looked.extend(names))
    monkeypatch.setattr(tpu_inference, "_compare", lambda new: vars(made).update(compared=new))
    monkeypatch.setattr(tpu_inference, "without_refusal", lambda name, message: message)

    def replaced(package, new):
        made.new = new
        raise InterruptedError

    monkeypatch.setattr(tpu_inference, "replaced", replaced)
    with (
        pytest.raises(InterruptedError),
        tpu_inference.install(tokens=tokens, prompt_logprobs=prompts),
    ):
        pass
    names = {*tpu_inference.OF_LOGPROBS, *(tpu_inference.OF_TOKENS if tokens else ())}
    assert set(looked) == names | set(tpu_inference.OF_PROMPTS if prompts else ())
    assert set(made.compared) >= names
    runner = {tpu_inference.RUNNER} if prompts else set()
    assert set(made.new) == names | runner


def test_a_refusal_to_draw_names_the_way_to_logprobs_alone(monkeypatch):
    def check(name, names):
        if set(names) & set(tpu_inference.OF_TOKENS):
            raise ImportError("sample is another function")

    monkeypatch.setattr(tpu_inference, "check_functions", check)
    with (
        pytest.raises(ImportError, match=r"another function; install\(tokens=False\) takes"),
        tpu_inference.install(),
    ):
        pass

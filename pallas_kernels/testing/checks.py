"""Checks of the kernels at one shape against float64; a wrong answer is an AssertionError.

Every check takes `Kernels`: a backend's on its device, or stand-ins, right or wrong ones.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import read
from pallas_kernels.backends.groups import Drawn, ListedRows, Needed, Read, RowPart, RowsToDraw, Top
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs, Rows
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.lowering.implementation import Implementation, use_implementation
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.row_read import emitted_logprobs
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.sampling.types import CompactQ, Drafts, Verified
from pallas_kernels.sampling.verification import verify
from pallas_kernels.testing import draws, oracle
from pallas_kernels.testing.shapes import Shape
from pallas_kernels.topk.call import topk_of_whole_rows

ORACLE_ROWS = 8  # that are compared with float64; all rows are with XLA
SUM_ERROR = 3e-6  # of a group's sum, relative: see docs/kernels.md, "Where the error comes from"


@dataclass(frozen=True)
class Kernels:
    """How each kernel is called: functions of arrays."""

    topk: Callable[[Rows, Outputs], TopkLogprobs]
    groups: Callable[[RowPart, jax.Array, jax.Array, int], Read]
    candidates: Callable[[jax.Array, jax.Array, jax.Array, int], Top]
    draw: Callable[[jax.Array, RowsToDraw, tuple[int, int]], Drawn]
    num_larger: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    name: Implementation  # under which `verify` takes them


def by_name(name: Implementation) -> Kernels:
    """The kernels of a backend as every call takes them, on a device that can run them."""

    def drawn(logits: jax.Array, to_draw: RowsToDraw, purposes: tuple[int, int]) -> Drawn:
        def no_draw(_: Any) -> Drawn:  # where XLA would draw, the check fails
            slots = len(to_draw.rows)
            return Drawn(jnp.zeros(slots), jnp.full(slots, -1, jnp.int32))

        with use_implementation(name):
            return read.draw(to_draw, (), purposes, no_draw, logits, lambda drawn, _: drawn)

    def candidates(logits: jax.Array, row_ids: jax.Array, num: jax.Array, k: int) -> Top:
        with use_implementation(name):
            return read.candidates(ListedRows(logits, row_ids, num), k, valid=True)

    def num_larger(logits: jax.Array, maxima: jax.Array, token_ids: jax.Array) -> jax.Array:
        with use_implementation(name):
            return read.num_larger(logits, maxima, token_ids)

    def groups(part: RowPart, inverse: jax.Array, needed: jax.Array, k: int) -> Read:
        with use_implementation(name):
            return read.read_groups(part, inverse, Needed.all_of(needed), k)[0]

    return Kernels(
        topk=functools.partial(_topk, name),
        groups=groups,
        candidates=candidates,
        draw=drawn,
        num_larger=num_larger,
        name=name,
    )


def _topk(name: Implementation, rows: Rows, outputs: Outputs) -> TopkLogprobs:
    with use_implementation(name):
        return topk_of_whole_rows(outputs, rows)


def random_logits(shape: Shape, seed: int) -> jax.Array:
    """[R, V] logits in steps of 1/64, made on the device: some are equal, as a model's are."""
    logits: jax.Array = _jitted_logits_of(jax.random.key(seed), shape)
    return logits


def case_logits(key: jax.Array, shape: Shape) -> jax.Array:
    """The same, of a key."""
    normal = jax.random.normal(key, (shape.rows, shape.vocabulary))
    return (jnp.round(256 * normal) / 64).astype(shape.dtype)


# A program for each shape, whatever the seed, where each operation would be one of its own.
_jitted_logits_of = jax.jit(case_logits, static_argnums=1)


def random_ids(shape: Shape) -> jax.Array:
    """[R] int32 random token ids."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, shape.vocabulary, shape.rows), jnp.int32)


def check_rows(kernels: Kernels, shape: Shape) -> None:
    """Top K, logprobs, ranks, extra ids; row ids, skipped rows, temperatures.

    A plain call and one with all optional results, which take other paths.
    """
    x, ids = random_logits(shape, seed=shape.vocabulary), random_ids(shape)
    _check(kernels, Rows(x, ids), Outputs(shape.k))
    rng = np.random.default_rng(shape.rows)
    r = shape.rows
    row_ids = jnp.asarray(rng.permutation(r), jnp.int32)
    temperatures = jnp.asarray(rng.choice([0, 0.7, 1, 2], r), jnp.float32)
    extra = jnp.asarray(rng.integers(-1, shape.vocabulary + 1, (r, 3)), jnp.int32)
    num_rows = jnp.int32(max(1, r - 1))
    rows = Rows(x, ids, row_ids, num_rows, temperatures, extra)
    _check(kernels, rows, Outputs(shape.k, True, True, True))


def check_greedy(kernels: Kernels, shape: Shape) -> None:
    """Greedy choices and their logprobs, by one read of a verification; of rows with every edge.

    shape: where it has no more rows than there are edges, one more row follows these.
    """
    edges = oracle.edge_rows(shape.vocabulary, jnp.dtype(shape.dtype), 256)
    shape = replace(shape, rows=max(shape.rows, len(edges) + 1))
    x = random_logits(shape, seed=shape.vocabulary)
    x = jnp.concatenate([jnp.asarray(edges), x[len(edges) :]])
    rng = np.random.default_rng(shape.rows)
    extra = jnp.asarray(rng.integers(-1, shape.vocabulary + 1, (shape.rows, 3)), jnp.int32)
    positions = jnp.arange(shape.rows, dtype=jnp.int32)

    def call(x: jax.Array, extra: jax.Array) -> TopkLogprobs:
        with use_implementation(kernels.name):
            verified = greedy_verified(x, positions, shape.k)
            return emitted_logprobs(x[:, None], verified, extra_token_ids=extra)

    emitted: TopkLogprobs = jax.tree.map(lambda x: x[:, 0], jax.jit(call)(x, extra))
    ids = [oracle.greedy_token_id(row) for row in np.asarray(x)]
    rows = Rows(x, jnp.asarray(ids, jnp.int32), extra_token_ids=extra)
    _check_results(emitted, rows, Outputs(shape.k))


def greedy_verified(x: jax.Array, positions: jax.Array, k: int) -> Verified:
    """A verification of slots without drafts, a row of logits [R, V] each, all greedy."""
    slots = len(positions)
    no_drafts = Drafts(jnp.zeros((slots, 0), jnp.int32), jnp.zeros(slots, jnp.int32))
    sampling = Sampling.greedy(slots)
    return verify(x[:, None], no_drafts, sampling, positions, k=k, all_greedy=True)


def check_changed_rows(kernels: Kernels, shape: Shape) -> None:
    """Masks and biases, and ranks that count equal logits too."""
    x, ids = random_logits(shape, seed=1), random_ids(shape)
    rng = np.random.default_rng(2)
    words = rng.integers(0, 2**32, (shape.rows, -(-shape.vocabulary // 32)), np.uint32)
    words[0] = 0  # a row without a token
    biased = rng.integers(0, shape.vocabulary, (shape.rows, 6)).astype(np.int32)
    biased[:, 1] = biased[:, 0]  # a token twice
    bias = rng.choice(np.array([-100, -0.5, 0.25, 5, -np.inf], np.float32), biased.shape)
    changes = Changes(jnp.asarray(words), jnp.asarray(biased), jnp.asarray(bias))
    rows = Rows(x, ids, changes=changes)
    _check(kernels, rows, Outputs(shape.k, True, True, True, inclusive=True))


def check_edges(kernels: Kernels, shape: Shape) -> None:
    """Every edge of the contract: ties across groups, NaN, infinities, rows with few logits.

    shape: where it has more rows than there are edges, these are repeated.
    """
    edges = oracle.edge_rows(shape.vocabulary, jnp.dtype(shape.dtype), 256)
    x = edges[np.arange(max(shape.rows, len(edges))) % len(edges)]
    ids = np.arange(len(x), dtype=np.int32) * 256 % shape.vocabulary
    _check(kernels, Rows(jnp.asarray(x), jnp.asarray(ids)), Outputs(shape.k))


def check_turns(kernels: Kernels, shape: Shape, calls: int = 200) -> None:
    """Many calls on two inputs in turn: each has the bits of the first call on its input.

    A program that reads partial results before they are there finds those of the other input, in
    memory that both calls are given. Equal inputs would hide it. Nothing is waited for between two
    calls.
    """
    ids = random_ids(shape)
    call = jax.jit(lambda x: kernels.topk(Rows(x, ids), Outputs(shape.k)))

    @jax.jit
    def changed(results: TopkLogprobs, first: TopkLogprobs) -> jax.Array:
        different = jax.tree.map(lambda x, y: jnp.sum(_bits(x) != _bits(y)), results, first)
        return jnp.asarray(sum(jax.tree.leaves(different)))

    inputs = [random_logits(shape, seed) for seed in (8, 9)]
    firsts = [call(x) for x in inputs]
    counts = [changed(call(inputs[i % 2]), firsts[i % 2]) for i in range(calls)]
    different = np.flatnonzero([int(count) for count in counts])
    assert not different.size, f"calls {different[:10].tolist()} of {calls} have other bits: a race"


def _bits(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)


def _check(kernels: Kernels, rows: Rows, outputs: Outputs) -> None:
    """A call of given tokens."""
    _check_results(jax.jit(lambda rows: kernels.topk(rows, outputs))(rows), rows, outputs)


def _check_results(by_kernels: TopkLogprobs, rows: Rows, outputs: Outputs) -> None:
    """All rows against XLA, some against float64."""
    by_xla = jax.jit(lambda rows: _topk("xla", rows, outputs))(rows)
    for name in ("token_ids", "token_ranks", "top_logits"):
        if getattr(by_kernels, name) is not None:
            np.testing.assert_array_equal(
                getattr(by_kernels, name), getattr(by_xla, name), f"{name}, against XLA"
            )
    for name in ("logprobs", "extra_logprobs"):
        np.testing.assert_allclose(
            getattr(by_kernels, name),
            getattr(by_xla, name),
            rtol=2 * oracle.RELATIVE_ERROR,
            atol=2 * oracle.ABSOLUTE_ERROR,
            err_msg=f"{name}, against XLA",
        )
    few = slice(0, ORACLE_ROWS)
    some: Any = jax.tree.map(lambda part: np.asarray(part[few]), by_kernels)
    row_ids = np.arange(rows.num_targets)[few] if rows.row_ids is None else rows.row_ids[few]
    x = np.asarray(rows.logits[jnp.asarray(row_ids)])
    changes = rows.changes or Changes()

    def part(array: Any) -> Any:
        return None if array is None else np.asarray(array[few])

    expected = oracle.topk_logprobs(
        x,
        part(rows.token_ids),
        outputs.k,
        num_rows=None if rows.num_rows is None else int(rows.num_rows),
        temperatures=part(rows.temperatures),
        extra_token_ids=part(rows.extra_token_ids),
        allowed=part(changes.allowed),
        bias_token_ids=part(changes.bias_token_ids),
        bias=part(changes.bias),
        rank_ties="inclusive" if outputs.inclusive else "strict",
    )
    oracle.assert_matches(some, expected)


def check_groups(kernels: Kernels, shape: Shape) -> None:
    """The read of sampled rows: groups' maxima and sums at two temperatures, and candidates."""
    x = random_logits(shape, seed=3)
    inverse = jnp.asarray(np.resize(np.array([1, 2, 0.5, 1], np.float32), shape.rows))
    needed = jnp.full(shape.rows, 10, jnp.int32)
    part = GroupedRows.of(x).part
    summary = jax.jit(lambda part, t, n: kernels.groups(part, t, n, shape.k))(part, inverse, needed)
    few = slice(0, ORACLE_ROWS)
    some = np.asarray(x[few])
    maxima, sums = draws.group_sums(some, inverse[few])
    np.testing.assert_array_equal(summary.groups.maxima[few], maxima, "the groups' maxima")
    np.testing.assert_allclose(
        summary.groups.sums[few], sums, SUM_ERROR, err_msg="the groups' sums"
    )
    raw = draws.group_sums(some, np.ones(len(some)))[1]
    np.testing.assert_allclose(
        summary.raw_sums[few], raw, SUM_ERROR, err_msg="sums at temperature 1"
    )
    _check_top(some, summary.top_ids[few], summary.top_logits[few], 10)


def check_candidates(kernels: Kernels, shape: Shape) -> None:
    """The K largest logits of listed rows."""
    x, k = random_logits(shape, seed=4), shape.k
    row_ids = jnp.arange(shape.rows, dtype=jnp.int32)[::-1]
    top = jax.jit(lambda x, ids, num: kernels.candidates(x, ids, num, k))(
        x, row_ids, jnp.int32(shape.rows)
    )
    few = slice(0, ORACLE_ROWS)
    _check_top(np.asarray(x[row_ids[few]]), top.ids[few], top.logits[few], k)


def _check_top(x: Any, ids: Any, logits: Any, k: int) -> None:
    for r, row in enumerate(x.astype(np.float64)):
        best = oracle.top_ids(row, k)
        np.testing.assert_array_equal(np.asarray(ids[r])[:k], best, f"candidates of row {r}")
        np.testing.assert_array_equal(np.asarray(logits[r])[:k], row[best].astype(np.float32))


def check_draws(kernels: Kernels, shape: Shape) -> None:
    """Draws from whole rows, without excluded tokens, and below a cut: those of float64.

    shape: of three rows; its K is how many tokens a slot leaves out at most.
    """
    rng = np.random.default_rng(shape.vocabulary)
    x = (rng.normal(size=(3, shape.vocabulary)) * 3).astype(jnp.dtype(shape.dtype))
    x[1, -2:] = 30  # two tokens of one group have nearly all of the mass
    inverse = np.array([1, 0.5, 1.7], np.float32)
    order = np.argsort(-x[2].astype(np.float32), kind="stable")
    cut, at = float(x[2, order[300]]), int(order[300])
    some = tuple(map(int, rng.choice(shape.vocabulary, shape.k - 1, replace=False)))
    slots = [
        draws.DrawSlot(0, 5, 7),
        draws.DrawSlot(-1),
        draws.DrawSlot(1, 2**32 - 1, 2**31 - 1),
        draws.DrawSlot(2, 11, 2, (-1,), cut, at),
        draws.DrawSlot(2, 13, 2),
    ]
    for i, others in ((2, ()), (4, some)):  # what would be drawn is excluded
        _, likely, _ = draws.expected(x, slots[i], inverse)
        slots[i] = slots[i]._replace(taken=(likely, *others))
    to_draw = RowsToDraw(*map(jnp.asarray, draws.rows_to_draw(x, slots, inverse)))
    call = jax.jit(lambda x, to_draw: kernels.draw(x, to_draw, draws.PURPOSES))
    draws.check_drawn(call(jnp.asarray(x), to_draw), x, slots, inverse)


def check_ranks(kernels: Kernels, shape: Shape) -> None:
    """How many logits are larger than a token's: likely and unlikely ones, equal ones, none."""
    x = np.array(random_logits(shape, seed=5))
    x[1] = 0
    ids = np.array(random_ids(shape))
    ids[0], ids[2 % shape.rows] = x[0].astype(np.float32).argmax(), -1
    maxima, _ = draws.group_sums(x, np.ones(shape.rows))
    expected = [
        int((row > row[token]).sum()) if token >= 0 else 0
        for row, token in zip(x.astype(np.float64), ids, strict=True)
    ]
    arrays = jnp.asarray(x), jnp.asarray(maxima), jnp.asarray(ids)
    counts = jax.jit(kernels.num_larger)(*arrays)
    np.testing.assert_array_equal(counts, expected, "numbers of larger logits")


def verification(shape: Shape) -> tuple[jax.Array, Drafts, Sampling, jax.Array]:
    """Arguments of `verify`: R slots of 4 rows, of all kinds, with drafts that have a q."""
    slots, positions, drawn = shape.rows, 4, 4
    rng = np.random.default_rng(6)
    flat = Shape(slots * positions, shape.vocabulary, shape.k, shape.dtype)
    logits = random_logits(flat, seed=7).reshape(slots, positions, -1)
    ids = rng.integers(0, shape.vocabulary, (slots, positions - 1, drawn)).astype(np.int32)
    ids[:, :, 0] = np.asarray(jnp.argmax(logits[:, :-1], axis=-1))
    q = CompactQ(jnp.asarray(ids), jnp.full(ids.shape, -np.log(drawn), jnp.float32))
    chosen = np.take_along_axis(ids, rng.integers(0, 2, (slots, positions - 1, 1)), axis=2)[..., 0]
    num = np.resize(np.array([3, 3, 2, 0, 1], np.int32), slots)

    def over_slots(*values: float) -> Any:
        return jnp.asarray(np.resize(values, slots), jnp.float32)

    sampling = Sampling(
        temperature=over_slots(0, 1, 0.7, 1, 1.5, 1),
        top_k=jnp.asarray(np.resize([0, 0, 0, 900, 5], slots), jnp.int32),
        top_p=over_slots(1, 1, 1, 1, 1, 1, 0.9),
        min_p=over_slots(0, 0, 0, 0, 0, 0, 0, 0.02),
        seed=jnp.arange(slots, dtype=jnp.uint32),
    )
    return logits, Drafts(jnp.asarray(chosen), jnp.asarray(num), q), sampling, jnp.arange(slots)


def check_verify(kernels: Kernels, shape: Shape) -> None:
    """A whole verification: tokens and counts are those of XLA, and greedy slots' of float64."""
    inputs = verification(shape)

    def tokens(name: Implementation) -> list[np.ndarray]:
        def call(*arguments: Any) -> Any:
            with use_implementation(name):
                verified = verify(*arguments, k=shape.k)
                assert verified.read is not None
                emitted = emitted_logprobs(arguments[0], verified)
            return verified.token_ids, verified.num_tokens, emitted.token_ranks

        return [np.asarray(x) for x in jax.jit(call)(*inputs)]

    by_kernels, by_xla = tokens(kernels.name), tokens("xla")
    for name, values, other in zip(("tokens", "counts", "ranks"), by_kernels, by_xla, strict=True):
        np.testing.assert_array_equal(values, other, f"{name}, against XLA")
    logits = np.asarray(inputs[0])
    for slot in np.flatnonzero(np.asarray(inputs[2].temperature) == 0):
        for j in range(by_kernels[1][slot]):
            assert by_kernels[0][slot, j] == oracle.greedy_token_id(logits[slot, j]), (slot, j)

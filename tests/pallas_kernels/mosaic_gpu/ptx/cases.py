"""The calls that are executed as PTX, and their results: every path of the kernels, small.

Logits hold every edge of the contract: ties within a thread, across threads, warps, groups, blocks
and programs; NaN of both signs, infinities, few finite logits, subnormal and huge ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule, choose_schedule
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs, Rows
from pallas_kernels.testing import oracle
from pallas_kernels.topk.derivatives import _folded
from tests.support import kernel_calls
from tests.support.changed_logits import ALL, as_changes, bits_of, changes_of

INF, NAN = np.inf, np.nan


class Case(NamedTuple):
    """One call; `check(result)` raises AssertionError where it is wrong."""

    name: str
    schedule: Schedule
    k: int
    rows: int  # target rows
    call: Callable[[], Any]
    check: Callable[[Any], None]


def matches(expected: oracle.Expected) -> Callable[[Any], None]:
    return lambda actual: oracle.assert_matches(actual, expected)


def edge_rows(schedule: Schedule) -> np.ndarray:
    """[N, V] in the schedule's dtype; the first rows are those that small cases take."""
    steps, splits = schedule.num_steps, schedule.splits
    assert min(steps, 1) <= splits <= steps, f"{schedule} has programs without a step, or none"
    vocabulary, width = schedule.vocabulary, schedule.part_width
    rng = np.random.default_rng(vocabulary)
    ids = np.arange(vocabulary)
    normal, ties, one, *invalid = oracle.edge_rows(vocabulary, "float64", width)
    # Equal largest logits within a vector, in the next thread, warp and block too.
    places = [1, 2, 9, width - 1, schedule.block + 7]
    ties[[place for place in places if place < vocabulary]] = 7.0
    few = np.full(vocabulary, -INF)
    few[[3, width, vocabulary - 1]] = [-2.0, 5.0, 5.0]
    last_block = np.where(ids // schedule.block == (vocabulary - 1) // schedule.block, 1.0, -1.0)
    largest = 60000.0 if schedule.dtype == "float16" else 6e34
    huge = np.where(ids % 3 == 0, largest, -largest)
    rows = [
        *(normal, ties, one, *invalid),
        np.zeros(vocabulary),  # all equal
        few,
        np.where(ids == vocabulary - 1, NAN, ties),
        last_block,
        ids / vocabulary,  # ascending: every group is better than the one before
        -ids / vocabulary,
        huge,
        (ids % 7 - 3) * 1e-40,  # subnormal; zeros in float16
        np.where(ids % 5 == 0, -INF, normal),
        np.where(ids < vocabulary - 3, -INF, normal),
        np.where((ids == 0) | (ids == vocabulary // 2), INF, normal),
        rng.normal(size=vocabulary) * 30,
        1e4 + rng.normal(size=vocabulary),
    ]
    return np.stack(rows).astype(jnp.dtype(schedule.dtype))


TEMPERATURES = (0, 0.7, 1, 0.013, 30)


def rows_case(
    name: str,
    schedule: Schedule,
    k: int,
    *,
    listed: bool = False,
    options: bool = True,
    counted: bool = False,
    changed: tuple[str, ...] = (),
    ties: str = "strict",
    rows: int | None = None,
    x: np.ndarray | None = None,
    temperatures: tuple[float, ...] = TEMPERATURES,
    **results: bool,
) -> Case:
    """A call of given tokens, some of them the largest of their rows, also of invalid rows.

    Args:
      listed: by row_ids, some of them outside and the last one skipped.
      counted: the last row is skipped.
      options: with temperatures and extra ids.
      changed: what changes the logits, by name.
      x: the rows, in place of the edge rows.
      results: the optional ones of `Outputs`.
    """
    x = edge_rows(schedule)[:rows] if x is None else x
    vocabulary = schedule.vocabulary
    rng = np.random.default_rng(k)
    row_ids = np.arange(len(x), dtype=np.int32)
    given: dict[str, Any] = {}
    if listed:  # out of order, one row twice, two outside the logits
        row_ids = np.concatenate([rng.permutation(len(x)), [-1, len(x), 0, 1]]).astype(np.int32)
        given["row_ids"] = row_ids
    count = len(row_ids)
    if listed or counted:
        given["num_rows"] = np.int32(count - 1)
    if options:
        given["temperatures"] = rng.choice(temperatures, count).astype(np.float32)
        given["extra_token_ids"] = rng.integers(-1, vocabulary + 1, (count, 3), np.int32)
    given |= changes_of(rng, count, vocabulary, changed)
    token_ids = rng.integers(0, vocabulary, count, np.int32)
    for i, row in enumerate(row_ids):  # the largest of a row, its last, and no token at all
        if i % 3 == 0 and 0 <= row < len(x):
            token_ids[i] = oracle.greedy_token_id(x[row])
    if listed:
        token_ids[-2:] = [vocabulary - 1, vocabulary]
    if "allowed" in given:  # few tokens, in two groups and at the end
        given["allowed"][0] = bits_of([1, 5, 300, vocabulary - 1], vocabulary)
    if "bias" in given:
        given["bias_token_ids"][0, :3] = [token_ids[0], token_ids[0], 1]
        given["bias"][0, :3] = [-3, 1, 50]
    expected = oracle.topk_logprobs(x, token_ids, k, **given, rank_ties=ties)
    changes = as_changes(given) if changed else None
    arrays = {key: jnp.asarray(x) for key, x in given.items() if key not in Changes._fields}
    arrays.setdefault("extra_token_ids", jnp.zeros((count, 0), jnp.int32))
    wanted = Outputs(k, inclusive=ties == "inclusive", **results)
    rest = {"changes": changes, "schedule": schedule, **arrays}
    logits, ids = jnp.asarray(x), jnp.asarray(token_ids)

    def call() -> Any:
        return kernel_calls.topk_logprobs(run, logits, ids, wanted, **rest)

    return Case(name, schedule, k, count, call, matches(expected))


separate = partial(rows_case, listed=True)
plain = partial(rows_case, options=False)
unlisted = partial(rows_case, counted=True)
with_options = partial(rows_case, **ALL)


def crowded(name: str, schedule: Schedule, k: int) -> Case:
    """More logits at the top than there is room for: by keys, by ids, in few groups, at the end.

    The cut is raised by halving, first the keys, then the ids among equal ones.
    """
    vocabulary = schedule.vocabulary
    ids = np.arange(vocabulary)
    coarse = np.round(np.random.default_rng(0).normal(size=vocabulary) * 2) / 2
    cluster = np.where((ids >= 1000) & (ids < 1600), 5 + ids / vocabulary, coarse)
    late = np.where(ids >= vocabulary - 700, 3.0, -INF)
    x = np.stack([np.zeros(vocabulary), coarse, cluster, late])
    return plain(name, schedule, k, x=x.astype(jnp.dtype(schedule.dtype)))


def parts(name: str, schedule: Schedule, k: int) -> Case:
    """One vocabulary shard's part of rows: what `RowSums` promises, in float64."""
    x = edge_rows(schedule)
    rng = np.random.default_rng(k)
    row_ids = np.concatenate([rng.permutation(len(x)), [-1, 0]]).astype(np.int32)
    count = len(row_ids)
    selected = rng.choice([0, 1.5, -3, -INF, 7, 30], count).astype(np.float32)
    temperature = 0.7
    arrays = [row_ids, np.int32(count), np.full(count, temperature, np.float32)]
    inputs = (jnp.asarray(x), jnp.asarray(selected), Outputs(k), *map(jnp.asarray, arrays))

    def call() -> list[np.ndarray]:
        """Results of the kernels, with zeros where `RowSums` promises nothing."""
        out = kernel_calls.row_sums(run, *inputs, schedule=schedule)
        maximum, sum_exp, num_larger, top_ids, top_logits = map(np.array, out[:5])
        for target, row in enumerate(row_ids):
            if row < 0:
                maximum[target] = sum_exp[target] = 0
            if row < 0 or np.isnan(x[row].astype(np.float32)).any():
                num_larger[target] = 0
            if row < 0 or not oracle.is_valid(x[row]):
                top_logits[target] = -INF
        top_ids[top_logits == -INF] = 0
        return [maximum, sum_exp, num_larger, top_ids, top_logits]

    def check(got: Any) -> None:
        maximum, sum_exp, num_larger, top_ids, top_logits = got
        for target, row in enumerate(row_ids):
            if row < 0:
                continue
            values = x[row].astype(np.float64)
            if np.isnan(values).any():
                assert np.isnan(sum_exp[target])
                continue
            assert maximum[target] == values.max()
            assert num_larger[target] == (values > selected[target]).sum()
            if not oracle.is_valid(values):
                assert not 0 < sum_exp[target] < INF or maximum[target] == INF
                continue
            total = np.exp((values - values.max()) / np.float64(np.float32(temperature))).sum()
            np.testing.assert_allclose(sum_exp[target], total, rtol=1e-5)
            ids = oracle.top_ids(values, k)
            np.testing.assert_array_equal(top_ids[target, : len(ids)], ids)
            np.testing.assert_array_equal(top_logits[target, : len(ids)], values[ids])
            assert (top_logits[target, len(ids) :] == -INF).all()

    return Case(name, schedule, k, count, call, check)


def vmapped(name: str, schedule: Schedule, k: int) -> Case:
    """A batch of two calls on an odd vocabulary, folded into rows as `vmap` does it."""
    x = edge_rows(schedule)[:8].reshape(2, 4, schedule.vocabulary)
    token_ids = np.arange(8, dtype=np.int32).reshape(2, 4)
    expected = oracle.topk_logprobs(x.reshape(8, -1), token_ids.reshape(-1), k)
    nothing = jnp.zeros((4, 0), jnp.int32)
    rows = Rows(jnp.asarray(x), jnp.asarray(token_ids), extra_token_ids=nothing)
    is_batched = Rows(True, True, extra_token_ids=False)

    def one(rows: Rows) -> Any:
        return run.topk_logprobs(rows, Outputs(k), schedule)

    def check(actual: Any) -> None:
        oracle.assert_matches(jax.tree.map(lambda y: y.reshape(8, *y.shape[2:]), actual), expected)

    return Case(name, schedule, k, 8, lambda: _folded(one, 2, is_batched, rows), check)


def clustered(programs: int, dtype: str) -> Callable[[], Case]:
    """Three rows of 32,000 logits, each read by so many programs: one has the row's end."""
    schedule = Schedule(32_000, dtype, 256, programs - 1)
    assert schedule.programs == programs
    return lambda: separate(f"cluster of {programs}", schedule, 20, rows=3)


def most_logits(name: str, vocabulary: int) -> Case:
    """Almost 2**31 of them, nearly all in memory that is never touched: do indices overflow?"""
    k, count = 5, (2**31 - 1) // vocabulary
    schedule = choose_schedule(1536, vocabulary, k, "bfloat16")
    x = np.zeros((count, vocabulary), jnp.bfloat16)
    edges = edge_rows(schedule)
    row_ids = np.array([count - 1, 0, count // 2, count - 2, count - 1], np.int32)
    x[row_ids] = edges[[0, 9, 15, 1, 0]]
    token_ids = np.array([5, 9, 0, vocabulary - 1, vocabulary - 1], np.int32)
    expected = oracle.topk_logprobs(x[row_ids], token_ids, k)
    rest = jnp.asarray(row_ids), None, None, jnp.zeros((len(row_ids), 0), jnp.int32)

    def call() -> Any:  # as an array of jax the logits would be copied
        given = run, x, jnp.asarray(token_ids), Outputs(k), *rest
        return kernel_calls.topk_logprobs(*given, schedule=schedule)

    return Case(name, schedule, k, len(row_ids), call, matches(expected))


def chosen(rows: int, vocabulary: int, k: int, dtype: str) -> Schedule:
    """The schedule that a call of so many rows has; fewer rows are executed."""
    return choose_schedule(rows, vocabulary, k, dtype)


def mutant_case() -> Case:
    """A quick case for spoiled kernels: several programs, blocks and kinds of rows."""
    return separate("mutants", Schedule(8452, "bfloat16", 128, 1), 3)


def all_cases() -> list[Callable[[], Case]]:
    """Functions that make the cases, one by one: logits and expectations take memory and time."""
    bf16, f16, f32 = "bfloat16", "float16", "float32"
    few = 8  # of the edge rows, where K is large
    return [
        # Small rows, a schedule each: aligned and ragged, odd, split, steps only, edges only.
        lambda: separate("whole blocks", Schedule(8192, f16, 128, 2), 2),
        lambda: separate("ragged end", Schedule(8448, bf16, 256, 1), 5),
        lambda: separate("odd, three programs", Schedule(12_291, bf16, 256, 2), 20),
        lambda: separate("results, three programs", Schedule(12_291, bf16, 256, 2), 5, **ALL),
        lambda: separate("odd, narrow groups", Schedule(8195, bf16, 128, 1), 1),
        lambda: separate("split", Schedule(12_290, f32, 256, 2), 20),
        lambda: separate(
            "T = 1e-39", Schedule(8192, bf16, 256, 1), 2, rows=few, temperatures=(1e-39,)
        ),
        lambda: separate("edges only", Schedule(4092, f16, 128, 0), 0),
        lambda: separate("shortest row", Schedule(2048, f32, 128, 0), 65, rows=few),
        lambda: plain("no options", Schedule(8448, f32, 256, 2), 5),
        lambda: plain("no options, K = 0", Schedule(8449, bf16, 256, 1), 0),
        lambda: separate("narrow groups", chosen(64, 9000, 64, f32), 64, rows=few),
        lambda: separate("narrow groups, odd", chosen(64, 9001, 128, bf16), 128, rows=4),
        lambda: separate("K = 129, more than groups", Schedule(8448, f16, 128, 1), 129, rows=few),
        lambda: separate("K = 300, odd", chosen(64, 50_257, 300, f32), 300, rows=few),
        lambda: separate("K = 512", chosen(64, 131_072, 512, bf16), 512, rows=few),
        lambda: crowded("crowded", Schedule(8450, bf16, 128, 1), 5),
        lambda: crowded("crowded, more than groups", Schedule(2048, f32, 128, 0), 129),
        lambda: crowded("crowded, K = 300", Schedule(4352, f16, 128, 1), 300),
        lambda: unlisted("unlisted, K = 0", Schedule(4352, bf16, 128, 1), 0),
        lambda: unlisted("unlisted", Schedule(8448, f32, 256, 1), 5),
        lambda: unlisted("unlisted, odd", Schedule(12_301, f16, 256, 2), 20),
        lambda: plain("no options, odd", Schedule(8195, bf16, 128, 1), 1),
        lambda: plain("no options, narrow groups", chosen(64, 9000, 65, f32), 65, rows=4),
        lambda: vmapped("vmapped, odd", Schedule(8195, bf16, 128, 1), 3),
        lambda: parts("shard", Schedule(8704, bf16, 128, 2), 20),
        lambda: parts("shard, odd, K = 0", Schedule(8195, f32, 128, 1), 0),
        # Clusters of 4 to 7 programs, as in calls of 96 to 1536 rows of this vocabulary.
        *(
            clustered(programs, dtype)
            for programs, dtype in zip(range(4, 8), (bf16, f32, f16, bf16), strict=True)
        ),
        # Real vocabularies, cut as in calls of so many rows.
        lambda: separate("GPT-2, 64 rows", chosen(64, 50_257, 20, f32), 20, rows=6),
        lambda: plain("Llama 2, 1 row", chosen(1, 32_000, 128, f16), 128, rows=1),
        lambda: separate("Llama 3, 4 rows", chosen(4, 128_256, 5, bf16), 5, rows=4),
        lambda: separate("Qwen, 1536 rows", chosen(1536, 151_936, 20, bf16), 20, rows=6),
        lambda: separate("Gemma, 2048 rows", chosen(2048, 262_144, 64, bf16), 64, rows=3),
        lambda: most_logits("2**31 logits, odd", 131_071),
        lambda: unlisted("2**17, 64 rows", chosen(64, 131_072, 20, bf16), 20, rows=6),
    ]


def option_mutant_case() -> Case:
    """A quick case for spoiled kernels: a mask whose words begin between vectors."""
    schedule = Schedule(8195, "bfloat16", 128, 1)
    return with_options("masks", schedule, 3, changed=("allowed",), rows=3)


def option_cases() -> list[Callable[[], Case]]:
    """Calls with optional results, masks and biases, made one by one."""
    bf16, f16, f32 = "bfloat16", "float16", "float32"
    few, mask, bias, both = 10, ("allowed",), ("bias",), ("allowed", "bias")
    small = partial(with_options, rows=few)
    inclusive = partial(with_options, ties="inclusive")
    return [
        lambda: with_options("options", Schedule(8448, bf16, 256, 1), 5),
        lambda: inclusive("options, odd, inclusive", chosen(64, 9001, 3, f32), 3),
        lambda: with_options("options, counted", Schedule(8448, f32, 256, 2), 2, counted=True),
        lambda: with_options("options, K = 0", Schedule(8192, f16, 128, 2), 0),
        lambda: with_options("mask", Schedule(8448, bf16, 256, 1), 20, changed=mask),
        lambda: small("mask, odd", Schedule(8195, bf16, 128, 1), 3, changed=mask),
        lambda: with_options("mask, float32, split", Schedule(12_290, f32, 256, 2), 5,
                             changed=mask),
        lambda: small("mask, edges only", Schedule(4092, f16, 128, 0), 0, changed=mask),
        lambda: inclusive("mask and bias", Schedule(8452, bf16, 128, 1), 4, changed=both),
        lambda: small("bias", Schedule(8195, f16, 128, 1), 2, changed=bias, counted=True),
    ]  # fmt: skip

"""Reads of rows that are sampled, to be executed as PTX: sums of fixed groups, and candidates."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.groups import FEW, WIDTH, Needed, RowPart, inverse_temperature
from pallas_kernels.backends.mosaic_gpu import groups as sampled
from pallas_kernels.backends.mosaic_gpu import groups_kernel
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule
from pallas_kernels.backends.xla import groups as xla
from pallas_kernels.contract.changes import Changes, apply, prepared
from pallas_kernels.testing import draws, oracle
from tests.pallas_kernels.mosaic_gpu.ptx.cases import TEMPERATURES, Case, edge_rows
from tests.support.changed_logits import as_changes, bits_of, changes_of

# Rounding: exponentials of 2**-22, the scale and its product with a difference, 8 additions; with
# the largest errors that the PTX ISA allows. A difference of d is exp(-d) of the sum.
ERROR = 2e-6


def fixed(vocabulary: int, dtype: str, splits: int = 1) -> Schedule:
    """A cut of rows into fixed groups."""
    return Schedule(vocabulary, dtype, WIDTH, splits)


def check_sums(found: Any, raw: Any, x: np.ndarray, temperatures: np.ndarray) -> None:
    """Maxima exact, sums within rounding; `raw` at temperature 1, or None."""
    checks = [(found.sums, temperatures)]
    if raw is not None:
        checks.append((raw, np.ones(len(x), np.float32)))
    for sums, t in checks:
        with np.errstate(invalid="ignore", over="ignore"):
            maxima, expected = draws.group_sums(x, 1 / t.astype(np.float64))
        expected = np.where(maxima == np.inf, np.nan, expected)
        np.testing.assert_allclose(np.asarray(sums), expected, rtol=ERROR, atol=1e-30)
    there = ~np.isnan(maxima)
    np.testing.assert_array_equal(np.asarray(found.maxima)[there], maxima[there])


def read(name: str, schedule: Schedule, k: int, raw: bool = False, rows: int | None = None) -> Case:
    """Sums at the rows' temperatures, at 1 too, and candidates; all of them against float64."""
    x = edge_rows(schedule)[:rows]
    rng = np.random.default_rng(schedule.vocabulary)
    temperatures = rng.choice(TEMPERATURES, len(x)).astype(np.float32)
    temperatures[:2] = 1, 0.7
    logits, inverse = jnp.asarray(x), inverse_temperature(jnp.asarray(temperatures))
    number = draws.in_groups(x).shape[1]

    def call() -> Any:
        (out,) = groups_kernel.read_groups(schedule, logits, inverse, raw)
        groups, raw_sums = sampled.groups_of_rows(out, schedule, number)
        raw_sums = raw_sums if raw else None
        top = sampled.top_of_groups(logits, schedule, out, k) if k else None
        partials = np.asarray(out.partials)[: 2 * len(x) * schedule.programs]
        return _known(x, groups), raw_sums, top, partials.reshape(2, len(x), -1)

    def check(found: Any) -> None:
        groups, raw_sums, top, partials = found
        check_sums(groups, raw_sums, x, np.where(temperatures > 0, temperatures, np.float32(1)))
        valid = [row for row in range(len(x)) if oracle.is_valid(x[row])]
        assert not (partials[1].sum(axis=1) > 0)[[*{*range(len(x))} - {*valid}]].any()
        np.testing.assert_array_equal(partials[0][valid].max(axis=1), x[valid].max(axis=1))
        total = np.asarray(groups.sums).sum(axis=1)
        np.testing.assert_allclose(partials[1].sum(axis=1)[valid], total[valid], rtol=1e-5)
        for row in valid if k else ():
            ids = oracle.top_ids(x[row].astype(np.float64), k)
            rest = [-1] * (top.ids.shape[1] - len(ids))
            np.testing.assert_array_equal(top.ids[row], [*ids, *rest])
            np.testing.assert_array_equal(
                top.logits[row, : len(ids)], x[row].astype(np.float32)[ids]
            )

    return Case(name, schedule, k, len(x), call, check)


def _known(x: np.ndarray, groups: Any) -> Any:
    """The groups with 0 where a maximum is promised to be anything."""
    wrong = np.isnan(draws.in_groups(x)).any(axis=2)
    return groups._replace(maxima=np.where(wrong, 0, np.array(groups.maxima)))


def same_bits(name: str) -> Case:
    """One group's sum wherever it lies: row, dtype, vectors, programs, columns before it."""
    rng = np.random.default_rng(1)
    tokens = (rng.normal(size=(3, 17 * WIDTH + 40)) * 4).astype(jnp.bfloat16)
    inverse = inverse_temperature(jnp.asarray([1, 0.7, 0.7], jnp.float32))
    width = tokens.shape[1]

    def sums(x: Any, schedule: Schedule, order: Any, offset: Any = None) -> Any:
        (out,) = groups_kernel.read_groups(schedule, jnp.asarray(x), inverse[order], True, offset)
        number = -(-schedule.vocabulary // WIDTH)
        groups, raw = sampled.groups_of_rows(out, schedule, number)
        return groups.maxima, groups.sums, raw

    def shifted(by: int) -> Any:  # as on a shard whose first group begins at this column
        return np.concatenate([np.ones((3, by), jnp.bfloat16), tokens], axis=1)

    order = np.arange(3)
    whole = 17 * WIDTH

    def call() -> Any:
        longer = np.concatenate([tokens, np.full((3, 4099), -np.inf, jnp.bfloat16)], axis=1)
        return [
            sums(tokens, fixed(width, "bfloat16"), order),
            sums(tokens[::-1], fixed(width, "bfloat16"), order[::-1]),
            sums(tokens.astype(np.float32), fixed(width, "float32"), order),
            sums(longer, fixed(longer.shape[1], "bfloat16", 2), order),  # odd
            sums(longer.astype(np.float32), fixed(longer.shape[1], "float32"), order),
            sums(shifted(48), fixed(whole, "bfloat16"), order, jnp.asarray([48], jnp.int32)),
            sums(shifted(1), fixed(whole, "bfloat16"), order, jnp.asarray([1], jnp.int32)),
            sums(tokens[:, 16 * WIDTH :], fixed(width - 16 * WIDTH, "bfloat16", 0), order),
        ]

    def check(found: Any) -> None:
        first, reverse, *others, last = ([np.asarray(x) for x in one] for one in found)
        for there in ([x[::-1] for x in reverse], *others):
            number = min(there[0].shape[1], first[0].shape[1])
            for a, b in zip(first, there, strict=True):
                np.testing.assert_array_equal(a[:, :number], b[:, :number])
        for a, b in zip(first, last, strict=True):
            np.testing.assert_array_equal(a[:, -b.shape[1] :], b)
        check_sums(sampled.GroupSums(*found[0][:2]), found[0][2], tokens, np.float32([1, 0.7, 0.7]))

    return Case(name, fixed(width, "bfloat16"), 0, 3, call, check)


def split_columns(name: str) -> Case:
    """A shard whose first group begins at column 48, and whose tail has two groups; beside XLA's.

    The candidates are the columns', which the groups do not hold: a read of their own.
    """
    x = edge_rows(Schedule(4400, "float32", WIDTH, 1))[:3]
    tail = np.stack([x[:, :512] * 0.5, x[:, 600:1112]], axis=1)[:, :, :WIDTH]
    part = RowPart(jnp.asarray(x), jnp.asarray(tail), jnp.int32(48))
    rest = jnp.asarray([1, 2, 0.5], jnp.float32), Needed.all_of(jnp.asarray([0, FEW, 0]))
    (expected,) = xla.read_part(part, -1, *rest)

    def call() -> Any:
        return sampled.read_part(part, -1, *rest)[0]

    def check(found: Any) -> None:
        np.testing.assert_array_equal(found.groups.maxima, expected.groups.maxima)
        np.testing.assert_allclose(found.groups.sums, expected.groups.sums, rtol=3e-6)
        valid = [row for row in range(len(x)) if oracle.is_valid(x[row])]
        for mine, other in ((found.top_ids, expected.top_ids),
                            (found.top_logits, expected.top_logits)):  # fmt: skip
            # No row needs more than the few; XLA has more all the same.
            np.testing.assert_array_equal(mine[valid, :FEW], other[valid, :FEW])
        assert (np.asarray(found.top_ids)[valid] >= 0).any()

    return Case(name, fixed(4400, "float32"), 64, len(x), call, check)


def changed(name: str, schedule: Schedule, names: tuple[str, ...], k: int, needs: int = 0) -> Case:
    """One read of changed rows: the bits of a read of a changed copy and, with k, of the rows."""
    x = edge_rows(schedule)[[0, 1, 2, 3, 7, 8]]  # all but the fourth are valid
    count, vocabulary = x.shape
    rng = np.random.default_rng(vocabulary + k)
    given = changes_of(rng, count, vocabulary, names)
    if "bias" in given:  # two of a run, one of the last group, the largest, a forbidden one
        best = int(np.nanargmax(x[1].astype(np.float32)))
        given["bias_token_ids"][1] = [9, 15, vocabulary - 1, best, best, 600]
        forbidden = np.inf if "allowed" in given else 50
        given["bias"][1] = [-1, 0.3, 4.01, -2, -1.003, forbidden]
        # Three maxima that are nearer to the largest logit than 16 bits tell, and below it.
        x[2], x[2, 1287] = -2, -1
        given["bias_token_ids"][2] = [3, 300, 700, -1, -1, -1]
        given["bias"][2] = 0.9997
    if "allowed" in given:
        given["allowed"][0] = bits_of([1, 5, 300, vocabulary - 1], vocabulary)
        given["allowed"][1:3] = bits_of(set(range(vocabulary)) - {600}, vocabulary)
    changes = prepared(as_changes(given), vocabulary)
    copy = np.asarray(apply(jnp.asarray(x), changes))
    temperatures = rng.choice(TEMPERATURES, count).astype(np.float32)
    temperatures[:2] = 1, 0.7
    inverse = inverse_temperature(jnp.asarray(temperatures))
    needed = Needed.all_of(jnp.full(count, needs, jnp.int32))

    def read_of(x: Any, schedule: Schedule, changes: Changes | None = None) -> Any:
        logits = jnp.asarray(x)
        tail = xla.tail_of(logits, changes)
        part = RowPart(logits, tail, jnp.int32(0))
        return sampled.read_part(part, k, inverse, needed, changes, schedule)

    def call() -> Any:
        wide = replace(schedule, dtype=copy.dtype.name)
        found = read_of(x, schedule, changes)
        mine = [_told(copy, FEW, found[0]._replace(raw_sums=()))]
        others = [_told(copy, FEW, read_of(copy, wide)[0]._replace(raw_sums=()))]
        if k >= 0:
            mine += [_told(x, k, one) for one in found[1:]]
            others += [_told(x, k, one) for one in read_of(x, schedule)]
        return mine, others

    def check(found: Any) -> None:
        mine, others = found
        jax.tree.map(np.testing.assert_array_equal, mine, others)
        check_sums(mine[0][0], None, copy, np.where(temperatures > 0, temperatures, 1))
        valid = sum(map(oracle.is_valid, copy))
        assert valid > count // 2
        assert (np.asarray(mine[0][2])[:, 0] >= 0).sum() == (valid if needs or k > 0 else 0)

    return Case(name, schedule, max(k, 0), count, call, check)


def _told(x: np.ndarray, k: int, read: Any) -> Any:
    """What a read of rows x promises: sums, and k candidates of valid rows."""
    valid = np.array([oracle.is_valid(row) for row in x])[:, None]
    ids, logits = (np.asarray(part)[:, :k] for part in (read.top_ids, read.top_logits))
    top = np.where(valid, ids, -1), np.where(valid, logits, -np.inf)
    return _known(x, read.groups), read.raw_sums, *top


def sampled_mutant_case() -> Case:
    """A quick case for spoiled kernels: pass 1 alone, steps and an edge, both temperatures."""
    return read("sampled", fixed(8452, "bfloat16", 1), 0, raw=True, rows=8)


def sampled_cases() -> list[Callable[[], Case]]:
    """Functions that make the cases, one by one.

    Where eight rows have three programs, LLVM joins offsets in the partial results to their address
    by an OR: these lie between kernels, where XLA aligns to 256 bytes, and `Conditions` do not.
    """
    bf16, f16, f32 = "bfloat16", "float16", "float32"
    few, mask, bias = 8, ("allowed",), ("bias",)
    return [
        lambda: read("sampled", fixed(8448, bf16), 5),
        lambda: read("sampled, raw, split", fixed(12_544, bf16, 2), 3, raw=True),
        lambda: read("sampled, odd", fixed(12_291, bf16, 2), 7, raw=True),
        lambda: read("sampled, float32, ragged", fixed(8452, f32, 2), 20, raw=True),
        lambda: read("sampled, float32, odd", fixed(4867, f32), 0),
        lambda: read("sampled, even", fixed(8450, f16), 2, rows=few),
        lambda: read("sampled, more than groups", fixed(4360, bf16, 1), 64, rows=few),
        lambda: same_bits("sampled, same bits"),
        lambda: split_columns("sampled, split columns"),
        lambda: changed("sampled, mask", fixed(8448, bf16), mask, -1),
        lambda: changed("sampled, mask, raw, odd", fixed(4867, bf16), mask, 2),
        lambda: changed("sampled, bias, ragged", fixed(8452, bf16), bias, -1, 10),
        lambda: changed("sampled, mask and bias, raw", fixed(4866, f16), (*mask, *bias), 3),
        lambda: changed("sampled, mask and bias, float32", fixed(8448, f32), (*mask, *bias), 1),
    ]

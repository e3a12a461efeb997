"""What follows the read of sampled rows, to be executed as PTX: draws, candidates, token ranks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import read
from pallas_kernels.backends.groups import ListedRows
from pallas_kernels.backends.mosaic_gpu import count_larger, draw, groups
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule
from pallas_kernels.contract.changes import Changes, apply, prepared
from pallas_kernels.numbers.random_draws import gumbel_noise, threefry_word
from pallas_kernels.sampling.row_read import logprobs_of_read
from pallas_kernels.sampling.verification import verify
from pallas_kernels.testing import checks, oracle
from pallas_kernels.testing import draws as drawn_tokens
from pallas_kernels.testing.draws import PURPOSES, DrawSlot
from pallas_kernels.testing.shapes import Shape
from tests.pallas_kernels.mosaic_gpu.ptx.cases import Case
from tests.pallas_kernels.mosaic_gpu.ptx.sampled_cases import fixed
from tests.support import quick_compile
from tests.support.changed_logits import as_changes, bits_of

INVERSE = np.array([1, 0.5, 1.7, 1, 1], np.float32)
TIED = 772_913, 7  # a seed and a position that give the groups 1 and 4 the same noise
LAST = 196, 3  # whose draw from the fifth row is of the last group, where that is cut off


def logits_of(schedule: Schedule) -> np.ndarray:
    """[3, V] of normally distributed logits."""
    rng = np.random.default_rng(schedule.vocabulary)
    x = rng.normal(size=(3, schedule.vocabulary)) * 3
    return x.astype(jnp.dtype(schedule.dtype))


def few_tokens(x: np.ndarray) -> np.ndarray:
    """x and two rows more: two equal groups, each without its last token; the last tokens alone."""
    few = np.full_like(x[:2], -np.inf)
    few[0, 256:511] = few[0, 1024:1279] = 0
    few[1, -256:] = 0
    return np.concatenate([x, few])


def slots_of(x: np.ndarray, most: int) -> list[DrawSlot]:
    """Plain rows, a taken token, up to `most` of them, cuts with ties, and no row at all."""
    order = np.argsort(-x[2].astype(np.float32), kind="stable")
    last, cut, at = x.shape[1] - 1, float(x[2, order[300]]), int(order[300])
    rng = np.random.default_rng(most)
    some = tuple(map(int, rng.choice(last, most, replace=False)))
    return [
        DrawSlot(0, 5, 7),
        DrawSlot(-1),
        DrawSlot(1, 2**32 - 1, 2**31 - 1, (int(x[1].argmax()),)),
        DrawSlot(2, 9, 1, (last, last - 1, 3, 4)[:most]),
        DrawSlot(2, 11, 2, (-1,), cut, at),
        DrawSlot(2, 12, 2, tuple(map(int, order[:2]))[:most], cut, at),
        DrawSlot(2, 13, 2, some),
    ]


def changed(
    x: np.ndarray, names: tuple[str, ...], *, all_rows: bool = False
) -> tuple[Changes | None, np.ndarray]:
    """Changes by name of the first three rows, or of all, and the changed rows."""
    if not names:
        return None, x
    rng, (rows, vocabulary) = np.random.default_rng(3), x.shape
    allowed = rng.random((rows, vocabulary)) < 0.8
    ids = rng.integers(0, vocabulary, (rows, 40)).astype(np.int32)
    ids[:, 1] = vocabulary - 1
    if not all_rows:
        allowed[3:], ids[3:] = True, -1
    words = np.stack([bits_of(np.flatnonzero(row), vocabulary) for row in allowed])
    bias = np.float32(rng.normal(0, 1 if all_rows else 6, ids.shape))
    every = {"allowed": words, "bias_token_ids": ids, "bias": bias}
    wanted = {field: part for field, part in every.items() if field.startswith(names)}
    changes = prepared(as_changes(wanted), vocabulary)
    return changes, np.asarray(apply(jnp.asarray(x), changes))


def draws(name: str, schedule: Schedule, most: int, names: tuple[str, ...] = ()) -> Case:
    """Draws with what a slot may have, of rows that are changed in these ways; against float64."""
    logits = few_tokens(logits_of(schedule))
    changes, x = changed(logits, names)
    decided = [*slots_of(x, most), DrawSlot(4, *LAST)]
    # Two groups with equal scores, of which either is summed again.
    slots = [*decided, DrawSlot(3, *TIED, (511,)), DrawSlot(3, *TIED, (1279,))]
    given = drawn_tokens.rows_to_draw(x, slots, INVERSE)
    given = draw.RowsToDraw(*map(jnp.asarray, given))
    seed, position = jnp.uint32(TIED[0]), jnp.int32(TIED[1])
    noise = gumbel_noise(threefry_word(seed, PURPOSES[0], position, jnp.array([1, 4])))
    assert noise[0] == noise[1]

    def call() -> Any:
        every = [draw.draw(jnp.asarray(logits), given, PURPOSES, changes)]
        return every + ([draw.draw(jnp.asarray(x), given, PURPOSES)] if names else [])

    def check(every: Any) -> None:
        found = every[0]
        for other in every[1:]:  # the bits of a changed copy
            jax.tree.map(np.testing.assert_array_equal, found, other)
        drawn_tokens.check_drawn(found, x, decided, INVERSE)
        assert (found.token_ids[-2:] // 256).tolist() == [1, 1]  # the lower of equal groups

    return Case(name, schedule, 0, len(slots), call, check)


def ranks(name: str, schedule: Schedule, names: tuple[str, ...] = ()) -> Case:
    """Larger logits of likely and unlikely tokens, of none, and among equal ones."""
    logits = logits_of(schedule).repeat(2, axis=0)
    logits[1] = 0
    logits[4, ::3] = -np.inf
    changes, x = changed(logits, names)
    tokens = [int(x[0].argmax()), 5, -1, int(x[3].argmin()), 1, x.shape[1] - 1]
    ids = np.array(tokens, np.int32)
    maxima, _ = drawn_tokens.group_sums(x, np.ones(len(x)))
    pairs = zip(x.astype(np.float64), tokens, strict=True)
    expected = [(row > row[token]).sum() if token >= 0 else 0 for row, token in pairs]
    arrays = jnp.asarray(logits), jnp.asarray(maxima), jnp.asarray(ids)

    def call() -> Any:
        return count_larger.count_larger(*arrays, changes)

    def check(found: Any) -> None:
        np.testing.assert_array_equal(found, expected)

    return Case(name, schedule, 0, len(x), call, check)


def candidates(name: str, schedule: Schedule, k: int) -> Case:
    """The largest logits of listed rows, more of them than a call may ask for."""
    x = logits_of(schedule)
    rows = np.array([2, 0, 1], np.int32)

    def call() -> Any:
        found = groups.candidates(ListedRows(jnp.asarray(x), jnp.asarray(rows), jnp.int32(2)), k)
        return groups.Top(*(part[:2] for part in found))  # the third row's are anything

    def check(found: Any) -> None:
        for i, row in enumerate(rows[:2]):
            ids = oracle.top_ids(x[row].astype(np.float64), k)
            np.testing.assert_array_equal(found.ids[i], ids)
            np.testing.assert_array_equal(found.logits[i], x[row].astype(np.float32)[ids])

    return Case(name, schedule, k, len(rows), call, check)


def verification(name: str, names: tuple[str, ...] = ()) -> Case:
    """`verify` that draws and ranks by the kernels, in a jitted program, beside XLA's.

    Slots of all kinds: greedy, plain, cut widely and narrowly; drafts mostly rejected. Rows that
    are changed in these ways are read by the kernels too.
    """
    slots, vocabulary = 8, 4099
    arrays = checks.verification(Shape(slots, vocabulary, 2, "float32"))
    logits = np.asarray(arrays[0])
    changes, _ = changed(logits.reshape(-1, vocabulary), names, all_rows=True)
    given = {
        field: part.reshape(*logits.shape[:2], -1)
        for field, part in (changes._asdict() if changes else {}).items()
        if part is not None
    }

    def verified() -> Any:
        def program(*arguments: Any, **given: Any) -> Any:
            found = verify(*arguments, k=2, **given)
            read = found.changed_read if given else found.read
            if given:
                given["scaled"] = jnp.ones(slots, bool)
            logprobs = logprobs_of_read(arguments[0], found.token_ids, read, **given)
            return found.token_ids, found.num_tokens, logprobs.token_ranks

        return jax.jit(program, compiler_options=quick_compile.OPTIONS)(*arrays, **given)

    expected = verified()
    kernels = SimpleNamespace(
        draw=draw.draw, count_larger=count_larger.count_larger,
        read_part=groups.read_part, candidates=groups.candidates,
    )  # fmt: skip
    used, jobs = [], ["count_larger", "draw", *(["groups"] if names else [])]

    def chosen(job: str, by_kernels: Any, by_xla: Any, *given: Any, **options: Any) -> Any:
        if options.get("backends") != ("mosaic_gpu",):
            return by_xla(*given)
        used.append(job)
        return by_kernels(kernels, *given)

    def call() -> Any:
        used.clear()
        jax.clear_caches()  # what was traced before has XLA in the kernels' place
        with mock.patch.object(read, "kernels_or_xla", chosen):
            return verified()

    def check(found: Any) -> None:
        assert sorted(set(used)) == jobs, used
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, other)
        assert (np.asarray(found[2]) > 3).any()  # a rank that the top K do not tell
        assert len(set(np.asarray(found[1]).tolist())) > 1

    schedule = fixed(vocabulary, "float32")
    return Case(name, schedule, 2, logits[..., 0].size, call, check)


def draw_mutant_case() -> Case:
    """A quick case for spoiled kernels."""
    return draws("draw", fixed(4868, "bfloat16"), 3)


def draw_cases() -> list[Callable[[], Case]]:
    """Functions that make the cases, one by one."""
    bf16, f16, f32 = "bfloat16", "float16", "float32"
    mask, bias = ("allowed",), ("bias",)
    return [
        lambda: draws("draw", fixed(8448, bf16), 1),
        lambda: draws("draw, odd", fixed(4867, bf16), 5),
        lambda: draws("draw, 64 taken", fixed(12_292, f32), 64),
        lambda: draws("draw, float16, even", fixed(4866, f16), 2),
        lambda: candidates("draw, 1024 candidates", fixed(135_176, bf16), 1024),
        lambda: ranks("ranks", fixed(8448, bf16)),
        lambda: ranks("ranks, odd", fixed(4867, f32)),
        lambda: ranks("ranks, whole blocks", fixed(8192, f16)),
        lambda: draws("draw, mask", fixed(4867, bf16), 5, mask),
        lambda: draws("draw, mask and bias", fixed(8452, bf16), 2, (*mask, *bias)),
        lambda: ranks("ranks, mask", fixed(4866, f16), mask),
        lambda: ranks("ranks, bias", fixed(8448, bf16), bias),
        lambda: verification("draw, ranks: verification"),
        lambda: verification("draw, ranks: verification, changed", (*mask, *bias)),
    ]

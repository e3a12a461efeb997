"""What follows the read of sampled rows, to be executed as PTX: draws, candidates, token ranks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.mosaic_gpu import count_larger, draw, groups
from pallas_kernels.backends.mosaic_gpu.tiling import Tiling
from pallas_kernels.testing import oracle
from tests.pallas_kernels.mosaic_gpu.ptx.cases import Case
from tests.pallas_kernels.mosaic_gpu.ptx.sampled_cases import fixed
from tests.support import drawn_tokens
from tests.support.drawn_tokens import PURPOSES, Slot

INVERSE = np.array([1, 0.5, 1.7], np.float32)


def logits_of(tiling: Tiling) -> np.ndarray:
    """[3, V] of normally distributed logits."""
    rng = np.random.default_rng(tiling.vocabulary)
    x: np.ndarray = (rng.normal(size=(3, tiling.vocabulary)) * 3).astype(jnp.dtype(tiling.dtype))
    return x


def slots_of(x: np.ndarray, most: int) -> list[Slot]:
    """Plain rows, a taken token, up to `most` of them, cuts with ties, and no row at all."""
    order = np.argsort(-x[2].astype(np.float32), kind="stable")
    last, cut, at = x.shape[1] - 1, float(x[2, order[300]]), int(order[300])
    rng = np.random.default_rng(most)
    some = tuple(map(int, rng.choice(last, most, replace=False)))
    return [
        Slot(0, 5, 7),
        Slot(-1),
        Slot(1, 2**32 - 1, 2**31 - 1, (int(x[1].argmax()),)),
        Slot(2, 9, 1, (last, last - 1, 3, 4)[:most]),
        Slot(2, 11, 2, (-1,), cut, at),
        Slot(2, 12, 2, tuple(map(int, order[:2]))[:most], cut, at),
        Slot(2, 13, 2, some),
    ]


def draws(name: str, tiling: Tiling, most: int) -> Case:
    """Draws with what a slot may have; against float64."""
    x = logits_of(tiling)
    slots = slots_of(x, most)
    given = drawn_tokens.rows_to_draw(x, slots, INVERSE)
    given = draw.RowsToDraw(*map(jnp.asarray, given))

    def call() -> Any:
        return draw.draw(jnp.asarray(x), given, PURPOSES)

    def check(found: Any) -> None:
        drawn_tokens.check(found, x, slots, INVERSE)

    return Case(name, tiling, 0, len(slots), call, check, (draw,))


def ranks(name: str, tiling: Tiling) -> Case:
    """Larger logits of likely and unlikely tokens, of none, and among equal ones."""
    x = logits_of(tiling).repeat(2, axis=0)
    x[1] = 0
    x[4, ::3] = -np.inf
    tokens = [int(x[0].argmax()), 5, -1, int(x[3].argmin()), 1, x.shape[1] - 1]
    ids = np.array(tokens, np.int32)
    maxima, _ = drawn_tokens.group_sums(x, np.ones(len(x)))
    expected = [
        int((row > row[token]).sum()) if token >= 0 else 0
        for row, token in zip(x.astype(np.float64), tokens, strict=True)
    ]

    def call() -> Any:
        arrays = jnp.asarray(x), jnp.asarray(maxima), jnp.asarray(ids)
        return count_larger.count_larger(*arrays)

    def check(found: Any) -> None:
        np.testing.assert_array_equal(found, expected)

    return Case(name, tiling, 0, len(x), call, check, (count_larger,))


def candidates(name: str, tiling: Tiling, k: int) -> Case:
    """The largest logits of listed rows, more of them than a call may ask for."""
    x = logits_of(tiling)
    rows = np.array([2, 0, 1], np.int32)

    def call() -> Any:
        found = groups.candidates(jnp.asarray(x), jnp.asarray(rows), jnp.int32(2), k)
        return groups.Top(*(part[:2] for part in found))  # the third row's are anything

    def check(found: Any) -> None:
        for i, row in enumerate(rows[:2]):
            ids = oracle.top_ids(x[row].astype(np.float64), k)
            np.testing.assert_array_equal(found.ids[i], ids)
            np.testing.assert_array_equal(found.logits[i], x[row].astype(np.float32)[ids])

    return Case(name, tiling, k, len(rows), call, check)


def draw_mutant_case() -> Case:
    """A quick case for spoiled kernels."""
    return draws("draw", fixed(4868, "bfloat16"), 3)


def draw_cases() -> list[Callable[[], Case]]:
    """Functions that make the cases, one by one."""
    bf16, f16, f32 = "bfloat16", "float16", "float32"
    return [
        lambda: draws("draw", fixed(8448, bf16), 1),
        lambda: draws("draw, odd", fixed(4867, bf16), 5),
        lambda: draws("draw, 64 taken", fixed(12_292, f32), 64),
        lambda: draws("draw, float16, even", fixed(4866, f16), 2),
        lambda: candidates("draw, 1024 candidates", fixed(135_176, bf16), 1024),
        lambda: ranks("ranks", fixed(8448, bf16)),
        lambda: ranks("ranks, odd", fixed(4867, f32)),
        lambda: ranks("ranks, whole blocks", fixed(8192, f16)),
    ]

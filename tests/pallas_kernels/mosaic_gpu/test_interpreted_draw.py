"""The GPU kernels that draw tokens and count larger logits, interpreted, against float64.

The compiled kernels are executed by `.ci/heavy ptx`.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends.mosaic_gpu import count_larger, draw, groups
from pallas_kernels.numbers.gumbel import gumbel
from pallas_kernels.numbers.threefry import word as threefry_word
from pallas_kernels.testing import oracle
from tests.support.drawn_tokens import PURPOSES, Slot, check, expected, group_sums, rows_to_draw
from tests.support.interpreted_kernels import checked, compiled, run_without_races

INVERSE = np.array([1, 0.5, 1.7, 1, 1], np.float32)
LIKELY = 2**32 - 1, 2**31 - 1  # a seed and a position
LAST = 196, 3  # whose draw from the fifth row is of the last group, where that is cut off
TIED = 772_913, 7  # that give the groups 1 and 4 the same noise
ODD = 4867, "bfloat16"  # the last group is cut off


@functools.cache
def logits_of(vocabulary, dtype):
    """Three ordinary rows, one of two equal groups, and one of the last tokens alone."""
    rng = np.random.default_rng(vocabulary)
    x = (rng.normal(size=(3, vocabulary)) * 3).astype(jnp.dtype(dtype))
    few = np.full_like(x[:2], -np.inf)
    few[0, 256:511] = few[0, 1024:1279] = 0  # each lacks its last token
    few[1, -256:] = 0
    return np.concatenate([x, few])


def slots_of(x):
    """Plain rows, taken tokens, one that was drawn, several of one group, cuts with ties, no row.

    The last two have a tie of two groups, of which either is summed again.
    """
    order = np.argsort(-x[2].astype(np.float32), kind="stable")
    last = x.shape[1] - 1
    cut = float(x[2, order[300]])
    return [
        Slot(0, 5, 7),
        Slot(-1),
        Slot(1, *LIKELY, (int(x[1].argmax()), expected(x, Slot(1, *LIKELY), INVERSE)[1])),
        Slot(4, *LAST),
        Slot(2, 9, 1, (last, last - 1, 3, 4)),
        Slot(2, 11, 2, (-1,), cut, int(order[300])),
        Slot(2, 12, 2, (int(order[0]), int(order[1])), cut, int(order[300])),
        Slot(2, 13, 2, tuple(map(int, order[1:3])), float(x[2, order[0]]), int(order[0])),
        Slot(3, *TIED, (511,)),
        Slot(3, *TIED, (1279,)),
    ]


def check_untied(found, x, slots, purposes=PURPOSES):
    """The draws that rounding does not decide are those of float64."""
    check(found, x, slots[:-2], INVERSE, purposes)


@functools.cache
def program():
    return compiled(functools.partial(draw.draw, purposes=PURPOSES))


def drawn(x, given):
    return checked(program(), jnp.asarray(x), given)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [pytest.param(*ODD, marks=pytest.mark.fast), (8448, "float32")]
)
def test_draws_are_those_of_float64(vocabulary, dtype):
    x = logits_of(vocabulary, dtype)
    slots = slots_of(x)
    found = drawn(x, rows_to_draw(x, slots, INVERSE))
    check_untied(found, x, slots)
    seed, position = jnp.uint32(TIED[0]), jnp.int32(TIED[1])
    noise = gumbel(threefry_word(seed, PURPOSES[0], position, jnp.array([1, 4])))
    assert noise[0] == noise[1]
    assert (found.token_ids[-2:] // 256).tolist() == [1, 1]  # the lower of equal groups


def test_broken_draws_are_seen():
    """Negative controls: one noise twice, a sum that lacks a token, a taken token that is kept."""
    x = logits_of(*ODD)
    slots = slots_of(x)
    right = rows_to_draw(x, slots, INVERSE)
    found = drawn(x, right)
    with pytest.raises(AssertionError, match="slot 0 drew"):
        check_untied(found, x, slots, (PURPOSES[1], PURPOSES[1]))
    wrong = rows_to_draw(x, slots, INVERSE, forget=int(found.token_ids[0]))
    with pytest.raises(AssertionError):
        check(drawn(x, wrong), x, slots[:1], INVERSE)
    wrong = right._replace(excluded_ids=np.full_like(right.excluded_ids, -1))
    with pytest.raises(AssertionError):
        check_untied(drawn(x, wrong), x, slots)


def test_larger_logits_are_counted():
    """Of the most and the least likely token, among equal logits, without a token."""
    x = logits_of(*ODD)[:3].repeat(2, axis=0)
    x[1] = 0
    x[4, ::3] = -np.inf
    tokens = np.array([x[0].argmax(), 5, -1, x[3].argmin(), 1, x.shape[1] - 1], np.int32)
    maxima, _ = group_sums(x, np.ones(len(x)))

    def call(*given, interpret):
        return count_larger.count_larger(*given, interpret)

    found = run_without_races(call, jnp.asarray(x), jnp.asarray(maxima), tokens)
    wide = x.astype(np.float64)
    pairs = zip(wide, tokens, strict=True)
    larger = [(row > row[token]).sum() if token >= 0 else 0 for row, token in pairs]
    np.testing.assert_array_equal(found, larger)


@pytest.mark.slow
def test_candidates_of_listed_rows():
    x = logits_of(*ODD)

    def call(x, rows, number, interpret):
        return groups.candidates(x, rows, number, 5, interpret)

    found = run_without_races(call, jnp.asarray(x), np.array([2, 1, 0], np.int32), np.int32(2))
    for i, row in enumerate((2, 1)):
        ids = oracle.top_ids(x[row].astype(np.float64), 5)
        np.testing.assert_array_equal(found.ids[i], ids)
        np.testing.assert_array_equal(found.logits[i], x[row].astype(np.float32)[ids])

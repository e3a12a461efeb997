"""Kept sets as ragged and as equal rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import wire
from ipc.wire import KEPT_ALL, KEPT_MANY
from jax_specdec.kept_sets import KeptSets, PaddedKept


def made(rows):
    """Sets of rows: a list of ids, or a mark or 0."""
    return KeptSets.of(
        np.array([len(row) if isinstance(row, list) else row for row in rows], np.int32),
        -np.arange(len(rows), dtype=np.float32),
        np.array([i for row in rows if isinstance(row, list) for i in row], np.int32),
    )


a_row = st.lists(st.integers(0, 50), min_size=1, max_size=4) | st.sampled_from([-1, -2, 0])


@given(st.lists(a_row, max_size=8), st.data())
def test_taking_and_joining(rows, data):
    sets = made(rows)
    index = st.integers(0, max(len(rows) - 1, 0))
    picked = data.draw(st.lists(index, max_size=6)) if rows else []
    taken = sets.take(np.array(picked, np.intp))
    both = KeptSets.joined([sets, taken])
    expected = [*range(len(rows)), *picked]
    assert both.counts.tolist() == sets.counts[expected].tolist()
    assert both.log_kept.tolist() == [float(-n) for n in expected]
    assert [both.ids(n).tolist() for n in range(len(both))] == [
        sets.ids(n).tolist() for n in expected
    ]


@given(st.lists(a_row, min_size=1, max_size=8), st.data())
def test_padded_rows_hold_each_set(rows, data):
    sets = made(rows)
    shape = data.draw(st.sampled_from([(3,), (2, 3)]))
    index = st.lists(st.integers(-1, len(rows) - 1), min_size=6, max_size=6)
    places = np.array(data.draw(index))[: int(np.prod(shape))].reshape(shape)
    padded = sets.padded(places)
    assert padded.counts.shape == padded.log_kept.shape == shape
    assert padded.token_ids.shape == (*shape, max(int(padded.counts.max()), 1))
    for at in np.ndindex(shape):
        n = places[at]
        ids = padded.token_ids[at].tolist()
        expected = sets.ids(n).tolist() if n >= 0 else []
        assert ids == expected + [-1] * (len(ids) - len(expected))
        assert padded.counts[at] == (sets.counts[n] if n >= 0 else 0)
        assert padded.log_kept[at] == (sets.log_kept[n] if n >= 0 else 0)


def test_padding_to_a_fixed_width():
    sets = made([[3, 5, 9], KEPT_ALL, [7], 0, KEPT_MANY, [1, 2]])
    assert sets.padded(width=8).token_ids.shape == (6, 8)
    assert sets.padded().token_ids.shape == (6, 3)
    assert KeptSets.none(2).padded().token_ids.tolist() == [[-1], [-1]]
    with pytest.raises(ValueError, match="a kept set of 3 ids does not fit width = 2: give 3"):
        sets.padded(width=2)
    for wrong in ([6], [-2]):
        with pytest.raises(ValueError, match="of 6 kept sets: they may be from 0 to 5, or -1"):
            sets.padded(np.array(wrong))


def test_sets_that_do_not_go_together_are_refused():
    two = np.array([1, 2], np.int32)
    mass = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r"2 counts of 3 kept ids in all .* 2 masses and 2 ids"):
        KeptSets.of(two, mass, two)
    with pytest.raises(ValueError, match="1 masses and 3 ids"):
        KeptSets.of(two, mass[:1], np.arange(3, dtype=np.int32))


def test_marks_and_limits_are_those_of_the_device():
    """The device's side knows no message, and a message no device."""
    from pallas_kernels.sampling import kept_set

    for name in ("MAX_KEPT", "KEPT_ALL", "KEPT_MANY"):
        assert getattr(kept_set, name) == getattr(wire, name)
    assert kept_set.PaddedKept._fields == PaddedKept._fields

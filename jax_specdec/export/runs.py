"""Lists one after the other, as NumPy arrays of their values and sizes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, .. of each of the lists that are `counts` [N] long, one after the other."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1]) if ends.size else 0) - (ends - counts).repeat(counts)


def cells(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of lists of `sizes` [N] from `starts` [N] on, one after the other."""
    return within(sizes) + starts.repeat(sizes)


def sorted_lists(
    sizes: NDArray[np.int64], order: NDArray[np.int64] | None
) -> tuple[Callable[[NDArray[Any]], NDArray[Any]], NDArray[np.int64]]:
    """What puts lists of `sizes` [N] into another order, and their sizes there."""
    if order is None:
        return lambda values: values, sizes
    size = int(sizes[0])
    if (sizes == size).all():
        return lambda values: values.reshape(-1, size)[order].reshape(-1), sizes
    ends = sizes.cumsum()
    places = cells((ends - sizes)[order], sizes[order])
    return lambda values: values[places], sizes[order]


def offsets(counts: NDArray[Any]) -> NDArray[np.int32]:
    """[N + 1] where lists of `counts` [N] begin, and where the last one ends."""
    found = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=found[1:])
    return found

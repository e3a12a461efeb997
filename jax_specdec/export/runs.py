"""Lists one after the other, as NumPy arrays of their values and sizes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.kept_sets import cells


def sorted_lists(
    sizes: NDArray[np.int64], order: NDArray[np.int64] | None
) -> tuple[Callable[[NDArray[Any]], NDArray[Any]], NDArray[np.int64]]:
    """A function that puts lists of `sizes` [N] into another order, and their sizes there."""
    if order is None:
        return lambda values: values, sizes
    size = int(sizes[0])
    if (sizes == size).all():
        return lambda values: values.reshape(-1, size).take(order, 0).reshape(-1), sizes
    ends = sizes.cumsum()
    places = cells((ends - sizes)[order], sizes[order])
    return lambda values: values[places], sizes[order]

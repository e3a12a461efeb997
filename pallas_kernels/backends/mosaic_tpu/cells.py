"""Cells: 16 logits of a lane, in 16 columns of the vocabulary, as a square of 4 rows and 4 columns.

A cell's maxima are the largest logit of each of its rows and columns, and of them all. Those that
reach a bound say where its candidates are: one row and one column where there is one candidate. Two
of them lie in two rows or in two columns. So 8 maxima are compared, not 16 logits, and a cell with
several candidates is known.

Where the rows of logits are so long that there is no room for maxima in VMEM, they are made again.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backends.mosaic_tpu.schedule import SUBLANES, Schedule
from pallas_kernels.backends.mosaic_tpu.unit import SHAPE, Index, Span
from pallas_kernels.lowering.row_pieces import in_pairs as tree

Maxima = list[jax.Array]  # [8, 128] each: of all, of each row, of each column

# A code is a float32: the sum of what the rows and columns with a candidate stand for, and the
# cell's number. The parts of one candidate's code are its place, 1 row and 1 column.
_CELL_BITS = 11
_ROW, _COLUMN, _CELL = (
    1 << 5,
    1 << 8,
    1 << _CELL_BITS,
)  # bits 5 to 7: how many rows; 8 to 10: how many columns
_COUNTS = _CELL - _ROW
_ONE = _ROW + _COLUMN


class Cells(NamedTuple):
    """The maxima of a unit's cells in VMEM, or None where they are not kept."""

    schedule: Schedule
    ref: jax.Ref | None  # [cells * numbers, unit, 128] float32

    def store(self, cell: Index, half: int, maxima: Maxima) -> None:
        if self.ref is not None:
            for i, vector in enumerate(maxima):
                self.ref[cell * len(maxima) + i, half_of(half), :] = vector

    def load(self, cell: Index, half: int) -> Maxima:
        assert self.ref is not None
        number = self.schedule.cell_maxima
        return [self.ref[cell * number + i, half_of(half), :] for i in range(number)]


class Square:
    """The maxima of a cell, while its columns come one after the other."""

    def __init__(self, schedule: Schedule) -> None:
        rows, columns = schedule.square
        self._rows: list[list[jax.Array]] = [[] for _ in range(rows)]
        self._columns: list[list[jax.Array]] = [[] for _ in range(columns)]
        self._number = 0

    def add(self, x: list[jax.Array], largest: jax.Array) -> None:
        """Takes some columns of a row of the square, and the largest logit of these."""
        width = len(self._columns)
        row, place = divmod(self._number, width)
        _join(self._rows[row], largest)
        for i, logits in enumerate(x, place):
            _join(self._columns[i], logits)
        self._number += len(x)

    @property
    def is_empty(self) -> bool:
        return not self._number

    @property
    def is_full(self) -> bool:
        return self._number == len(self._rows) * len(self._columns)

    def maxima(self) -> Maxima:
        """The maxima; -inf where there were no columns."""
        least = jnp.full(SHAPE, -jnp.inf, jnp.float32)
        rows = [row[0] for row in self._rows if row]
        lines = [line[0] if line else least for line in (*self._rows, *self._columns)]
        return [tree(jnp.maximum, rows), *lines]


def square_maxima(schedule: Schedule, x: list[jax.Array]) -> Maxima:
    """The maxima of a cell's columns."""
    square = Square(schedule)
    width = schedule.square[1]
    for begin in range(0, len(x), width):
        row = x[begin : begin + width]
        square.add(row, functools.reduce(jnp.maximum, row))
    return square.maxima()


def code(schedule: Schedule, maxima: Maxima, bound: jax.Array, first: jax.Array) -> jax.Array:
    """Where a cell's candidates are: [8, 128] float32. first: that of a cell without any."""
    rows, columns = schedule.square
    values = [float(_ROW + i * columns) for i in range(rows)]
    values += [float(_COLUMN + i) for i in range(columns)]
    parts = [
        jnp.where(largest >= bound, value, 0.0)
        for largest, value in zip(maxima[1:], values, strict=True)
    ]
    return tree(jnp.add, [first, *parts])


def first_codes(cell: Index) -> jax.Array:
    """The code of a cell without candidates: [8, 128] float32."""
    return jnp.full(SHAPE, cell * _CELL, jnp.int32).astype(jnp.float32)


def next_code(first: jax.Array, number: int) -> jax.Array:
    """`first_codes` of a later cell."""
    return first + float(number * _CELL)


def code_of_column(first: jax.Array, column: int) -> jax.Array:
    """The code of a cell whose one candidate is in this column."""
    return first + float(_ONE + column)


def has_several(codes: jax.Array) -> jax.Array:
    """Whether these are the codes of cells with more than one candidate: bool."""
    counts = codes.astype(jnp.int32) & _COUNTS
    return counts != _ONE


def cell_of(codes: jax.Array) -> jax.Array:
    """The cells of codes: int32."""
    return codes.astype(jnp.int32) >> _CELL_BITS


def columns_of(schedule: Schedule, codes: jax.Array) -> jax.Array:
    """The columns of the vocabulary that codes of one candidate stand for: int32."""
    integers = codes.astype(jnp.int32)
    return (integers >> _CELL_BITS) * schedule.cell + (integers & (_ROW - 1))


def half_of(half: int) -> Span:
    """The place of these 8 rows in a unit."""
    return slice(half * SUBLANES, (half + 1) * SUBLANES)


def _join(line: list[jax.Array], x: jax.Array) -> None:
    line[:] = [jnp.maximum(line[0], x)] if line else [x]

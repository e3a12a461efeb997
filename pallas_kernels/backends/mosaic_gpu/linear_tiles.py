"""How the product of hidden states and a head is cut up for the fused kernel of an H100.

    tile       128 rows of hidden times 256 tokens of the head: what a program makes at a time
    group      256 tokens from a multiple of 256 on: each row has a maximum and sums of each
    half       64 rows of a tile: what one of two warpgroups multiplies and reduces
    step       64 numbers of each row and token: what is loaded at a time
    band       rows of which all tiles come before the next band's

A program takes every `programs`-th tile. Within a band, the tiles of a group are neighbors: they
run at about the same time, so the head is read from the memory once a band, and the band's hidden
states stay in the L2 cache. Tiles at an end are moved inside: there, rows are computed twice, and
tokens that are of the group before are left out. Results have places for all rows of all tiles:
nothing is written twice.

Without pairs, a tile takes 384 rows from the L2 cache for 128 x 256 logits: 85 operations a byte,
and at the speed of a good product 8 TB/s. With pairs it is 256 rows, and 6 TB/s.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

ROWS = 128
HALF = 64
GROUP = 256
STEP = 64
ALIGNED = 8  # rows and tokens that TMA copies as one, of which tiles begin and end at the first
MANY = 8  # tiles of rows, from where on one more than needed does not matter
STAGES = 4  # steps in shared memory: 48 KiB each, of 227 KiB
BAND_BYTES = 16 << 20  # of hidden: a third of an H100's L2 cache


@dataclass(frozen=True)
class Tiles:
    """The cut of one product of at least ROWS rows and GROUP tokens.

    rows, tokens: multiples of ALIGNED.
    size: a multiple of STEP.
    together: 2 where tiles come in pairs, else 1.
    diagonal: of row i, the logit of token i alone is wanted; GROUP - ROWS tokens more than rows.
    """

    rows: int
    tokens: int
    size: int  # H
    together: int = 1
    diagonal: bool = False

    @property
    def row_tiles(self) -> int:
        """Tiles of rows; the last one of a pair may have rows of the one before again."""
        return -(-self.rows // (ROWS * self.together)) * self.together

    @property
    def places(self) -> int:
        """Of results, for each group."""
        return self.row_tiles * ROWS

    def of_rows(self, x: Any) -> Any:
        """The results of all rows once: [.., places] -> [.., rows]."""
        whole = self.rows // ROWS * ROWS
        rest = self.rows - whole
        if not rest:
            return x[..., :whole]
        return jnp.concatenate([x[..., :whole], x[..., whole + ROWS - rest : whole + ROWS]], -1)

    @property
    def groups(self) -> int:
        return -(-self.tokens // GROUP)

    @property
    def steps(self) -> int:
        return self.size // STEP

    @property
    def band(self) -> int:
        """Row tiles, or pairs of them, in a band, but for the last one."""
        most = BAND_BYTES // (2 * ROWS * self.together * self.size)
        return min(self.row_tiles // self.together, max(1, most))

    @property
    def number(self) -> int:
        """How many tiles, or pairs, there are."""
        return self.row_tiles // self.together * (1 if self.diagonal else self.groups)

    def place(self, number: Any) -> tuple[Any, Any]:
        """The tile of rows, the first of a pair, and the group; of an int32 below `number`."""
        if self.diagonal:
            return number, number
        whole = self.band * self.groups
        before = number // whole * self.band
        rest = number % whole
        here = jnp.minimum(self.band, self.row_tiles // self.together - before)
        group = rest // here
        return (before + rest - group * here) * self.together, group

    def first_row(self, row_tile: Any) -> Any:
        """The first row that is read."""
        return jnp.minimum(row_tile * ROWS, self.rows - ROWS)

    def first_token(self, group: Any) -> Any:
        """The first token that is read."""
        if self.diagonal:
            return self.first_row(group)
        return jnp.minimum(group * GROUP, self.tokens - GROUP)


def choose_tiles(rows: int, tokens: int, size: int) -> Tiles:
    """In pairs where that makes few tiles too many."""
    tiles = Tiles(rows, tokens, size)
    pairs = tiles.row_tiles % 2 == 0 or tiles.row_tiles > MANY
    return Tiles(rows, tokens, size, 2 if pairs else 1)


def programs(tiles: Tiles, multiprocessors: int) -> int:
    """One a multiprocessor or tile; or one for each two, or pair."""
    return min(max(1, multiprocessors // tiles.together), tiles.number)

"""How the product of hidden states and a head is cut up for the fused kernel of an H100.

    tile       128 rows of hidden times 256 tokens of the head: what a program makes at a time
    group      256 tokens from a multiple of 256 on: each row has a maximum and sums of each
    half       64 rows of a tile: what one of two warpgroups multiplies and reduces
    step       64 numbers of each row and token: what is loaded at a time
    band       rows of which all tiles come before the next band's

A program takes every `programs`-th tile. Within a band, the tiles of a group are neighbors: they
run at about the same time, so the head is read from the memory once a band, and the band's hidden
states stay in the L2 cache. Rows and tokens at the end are moved inside: there, rows are computed
twice, and tokens that are of the group before are left out.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

ROWS = 128
HALF = 64
GROUP = 256
STEP = 64
STAGES = 4  # steps in shared memory: 48 KiB each, of 227 KiB
BAND_BYTES = 16 << 20  # of hidden: a third of an H100's L2 cache
MULTIPROCESSORS = 132  # of an H100 SXM; one program fits on each


@dataclass(frozen=True)
class Tiles:
    """The cut of one product: at least ROWS rows, GROUP tokens; size is a multiple of STEP.

    diagonal: of row i, the logit of token i alone is wanted; GROUP - ROWS tokens more than rows.
    """

    rows: int
    tokens: int
    size: int  # H
    diagonal: bool = False

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def groups(self) -> int:
        return -(-self.tokens // GROUP)

    @property
    def steps(self) -> int:
        return self.size // STEP

    @property
    def band(self) -> int:
        """Row tiles of a band, but for the last one."""
        return min(self.row_tiles, max(1, BAND_BYTES // (2 * ROWS * self.size)))

    @property
    def number(self) -> int:
        """How many tiles there are."""
        return self.row_tiles * (1 if self.diagonal else self.groups)

    def place(self, tile: Any) -> tuple[Any, Any]:
        """The tile of rows, and the group, of an int32 number below `number`."""
        if self.diagonal:
            return tile, tile
        whole = self.band * self.groups
        before = tile // whole * self.band  # row tiles
        rest = tile % whole
        here = jnp.minimum(self.band, self.row_tiles - before)
        group = rest // here
        return before + rest - group * here, group

    def first_row(self, row_tile: Any) -> Any:
        """The first row that is read."""
        return jnp.minimum(row_tile * ROWS, self.rows - ROWS)

    def first_token(self, group: Any) -> Any:
        """The first token that is read."""
        if self.diagonal:
            return self.first_row(group)
        return jnp.minimum(group * GROUP, self.tokens - GROUP)

"""How many drafts each slot's steps proposed and accepted: histograms, from which statistics come.

They are read when a request ends, and every step adds to them. What steps of all slots add is kept
as it came, and counted for many steps at once.
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_RECENT = 32  # steps


class Outcomes(NamedTuple):
    """The outcomes of B slots' steps.

    Attributes:
      table: [B, 3, D+1] int64, the histograms of `Statistics` in its order, without `recent`.
      recent: of the last steps, in which all slots had tokens, the numbers of drafts and of emitted
        tokens, [B] int64 each.
      most_drafts: of these steps, at least.
    """

    table: NDArray[np.int64]
    recent: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...] = ()
    most_drafts: int = 0

    @classmethod
    def none(cls, num_slots: int) -> "Outcomes":
        """Of slots without a step."""
        table = np.zeros((num_slots, 3, 1), np.int64)
        table.setflags(write=False)
        return cls(table)

    def counted(self) -> NDArray[np.int64]:
        """[B, 3, D+1] int64, the histograms of all steps; read-only."""
        if not self.recent:
            return self.table
        shape = len(self.recent), len(self.table)
        drafts, counts = (
            np.concatenate(steps).reshape(shape) for steps in zip(*self.recent, strict=True)
        )
        return _added(self.table, np.arange(shape[1]), drafts, counts, self.most_drafts)

    def after(
        self,
        slots: NDArray[np.intp],
        num_drafts: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        most_drafts: int,
    ) -> "Outcomes":
        """With a step in which some slots [N] emitted `num_tokens` [N] after `num_drafts` [N].

        No slot of it has more than `most_drafts`.
        """
        drafts, counts = num_drafts[None], num_tokens[None]
        return Outcomes(_added(self.counted(), slots, drafts, counts, most_drafts))

    def after_all(
        self, num_drafts: NDArray[np.int64], num_tokens: NDArray[np.int64], most_drafts: int
    ) -> "Outcomes":
        """`after` of all slots; the arrays must stay as they are."""
        recent = (*self.recent, (num_drafts, num_tokens))
        outcomes = Outcomes(self.table, recent, max(self.most_drafts, most_drafts))
        return outcomes if len(recent) < MOST_RECENT else Outcomes(outcomes.counted())

    def without(self, slot: int) -> "Outcomes":
        """As if `slot` had had no step."""
        table = self.counted().copy()
        table[slot] = 0
        table.setflags(write=False)
        return Outcomes(table)


def _added(
    table: NDArray[np.int64],
    slots: NDArray[np.intp],
    num_drafts: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    most_drafts: int,
) -> NDArray[np.int64]:
    """A table with S steps [S, N] of N slots; wider where they have more drafts."""
    width = max(most_drafts + 1, table.shape[2])
    after = np.zeros((len(table), 3, width), np.int64)
    after[:, :, : table.shape[2]] = table
    flat, first = after.reshape(-1), _first_of_rows(len(table), width)[slots]
    ends = num_tokens + (first + (width - 1))
    np.add.at(flat, (num_drafts + first).reshape(-1), 1)
    np.add.at(flat, (ends + (num_tokens > num_drafts) * width).reshape(-1), 1)
    after.setflags(write=False)
    return after


@functools.lru_cache(16)
def _first_of_rows(number: int, width: int) -> NDArray[np.int64]:
    """[number] int64, where each slot's begin in a table as it lies in memory."""
    return np.arange(number) * (3 * width)

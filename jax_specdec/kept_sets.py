"""Kept sets: the token ids that a row's distribution kept, for many rows.

A set is ragged, from one id to `ipc.wire.MAX_KEPT`, so rows come one after the other with offsets
(`KeptSets`, the CSR of sparse matrices). A learner's compiled program wants equal rows instead
(`PaddedKept`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import jax_specdec.beside.ipc  # noqa: F401
from ipc.field_docs import with_field_docs
from ipc.wire import MAX_KEPT

_Array = Any  # numpy.ndarray or jax.Array: this module imports no jax


@with_field_docs
class PaddedKept(NamedTuple):
    """Kept sets as rows [...] of one width M; a tree of arrays for `jax`.

    Attributes:
      token_ids: [..., M] int32, ascending; -1 from the row's count on.
      counts: [...] int32: the ids, `KEPT_ALL` or `KEPT_MANY`; 0 where there is no token.
      log_kept: [...] float32: log of the kept tokens' share; 0 where there is no token.
    """

    token_ids: _Array
    counts: _Array
    log_kept: _Array


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The kept sets of N tokens: that of token i is `token_ids[offsets[i] : offsets[i + 1]]`.

    Attributes:
      counts: [N] int32. The number of kept ids, from 1 to 1,024; or a mark where no ids follow:
        `ipc.wire.KEPT_ALL` (-1), nothing was cut, or `ipc.wire.KEPT_MANY` (-2), more than 1,024
        are left. 0 stands for a token whose request asked for no kept sets.
      log_kept: [N] float32, at most 0: log of the kept tokens' share of the scaled distribution.
      offsets: [N + 1] int64, from 0.
      token_ids: [M] int32, ascending within each set.
    """

    counts: NDArray[np.int32]
    log_kept: NDArray[np.float32]
    offsets: NDArray[np.int64]
    token_ids: NDArray[np.int32]

    @classmethod
    def of(
        cls, counts: NDArray[np.int32], log_kept: NDArray[np.float32], token_ids: NDArray[np.int32]
    ) -> "KeptSets":
        """Sets of `counts` [N], with their ids one after the other.

        Raises:
          ValueError: there are more or fewer ids than the counts say, or counts than masses.
        """
        offsets = offsets_of(counts)
        if (len(log_kept), len(token_ids)) != (len(counts), int(offsets[-1])):
            raise ValueError(
                f"{len(counts)} counts of {int(offsets[-1])} kept ids in all do not go with "
                f"{len(log_kept)} masses and {len(token_ids)} ids: give as many as the counts say"
            )
        return cls(counts, log_kept, offsets, token_ids)

    @classmethod
    def none(cls, count: int = 0) -> "KeptSets":
        """The sets of `count` tokens whose request asked for none."""
        zeros = np.zeros(count, np.int32)
        return cls.of(zeros, zeros.astype(np.float32), np.empty(0, np.int32))

    @classmethod
    def joined(cls, parts: Sequence["KeptSets"]) -> "KeptSets":
        """The sets of all `parts`, in order."""
        if not parts:
            return cls.none()
        return cls.of(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.log_kept for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.counts)

    def ids(self, index: int) -> NDArray[np.int32]:
        """The ids of set `index`, ascending; none where its count is a mark or 0."""
        return self.token_ids[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: NDArray[np.intp]) -> "KeptSets":
        """The sets of `rows` [N'], in any order."""
        counts, places = self.counts[rows], self._places(rows)
        return KeptSets.of(counts, self.log_kept[rows], self.token_ids[places])

    def padded(
        self, rows: NDArray[np.intp] | None = None, *, width: int | None = None
    ) -> PaddedKept:
        """The sets as equal rows, as `jax_specdec.device.kept_logprobs` takes them.

        Args:
          rows: [...] which set goes where; -1 where there is no token (a prompt, padding). None:
            all sets, as [N].
          width: M. A fixed one keeps a compiled program; None: the largest set's size.

        Raises:
          ValueError: a set is larger than `width`, or a row is no set.
        """
        rows = np.arange(len(self)) if rows is None else np.asarray(rows, np.intp)
        if rows.size and not -1 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise ValueError(
                f"rows from {int(rows.min())} to {int(rows.max())} of {len(self)} kept sets: "
                f"they may be from 0 to {len(self) - 1}, or -1 for no token"
            )
        flat = rows.reshape(-1)
        there = flat >= 0
        counts, log_kept = np.zeros(flat.shape, np.int32), np.zeros(flat.shape, np.float32)
        counts[there], log_kept[there] = self.counts[flat[there]], self.log_kept[flat[there]]
        most = max(int(counts.max(initial=0)), 1)
        if width is not None and width < most:
            raise ValueError(
                f"a kept set of {most} ids does not fit width = {width}: give {most} or more "
                f"(no set has more than {MAX_KEPT}), or leave it out"
            )
        ids = np.full((len(flat), width or most), -1, np.int32)
        ids[np.arange(ids.shape[1]) < counts[:, None]] = self.token_ids[self._places(flat[there])]
        return PaddedKept(
            ids.reshape(*rows.shape, -1), counts.reshape(rows.shape), log_kept.reshape(rows.shape)
        )

    def _places(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """The places in `token_ids` of the sets of `rows` [N'], one after the other."""
        sizes = np.maximum(self.counts[rows], 0).astype(np.int64)
        return cells(self.offsets[:-1][rows], sizes)


def places_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, .. of each of the lists that are `counts` [N] long, one after the other."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1]) if ends.size else 0) - (ends - counts).repeat(counts)


def cells(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of lists of `sizes` [N] from `starts` [N] on, one after the other."""
    return places_within(sizes) + starts.repeat(sizes)


def offsets_of(counts: NDArray[Any]) -> NDArray[np.int64]:
    """[N + 1] int64 where the lists of `counts` [N] begin, and where the last ends.

    A count that is a mark is that of an empty list.
    """
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.maximum(counts, 0), out=offsets[1:])
    return offsets

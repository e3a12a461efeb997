"""Step 3 of the selection: candidates in order, each by itself.

A candidate's rank is the number of candidates that come before it: those with a larger key, and of
those with its key the ones with a lower id. Each thread counts for its own candidates, so no thread
waits for another one; then it writes their results where they belong.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.keys import LOWEST_KEY
from pallas_kernels.backends.mosaic_gpu.thread import Word, word
from pallas_kernels.backends.mosaic_gpu.tiling import WARPGROUP

AT_ONCE = 4  # candidates that are compared before the loop looks whether it ends
ROOM = 2 * AT_ONCE  # words behind the candidates
OWN = 2  # of a thread, compared in one loop: the loops of those that are not there are left out


def in_order(
    found_ref: Any, count: jax.Array, capacity: int, interpreted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The candidates and their ranks.

    Args:
      found_ref: [2 * capacity + ROOM] i32 in shared memory: `candidates.collect`'s.
      count: int32, how many candidates there are, at most `capacity`.
      capacity: a multiple of 128.
      interpreted: whether the kernel is.

    Returns:
      ranks, keys and ids [capacity] int32, the ranks a permutation. Where there is no candidate,
      key `LOWEST_KEY` and id -1, in the last ranks.
    """
    if interpreted:
        pairs = found_ref[pl.ds(0, 2 * capacity)].reshape(capacity, 2)
        here = jnp.arange(capacity) < count
        ids = jnp.where(here, ~pairs[:, 0], -1)
        keys = jnp.where(here, pairs[:, 1], LOWEST_KEY)
        before = keys[None] > keys[:, None]
        before |= (keys[None] == keys[:, None]) & (ids[None] < ids[:, None])
        ranks = jnp.sum(before & here[None], axis=1, dtype=jnp.int32)
        return jnp.where(here, ranks, jnp.arange(capacity, dtype=jnp.int32)), keys, ids
    layout = compat.vector_layout()
    kind = thread.result((capacity,), jnp.int32, layout)

    def body(positions: Any, found: Any, number: Any) -> Any:
        mine = thread.words(positions)
        columns = zip(*_ranked(mine, found, word(number)), strict=True)
        return tuple(thread.vector_like(positions, column, True) for column in columns)

    arguments = compat.vector_iota(capacity), found_ref, count
    ranks, keys, ids = thread.inline(body, arguments, (layout, None, "scalar"), (kind,) * 3)
    return ranks, keys, ids


def _ranked(mine: list[Word], found_ref: Any, count: Word) -> list[tuple[Word, Word, Word]]:
    """What a thread does for the candidates of these numbers: rank, key and id of each."""
    me = thread.thread()

    def end() -> None:
        """Candidates that come before no other one, so that the loop needs no end of its own."""
        at = (count + me) + (count + me)
        thread.store(found_ref, at, 0)
        thread.store(found_ref, at + 1, -(1 << 31))

    thread.when(me < AT_ONCE, end)
    thread.barrier()
    pairs = [_pair(thread.load_aligned(found_ref, place + place, 2)) for place in mine]
    longs = [thread.as_long(key, low) for low, key in pairs]

    ranks = _counts(found_ref, count, longs[:OWN])
    for begin in range(OWN, len(mine), OWN):
        own = longs[begin : begin + OWN]
        used = count > begin * WARPGROUP
        ranks += thread.when_else(
            used, functools.partial(_counts, found_ref, count, own), [word(0) for _ in own]
        )
    out = []
    for place, rank, (low, key) in zip(mine, ranks, pairs, strict=True):
        here = place < count
        key, token = thread.select(here, key, LOWEST_KEY), thread.select(here, ~low, -1)
        out.append((thread.select(here, rank, place), key, token))
    return out


def _counts(found_ref: Any, count: Word, own: list[Word]) -> list[Word]:
    """For each of these candidates, how many come before it."""

    def compare(i: Word, ranks: list[Word]) -> list[Word]:
        for j in range(0, AT_ONCE, 2):
            four = thread.load_aligned(found_ref, (i + j) + (i + j), 4)
            for low, key in (_pair(four[:2]), _pair(four[2:])):
                other = thread.as_long(key, low)
                before = [thread.select(other > x, 1, 0) for x in own]
                ranks = [rank + one for rank, one in zip(ranks, before, strict=True)]
        return ranks

    return thread.repeat(0, count, AT_ONCE, [word(0) for _ in own], compare)


def _pair(values: list[Any]) -> tuple[Word, Word]:
    low, key = values
    return word(low), word(key)


def scatter(
    ref: Any, start: Any, ranks: jax.Array, values: jax.Array, k: int, interpreted: bool
) -> None:
    """Write each value whose rank is below k to ref[start + rank].

    ref: flat, in global memory; ranks: [n] int32, different; values: [n].
    """
    if interpreted:
        new = jnp.zeros(k, values.dtype).at[jnp.where(ranks < k, ranks, k)].set(values, mode="drop")
        ref[pl.ds(start, k)] = new
        return

    def body(out: Any, begin: Any, ranks_here: Any, values_here: Any) -> None:
        pairs = zip(thread.words(ranks_here), thread.words(values_here), strict=True)
        for rank, value in pairs:
            thread.when(rank < k, _storing(out, word(begin) + rank, value))

    layout = compat.vector_layout()
    thread.inline(body, (ref, start, ranks, values), (None, "scalar", layout, layout), ())


def _storing(ref: Any, place: Word, value: Word) -> Any:
    return lambda: thread.store(ref, place, value)

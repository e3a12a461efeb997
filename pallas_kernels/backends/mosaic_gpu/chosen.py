"""Step 1 of the selection: the K groups with the largest maxima, ties lowest group.

A thread holds a run of group maxima as ordered integers. `nth_largest` halves the range of keys
until as many groups as wanted lie above; `choose` writes the groups into a list. Nothing depends on
K but the number of halvings: at most 32, about 8 for logits of a model.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.mosaic_gpu import thread
from pallas_kernels.backends.mosaic_gpu.keys import NOTHING, middle
from pallas_kernels.backends.mosaic_gpu.thread import Word, word

WARPS = 4
TIES = 16  # counts of ties are in the upper bits of a word, counts of larger keys below
MAX_GROUPS = 2**16 - 1  # what those count


def nth_largest(keys: jax.Array, k: int, largest: jax.Array, *, padded: bool = True) -> jax.Array:
    """An int32 so that exactly k keys are not below it, or the k-th largest key.

    Args:
      keys: [n] int32, more than k of them above `NOTHING`.
      k: a Python int.
      largest: their maximum.
      padded: whether any may be `NOTHING`.
    """

    def larger_half(state: Any) -> Any:
        low, high, _ = state
        cut = middle(low, high)
        above = count_not_below(keys, cut)
        enough = above >= k
        found = jnp.where(enough, above, jnp.int32(0))
        return jnp.where(enough, cut, low), jnp.where(enough, high, cut), found

    def unsure(state: Any) -> Any:
        low, high, above = state
        return (middle(low, high) != low) & (above != k)

    # The smallest of them, by a maximum, which is one instruction a warp and a minimum is not.
    smallest = ~jnp.max(jnp.where(keys == NOTHING, NOTHING, ~keys) if padded else ~keys)
    # k keys are at `low` or above it, fewer at `high`.
    low, _, _ = lax.while_loop(unsure, larger_half, (smallest, largest + 1, jnp.int32(0)))
    return low


def count_not_below(keys: jax.Array, cut: jax.Array) -> jax.Array:
    """The number of keys at the cut or above it."""
    return jnp.sum(jnp.where(keys >= cut, jnp.int32(1), jnp.int32(0)))


def choose(
    keys: jax.Array,
    layout: Any,
    cut: jax.Array,
    k: int,
    chosen_ref: Any,
    totals_ref: Any,
    interpreted: bool,
) -> None:
    """Write which keys are above the cut, and of those at it the first ones, k at most.

    Args:
      keys: [n] int32.
      layout: of keys, a `compat.run_layout`.
      cut: at most k keys are above it.
      k: a Python int.
      chosen_ref: [k] i32 in shared memory, out: indices of keys, in no order.
      totals_ref: [4] i32 in shared memory, which is used.
      interpreted: whether the kernel is.
    """
    if keys.shape[0] > MAX_GROUPS:
        raise NotImplementedError(
            f"{keys.shape[0]} groups of logits are more than {MAX_GROUPS}: "
            'take implementation="xla", or split the vocabulary over devices'
        )
    if interpreted:
        first = jnp.argsort(jnp.where(keys > cut, 0, jnp.where(keys == cut, 1, 2)), stable=True)
        chosen_ref[...] = first[:k].astype(jnp.int32)
        return

    def body(keys_here: Any, cut_here: Any, chosen: Any, totals: Any) -> None:
        mine = thread.words(keys_here)
        _choose(mine, word(cut_here), k, chosen, totals)

    thread.inline(body, (keys, cut, chosen_ref, totals_ref), (layout, "scalar", None, None), ())


def _choose(mine: list[Word], cut: Word, k: int, chosen_ref: Any, totals_ref: Any) -> None:
    """What a thread does, which holds these keys."""
    flags = [thread.select(key > cut, 1, thread.select(key == cut, 1 << TIES, 0)) for key in mine]
    total = flags[0]
    for flag in flags[1:]:
        total = total + flag
    lane, warp = thread.thread() & 31, thread.thread() >> 5
    upto = total  # of the lanes of the warp up to this one
    for distance in (1, 2, 4, 8, 16):
        below = thread.from_lane_below(upto, distance)
        upto = upto + thread.select(lane >= distance, below, 0)
    thread.when(lane == 31, lambda: thread.store(totals_ref, warp, upto))
    thread.barrier()
    before, everything = upto - total, word(0)
    for i, value in enumerate(thread.load_aligned(totals_ref, 0, WARPS)):
        before = before + thread.select(warp > i, value, 0)
        everything = everything + value
    mask = (1 << TIES) - 1
    # The next places: of a larger key in the lower bits, of a tie, behind all larger, in the upper.
    place = before + ((everything & mask) << TIES)
    first = thread.thread() * len(mine)
    for i, flag in enumerate(flags):
        slot = thread.select(flag == 1, place & mask, place >> TIES)
        wanted = (flag != 0) & (slot < k)
        thread.when(wanted, _storing(chosen_ref, slot, first + i))
        place = place + flag


def _storing(ref: Any, slot: Word, value: Word) -> Any:
    return lambda: thread.store(ref, slot, value)

"""Selection in pass 2 on a GPU: the exact top K of a row from its group maxima and K of its groups.

The warpgroup that serves the row does this:

1. Take the K groups with the largest maxima, ties lowest group. They contain the top K, and since
   groups are contiguous and in index order, the lowest ids among equal logits too.
2. Read those groups again (and nothing else of the row) into shared memory, as ordered integers
   beside their token ids.
3. Take the largest K times, ties lowest id.

Each "take" is a maximum over the warpgroup, then the minimum of the positions that attain it:
Mosaic GPU has neither sort nor argmax. 16-bit logits leave room in an integer for the group's
position, so that one maximum does in step 1. The chain of 4 K (3 K) reductions is pass 2's cost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.compat import GPU
from pallas_kernels.mosaic_gpu.tiling import Tiling

TAKEN = -(2**31)  # the key below all others: NaN, what was taken, what is no logit
NO_POSITION = 2**31 - 1
LOWEST_KEY = 0x007FFFFF - 2**31  # of -inf
MAX_IN_REGISTERS = 8192  # candidates: 64 registers a thread
GROUPS_AT_ONCE = 8
FREE_BITS = (1 << 13) - 1  # always equal in float32 values of one sign that were 16-bit logits
SCAN_WIDTH = 1024


class RowOfLogits(NamedTuple):
    """A row as pass 2 reads it."""

    logits_ref: Any  # [N * V]
    first: Any  # where the row starts
    skew: Any  # `Tiling.skew`
    interpreted: bool

    def load(self, start: Any, size: int) -> jax.Array:
        """[size] float32 from an id of the row."""
        x = compat.load_vector(self.logits_ref, self.first + start, size, self.interpreted)
        return x.astype(jnp.float32)


class Scratch(NamedTuple):
    """References to shared memory."""

    taken: Any  # [k] i32: the groups taken
    keys: Any  # [num_candidates] i32: candidates as ordered integers
    ids: Any  # [num_candidates] i32: their token ids


def scratch_types(tiling: Tiling, k: int) -> list[Any]:
    """The types of `Scratch`, for k >= 1."""
    candidates = num_candidates(tiling, k)
    return [
        GPU.SMEM((k,), jnp.int32),
        GPU.SMEM((candidates,), jnp.int32),
        GPU.SMEM((candidates,), jnp.int32),
    ]


def select_top_k(
    tiling: Tiling,
    k: int,
    row: RowOfLogits,
    groups_ref: Any,
    groups_start: Any,
    scratch: Scratch,
    write: Callable[[Any, jax.Array, jax.Array], None],
) -> None:
    """Call write(i, ordered key, token id) for i from 0 to k - 1, descending, ties lowest id.

    The row is valid. Where fewer than k of its logits are above -inf, the missing ones come as -inf
    with any id. groups_ref holds the row's group maxima from groups_start on.
    """
    width = tiling.group_width
    candidates = num_candidates(tiling, k)

    def take_groups() -> None:
        padded = tiling.padded_groups
        group_ids = compat.vector_iota(padded)
        maxima = compat.load_vector(groups_ref, groups_start, padded, row.interpreted)
        maxima = maxima.astype(jnp.float32)

        def take_group(i: jax.Array, keys: jax.Array) -> jax.Array:
            _, group = _take(keys, group_ids)
            scratch.taken[i] = group
            return jnp.where(group_ids == group, TAKEN, keys)

        def take_packed_group(i: jax.Array, packed: jax.Array) -> jax.Array:
            best = jnp.max(packed)
            scratch.taken[i] = FREE_BITS - (best & FREE_BITS)
            return jnp.where(packed == best, TAKEN, packed)

        group_keys = jnp.where(group_ids < tiling.num_groups, ordered_keys(maxima), TAKEN)
        if tiling.dtype != "float32" and padded <= FREE_BITS + 1:
            packed = (group_keys & ~FREE_BITS) | (FREE_BITS - group_ids)
            lax.fori_loop(0, k, take_packed_group, packed)
        else:
            lax.fori_loop(0, k, take_group, group_keys)

    def read_groups(begin: Any, count: int) -> None:
        offsets = compat.vector_iota(width)
        # All loads before the first use, so that they wait for memory together.
        loaded = []
        for i in range(count):
            start = group_start(scratch.taken[begin + i], row.skew, tiling)
            loaded.append((start + offsets, row.load(start, width)))
        for i, (ids, x) in enumerate(loaded):
            here = pl.ds((begin + i) * width, width)
            scratch.keys[here] = ordered_keys(x)
            scratch.ids[here] = ids

    def read_all_groups() -> None:
        def chunk(i: jax.Array, carry: tuple[()]) -> tuple[()]:
            read_groups(i * GROUPS_AT_ONCE, GROUPS_AT_ONCE)
            return carry

        whole = k // GROUPS_AT_ONCE
        lax.fori_loop(0, whole, chunk, ())
        read_groups(whole * GROUPS_AT_ONCE, k % GROUPS_AT_ONCE)
        if rest := candidates - k * width:
            scratch.keys[pl.ds(k * width, rest)] = compat.full(rest, TAKEN)
            scratch.ids[pl.ds(k * width, rest)] = compat.full(rest, NO_POSITION)

    def take_token(i: jax.Array, keys: jax.Array) -> jax.Array:
        ids = compat.load_shared(scratch.ids)
        key, token = _take(keys, ids)
        write(i, key, token)
        return jnp.where(ids == token, TAKEN, keys)

    def take_token_in_parts(i: jax.Array, last: jax.Array) -> jax.Array:
        best: tuple[jax.Array, jax.Array] | None = None
        for begin in range(0, candidates, MAX_IN_REGISTERS // 2):
            part = pl.ds(begin, MAX_IN_REGISTERS // 2)
            ids = compat.load_shared(scratch.ids.at[part])
            keys = jnp.where(ids == last, TAKEN, compat.load_shared(scratch.keys.at[part]))
            scratch.keys[part] = keys
            best = (keys, ids) if best is None else _better(best, (keys, ids))
        assert best is not None
        key, token = _take(*best)
        write(i, key, token)
        return token

    def take_tokens() -> None:
        if candidates <= MAX_IN_REGISTERS:
            lax.fori_loop(0, k, take_token, compat.load_shared(scratch.keys))
        else:
            lax.fori_loop(0, k, take_token_in_parts, jnp.int32(-1))

    take_groups()
    GPU.commit_smem()
    read_all_groups()
    GPU.commit_smem()
    take_tokens()


def first_largest(tiling: Tiling, row: RowOfLogits) -> jax.Array:
    """The lowest id among the row's largest non-NaN logits; 0 if all are NaN."""
    positions = compat.vector_iota(SCAN_WIDTH)
    last = tiling.vocabulary - SCAN_WIDTH

    def look(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best_keys, best_ids = best
        start = jnp.minimum(i * SCAN_WIDTH, last)
        keys = ordered_keys(row.load(start, SCAN_WIDTH))
        larger = keys > best_keys  # an equal one keeps the lower id
        ids = jnp.where(larger, start + positions, best_ids)
        return jnp.where(larger, keys, best_keys), ids

    nothing = compat.full(SCAN_WIDTH, TAKEN)
    steps = -(-tiling.vocabulary // SCAN_WIDTH)
    _, token = _take(*lax.fori_loop(0, steps, look, (nothing, positions)))
    return token


def num_candidates(tiling: Tiling, k: int) -> int:
    """The number of logits in the K groups; where they are read in parts, rounded up to parts."""
    size = k * tiling.group_width
    part = MAX_IN_REGISTERS // 2
    return size if size <= MAX_IN_REGISTERS else -(-size // part) * part


def _better(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Element by element, the larger key with its id; of equal keys, the lower id."""
    take_b = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return jnp.where(take_b, b[0], a[0]), jnp.where(take_b, b[1], a[1])


def _take(keys: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest key and the lowest position that has it."""
    key = jnp.max(keys)
    return key, jnp.min(jnp.where(keys == key, positions, NO_POSITION))


def group_start(group: jax.Array, skew: Any, tiling: Tiling) -> jax.Array:
    """The first id of a group as pass 1 read it.

    At a row's edges it may also hold ids of the groups beside it. Read twice, they are still the
    row's, and taking an id takes both.
    """
    start, _, _ = tiling.block_ids(group // tiling.groups_per_block, skew)
    first: jax.Array = start + group % tiling.groups_per_block * tiling.group_width
    return first


def ordered_keys(x: jax.Array) -> jax.Array:
    """int32 keys in the order of float32 x, with -0.0 equal to 0.0 and NaN lowest."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = jnp.where(x == 0, 0, keys)
    return jnp.where(jnp.isnan(x), TAKEN, keys)


def key_values(keys: jax.Array) -> jax.Array:
    """The float32 values of ordered keys."""
    bits = jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    return lax.bitcast_convert_type(bits, jnp.float32)

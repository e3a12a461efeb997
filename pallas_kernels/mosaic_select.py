"""Pass 2 on a GPU: the exact top K of a row from its group maxima and K of its groups.

A program (a warpgroup) serves one target row:

1. Take the K groups with the largest maxima, ties lowest group. They contain the top K, and since
   groups are contiguous and in index order, the lowest ids among equal logits too.
2. Read those groups again (and nothing else of the row) into shared memory, as ordered integers
   beside their token ids.
3. Take the largest K times, ties lowest id.

Each "take" is a maximum over the warpgroup, then the minimum of the positions that attain it:
Mosaic GPU has neither sort nor argmax. 16-bit logits leave room in an integer for the group's
position, so that one maximum does in step 1. The chain of 4 K (3 K) reductions is pass 2's cost.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.compat import GPU
from pallas_kernels.mosaic_tiling import Tiling

TAKEN = -(2**31)  # the key below all others: NaN, what was taken, what is no logit
NO_POSITION = 2**31 - 1
MAX_IN_REGISTERS = 8192  # candidates: 64 registers a thread
GROUPS_AT_ONCE = 8
FREE_BITS = (1 << 13) - 1  # always equal in float32 values of one sign that were 16-bit logits
SCAN_WIDTH = 1024


def select_top_k(
    tiling: Tiling,
    k: int,
    logits: jax.Array,
    group_maxima: jax.Array,
    row_ids: jax.Array,
    num_rows: jax.Array,
    scan: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The top K of each target row; those of skipped rows are not initialized.

    Args:
      tiling: the cut of the rows, as in pass 1.
      k: at least 1.
      logits: [N, V].
      group_maxima: [R, padded_groups] from pass 1.
      row_ids: [R] int32; num_rows: [1] int32, as in pass 1.
      scan: [R] int32, not 0 where the row holds a NaN or an infinity, which hides its groups'
        maxima: column 0 then comes from a scan of the row. Without it such rows hold anything.
      interpret: None to compile, or `compat.interpret_params(...)`.

    Returns:
      token ids [R, k] int32 and their logits [R, k] float32, descending, ties lowest id first. A
      column without a logit above -inf holds -inf and any id.
    """
    num_logits_rows = logits.shape[0]
    num_targets = row_ids.shape[0]
    candidates = num_candidates(tiling, k)
    shape = compat.shape((num_targets * k,), jnp.int32)
    kernel = GPU.kernel(
        functools.partial(
            _select_kernel,
            tiling=tiling,
            k=k,
            num_logits_rows=num_logits_rows,
            scanning=scan is not None,
            interpreted=interpret is not None,
        ),
        out_type=[shape, shape],
        scratch_types=[
            GPU.SMEM((k,), jnp.int32),
            GPU.SMEM((candidates,), jnp.int32),
            GPU.SMEM((candidates,), jnp.int32),
        ],
        grid=(num_targets,),
        grid_names=("row",),
        compiler_params=compat.compiler_params(),
        kernel_name="select_top_k",
        interpret=interpret,
    )
    if scan is None:
        scan = jnp.zeros(1, jnp.int32)
    ids, keys = kernel(logits.reshape(-1), group_maxima.reshape(-1), row_ids, num_rows, scan)
    return ids.reshape(num_targets, k), key_values(keys).reshape(num_targets, k)


def _select_kernel(
    logits_ref: Any,  # [N * V]  in
    groups_ref: Any,  # [R * padded_groups]  in: group maxima
    row_ids_ref: Any,  # [R] i32  in
    num_rows_ref: Any,  # [1] i32  in
    scan_ref: Any,  # [R] i32  in: not 0 where column 0 needs a scan; [1] and unread if not scanning
    ids_ref: Any,  # [R * k] i32  out
    keys_ref: Any,  # [R * k] i32  out: the top K logits as ordered integers
    taken_smem: Any,  # [k] i32  scratch: the groups taken
    keys_smem: Any,  # [num_candidates] i32  scratch: candidates as ordered integers
    ids_smem: Any,  # [num_candidates] i32  scratch: their token ids
    *,
    tiling: Tiling,
    k: int,
    num_logits_rows: int,
    scanning: bool,
    interpreted: bool,
) -> None:
    target = lax.axis_index("row")
    row = row_ids_ref[target]
    wanted = (target < num_rows_ref[0]) & (row >= 0) & (row < num_logits_rows)
    width = tiling.group_width
    candidates = num_candidates(tiling, k)
    first = row * tiling.vocabulary
    skew = tiling.skew(row)

    def take_groups() -> None:
        padded = tiling.padded_groups
        group_ids = compat.vector_iota(padded)
        maxima = compat.load_vector(groups_ref, target * padded, padded, interpreted)
        maxima = maxima.astype(jnp.float32)

        def take_group(i: jax.Array, keys: jax.Array) -> jax.Array:
            _, group = _take(keys, group_ids)
            taken_smem[i] = group
            return jnp.where(group_ids == group, TAKEN, keys)

        def take_packed_group(i: jax.Array, packed: jax.Array) -> jax.Array:
            best = jnp.max(packed)
            taken_smem[i] = FREE_BITS - (best & FREE_BITS)
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
            start = group_start(taken_smem[begin + i], skew, tiling)
            x = compat.load_vector(logits_ref, first + start, width, interpreted)
            loaded.append((start + offsets, x))
        for i, (ids, x) in enumerate(loaded):
            here = pl.ds((begin + i) * width, width)
            keys_smem[here] = ordered_keys(x.astype(jnp.float32))
            ids_smem[here] = ids

    def read_all_groups() -> None:
        def chunk(i: jax.Array, carry: tuple[()]) -> tuple[()]:
            read_groups(i * GROUPS_AT_ONCE, GROUPS_AT_ONCE)
            return carry

        whole = k // GROUPS_AT_ONCE
        lax.fori_loop(0, whole, chunk, ())
        read_groups(whole * GROUPS_AT_ONCE, k % GROUPS_AT_ONCE)
        if rest := candidates - k * width:
            keys_smem[pl.ds(k * width, rest)] = compat.full(rest, TAKEN)
            ids_smem[pl.ds(k * width, rest)] = compat.full(rest, NO_POSITION)

    def write(i: jax.Array, key: jax.Array, token: jax.Array) -> None:
        ids_ref[target * k + i] = token
        keys_ref[target * k + i] = key

    def take_token(i: jax.Array, keys: jax.Array) -> jax.Array:
        ids = compat.load_shared(ids_smem)
        key, token = _take(keys, ids)
        write(i, key, token)
        return jnp.where(ids == token, TAKEN, keys)

    def take_token_in_parts(i: jax.Array, last: jax.Array) -> jax.Array:
        best: tuple[jax.Array, jax.Array] | None = None
        for begin in range(0, candidates, MAX_IN_REGISTERS // 2):
            part = pl.ds(begin, MAX_IN_REGISTERS // 2)
            ids = compat.load_shared(ids_smem.at[part])
            keys = jnp.where(ids == last, TAKEN, compat.load_shared(keys_smem.at[part]))
            keys_smem[part] = keys
            best = (keys, ids) if best is None else _better(best, (keys, ids))
        assert best is not None
        key, token = _take(*best)
        write(i, key, token)
        return token

    def take_tokens() -> None:
        if candidates <= MAX_IN_REGISTERS:
            lax.fori_loop(0, k, take_token, compat.load_shared(keys_smem))
        else:
            lax.fori_loop(0, k, take_token_in_parts, jnp.int32(-1))

    def scan_row() -> None:
        positions = compat.vector_iota(SCAN_WIDTH)
        last = tiling.vocabulary - SCAN_WIDTH

        def look(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            best_keys, best_ids = best
            start = jnp.minimum(i * SCAN_WIDTH, last)
            x = compat.load_vector(logits_ref, first + start, SCAN_WIDTH, interpreted)
            keys = ordered_keys(x.astype(jnp.float32))
            larger = keys > best_keys  # an equal one keeps the lower id
            return jnp.where(larger, keys, best_keys), jnp.where(
                larger, start + positions, best_ids
            )

        nothing = compat.full(SCAN_WIDTH, TAKEN)
        best = lax.fori_loop(0, -(-tiling.vocabulary // SCAN_WIDTH), look, (nothing, positions))
        _, token = _take(*best)
        ids_ref[target * k] = token

    @pl.when(wanted)
    def _() -> None:
        take_groups()
        GPU.commit_smem()
        read_all_groups()
        GPU.commit_smem()
        take_tokens()
        if scanning:
            pl.when(scan_ref[target] != 0)(scan_row)


def num_candidates(tiling: Tiling, k: int) -> int:
    """Logits in the K groups; where they are read in parts, of whole parts."""
    size = k * tiling.group_width
    part = MAX_IN_REGISTERS // 2
    return size if size <= MAX_IN_REGISTERS else -(-size // part) * part


def _better(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Element by element the larger key with its id, of equal keys the lower id."""
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

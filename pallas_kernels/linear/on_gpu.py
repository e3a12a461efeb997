"""The columns way by the fused kernel of an H100: logits that are nowhere but in registers.

The kernel leaves three numbers of each row and group of 256 tokens, 1.2 % of the float32 logits;
XLA joins them. It has no top K, and is never chosen by itself.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.mosaic_gpu import linear_tiles
from pallas_kernels.backends.mosaic_gpu.linear_tiles import ALIGNED, GROUP, HALF, ROWS, STEP
from pallas_kernels.contract.types import RowSums
from pallas_kernels.linear import online
from pallas_kernels.linear.definition import Definition
from pallas_kernels.linear.read_columns import Rows
from pallas_kernels.linear.types import Call, Inputs
from pallas_kernels.lowering import obstacles
from pallas_kernels.lowering.blocks import map_blocks
from pallas_kernels.lowering.platforms import lowered_for

MULTIPROCESSORS = 132  # of an H100 SXM, where no device says how many it has
SHARE = 0.005  # of the float32 logits: the rows of the head that are gathered at a time
NUMBERS = 2**31 - 1


def refuse_obstacle(call: Call, inputs: Inputs) -> None:
    """Raise NotImplementedError if the kernel cannot run on these arrays on any device."""
    reason = obstacle(call, inputs)
    if reason is not None:
        obstacles.refuse("mosaic_gpu", reason)


def obstacle(call: Call, inputs: Inputs) -> str | None:
    """Why the kernel cannot run on one device's part of a call; None if it can."""
    definition, dtype = call.definition, inputs.hidden.dtype.name
    if call.k:
        return f"it has no top K, and k = {call.k} is not 0"
    if dtype == "float32":
        return "it multiplies bfloat16 and float16, and hidden and head are float32"
    if definition.soft_cap is not None:
        return f"it has no soft cap, and soft_cap = {definition.soft_cap} is not None"
    if definition.transposed:
        return "it reads heads [V, H], and head_axes is 'HV'"
    shape = (*inputs.hidden.shape, *inputs.head.shape, inputs.num_targets)
    if not all(isinstance(size, int) for size in shape):
        return f"the shape {shape} is symbolic, and a kernel's tiles are not"
    size, width = inputs.hidden.shape[1], definition.width(inputs.head)
    if not size or size % STEP:
        return f"H = {size} is no multiple of {STEP}"
    if width < GROUP:
        return f"a head of {width} tokens on a device is less than one group of {GROUP}"
    if width % ALIGNED:
        return (
            f"a head of {width} tokens on a device is no multiple of {ALIGNED}: add rows of "
            "padding, and pass vocab_size"
        )
    groups = -(-width // GROUP)
    if groups * inputs.num_targets > NUMBERS:
        return f"{inputs.num_targets} rows of {groups} groups are more than a 32-bit index reaches"
    return None


def device_obstacle(capability: float) -> str | None:
    """Why the kernel cannot run on a CUDA device of this compute capability."""
    if int(capability) != 9:
        return f"the device has compute capability {capability}; it multiplies with wgmma, as 9.0"
    return None


def given_logits(
    definition: Definition,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    columns: jax.Array,
    interpret: Any = None,
) -> jax.Array:
    """`columns.given_logits`: the logit [R] float32 of one column each, as it is in the groups."""
    run = functools.partial(_given_logits, definition, interpret=interpret)
    like: Callable[..., jax.Array] = _like_rows
    found: jax.Array = _on_cuda(run, like, interpret, hidden, head, bias, columns)
    return found


def read(
    definition: Definition,
    entropy: bool,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    rows: Rows,
    interpret: Any = None,
) -> tuple[RowSums, jax.Array]:
    """`read_columns.read` without a top K: the sums, and the logits [R, 1 + C] of columns named."""

    def like(hidden: jax.Array, *_: Any) -> tuple[RowSums, jax.Array]:
        count = hidden.shape[0]
        return online.nothing(count, 0, entropy), jnp.zeros(count, jnp.float32)

    width = definition.width(head)
    run = functools.partial(_read, definition, entropy, interpret=interpret)
    sums, own = _on_cuda(run, like, interpret, hidden, head, bias, limit, rows)
    extra = jnp.clip(rows.named[:, 1:], 0, width - 1)

    def one(columns: jax.Array) -> jax.Array:
        return given_logits(definition, hidden, head, bias, columns, interpret)

    if not extra.shape[1]:
        return sums, own[:, None]
    return sums, jnp.concatenate([own[:, None], lax.map(one, extra.T).T], axis=1)


def _on_cuda(run: Any, like: Any, interpret: Any, *arguments: Any) -> Any:
    """run(*arguments) in programs for CUDA; elsewhere there is no such program."""
    if interpret is not None:
        return run(*arguments)

    def cuda(*arguments: Any) -> Any:
        capability = obstacles.cuda_capability()  # None: the program is for another host
        reason = None if capability is None else device_obstacle(capability)
        if reason is not None:
            obstacles.refuse("mosaic_gpu", reason)
        return run(*arguments)

    def elsewhere(*_: Any) -> Any:
        obstacles.refuse("mosaic_gpu", "there is no CUDA device here")

    return lowered_for(*arguments, like=like, default=elsewhere, cuda=cuda)


def _like_rows(hidden: jax.Array, *_: Any) -> jax.Array:
    return jnp.zeros(hidden.shape[0], jnp.float32)


def _kernel() -> Any:
    """The kernel's module: only a program that has it imports it."""
    return importlib.import_module("pallas_kernels.backends.mosaic_gpu.linear_groups")


def _multiprocessors() -> int:
    if obstacles.cuda_capability() is None:
        return MULTIPROCESSORS
    return int(getattr(jax.local_devices()[0], "core_count", MULTIPROCESSORS))


def _given_logits(
    definition: Definition,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    columns: jax.Array,
    interpret: Any,
) -> jax.Array:
    groups = _kernel()
    count, size = hidden.shape
    padded = in_whole(hidden), in_whole(columns)
    rows = padded[0].shape[0]
    # Gathered rows of the head, and as many of hidden, a few at a time.
    most = int(SHARE * 4 * count * definition.width(head) / (2 * size * head.dtype.itemsize))
    part = min(rows, max(1, most // ROWS) * ROWS)
    beside = GROUP - ROWS
    tiles = linear_tiles.Tiles(part, part + beside, size, diagonal=True)
    programs = linear_tiles.programs(tiles, _multiprocessors())
    rounding = groups.Rounding(definition.scale, definition.logits_dtype)

    def of(start: jax.Array) -> tuple[jax.Array]:
        own, wanted = (lax.dynamic_slice_in_dim(x, start, part) for x in padded)
        named = jnp.pad(wanted, (0, beside))
        own_bias = None if bias is None else bias[named].astype(jnp.float32)
        found = groups.diagonal_logits(
            tiles, rounding, own, head[named], own_bias, programs, interpret
        )
        return (tiles.of_rows(found),)

    nothing = (jnp.zeros(rows, jnp.float32),)
    return map_blocks(of, part, None, nothing, (hidden, head, bias, columns))[0][:count]


def in_whole(x: jax.Array) -> jax.Array:
    """x [R, ...] with as many zeros behind it as whole tiles need."""
    rows = max(ROWS, -(-x.shape[0] // ALIGNED) * ALIGNED)
    missing = rows - x.shape[0]
    return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) if missing else x


def _read(
    definition: Definition,
    entropy: bool,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    rows: Rows,
    interpret: Any,
) -> tuple[RowSums, jax.Array]:
    groups = _kernel()
    count, width = hidden.shape[0], definition.width(head)
    hidden, token, given = (in_whole(x) for x in (hidden, rows.named[:, 0], rows.given))
    tiles = linear_tiles.choose_tiles(hidden.shape[0], width, hidden.shape[1])
    programs = linear_tiles.programs(tiles, _multiprocessors())
    of = groups.Of(
        hidden,
        head,
        None if bias is None else bias.astype(jnp.float32),
        given,
        token,
        None if rows.inverse is None else in_whole(rows.inverse),
        special_of(tiles, token, limit),
        limit.reshape(1),
    )
    rounding = groups.Rounding(definition.scale, definition.logits_dtype)
    found = groups.group_sums(tiles, rounding, entropy, of, programs, interpret)
    by_group = jax.tree.map(
        lambda x: tiles.of_rows(x.reshape(tiles.groups, tiles.places))[:, :count], found
    )
    mine = jnp.clip(rows.named[:, 0], 0, width - 1) // GROUP
    own = jnp.take_along_axis(by_group.own, mine[None], axis=0)[0]
    return joined(by_group, rows.inverse), own


def special_of(tiles: Any, token: jax.Array, limit: jax.Array) -> jax.Array:
    """Which halves of tiles need more than the sums of all their tokens: [halves * groups] int32.

    Args:
      tiles: of the kernel.
      token: [R] int32, each row's; outside of the head: none.
      limit: [] int32, how many tokens count.
    """
    halves = 2 * tiles.row_tiles
    first = tiles.first_row(jnp.arange(tiles.row_tiles, dtype=jnp.int32))
    rows = (first[:, None] + jnp.arange(ROWS, dtype=jnp.int32)[None]).reshape(halves, HALF)
    group = jnp.where(token < 0, tiles.groups, token // GROUP)[rows]
    named = jnp.zeros((halves, tiles.groups), jnp.int32)
    half = jnp.arange(halves, dtype=jnp.int32)[:, None]
    named = named.at[half, group].set(1, mode="drop")
    every = jnp.arange(tiles.groups, dtype=jnp.int32)
    start, end = every * GROUP, (every + 1) * GROUP
    some = (end > limit) | (tiles.first_token(every) < start)
    return jnp.where(some[None], 1, named).reshape(-1)


def joined(groups: Any, inverse: jax.Array | None) -> RowSums:
    """The sums of rows, from those of their groups [groups, R]."""
    count = groups.maxima.shape[1]
    parts = online.nothing(count, 0, groups.weighted is not None)._replace(
        maximum=jnp.where(jnp.isnan(groups.maxima), -jnp.inf, groups.maxima),
        sum_exp=groups.sums,
        weighted=groups.weighted,
    )
    maximum = jnp.max(parts.maximum, axis=0)
    each = None if inverse is None else inverse[None]
    parts = online.rescaled(parts, jnp.broadcast_to(maximum[None], parts.maximum.shape), each)
    return parts._replace(
        maximum=maximum,
        sum_exp=jnp.sum(parts.sum_exp, axis=0),
        weighted=None if parts.weighted is None else jnp.sum(parts.weighted, axis=0),
        num_larger=jnp.sum(groups.larger, axis=0).astype(jnp.int32),
    )

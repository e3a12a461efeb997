"""The groups of rows by the TPU's kernel, and how its arrays lie."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.groups import GroupSums, RowPart, read_in_two
from pallas_kernels.backends.mosaic_tpu import groups_kernel
from pallas_kernels.backends.mosaic_tpu.group_sweep import Groups
from pallas_kernels.backends.mosaic_tpu.schedule import (
    CUT,
    SUBLANES,
    Schedule,
    choose_schedule,
    must_fit,
)
from pallas_kernels.backends.mosaic_tpu.unit import LOG2_E, Interpret
from pallas_kernels.lowering.forms import vary_like

LN_2 = 0.6931471805599453
_LARGEST = 3.4028234663852886e38  # float32

SumsAndRawSums = tuple[GroupSums, jax.Array]  # [R, G] each; sums at temperature 1, or [R, 0]


def read_groups(
    part: RowPart,
    inverse: jax.Array,
    raw: bool,
    interpret: Interpret = False,
    cut: tuple[int, int] = CUT,
    *,
    weighted: bool = False,
) -> SumsAndRawSums:
    """The groups of all rows.

    Where groups end with the columns, or the row ends in its last one, one launch reads the
    columns. Else (`part.tail` has two groups) it reads the whole groups among them, and another one
    the tail.
    """
    read = functools.partial(_groups_of, inverse, (raw, weighted), interpret, cut)
    if part.tail.shape[1] < 2:
        return read(part.logits, part.logits.shape[1], None)
    return read_in_two(part, read)


def _groups_of(
    inverse: jax.Array,
    more: tuple[bool, bool],
    interpret: Interpret,
    cut: tuple[int, int],
    logits: jax.Array,
    tokens: int,
    offset: jax.Array | None,
) -> SumsAndRawSums:
    """The groups of so many tokens from column `offset` on.

    more: whether the sums at temperature 1 are wanted, and those for the entropy.
    """
    rows, dtype = len(logits), logits.dtype.name
    if dtype == "float16":
        logits = logits.astype(jnp.float32)  # in the kernel
    schedule = choose_schedule(
        logits.shape,
        rows,
        0,
        dtype,
        interpreted=bool(interpret),
        gathered=False,
        entropy=False,
        cut=cut,
    )
    must_fit(schedule)
    what = Groups(tokens, offset is not None, *more)
    scale = lax.bitcast_convert_type(scale_of(inverse), jnp.int32)
    constants = jnp.stack([jnp.zeros_like(scale), scale, jnp.zeros_like(scale)], axis=1)
    constants = in_units(
        schedule, jnp.pad(constants, ((0, schedule.num_units * schedule.unit - rows), (0, 0)))
    )
    place = jnp.zeros(1, jnp.int32) if offset is None else offset.reshape(1)
    inputs = vary_like((place, logits, constants), (place, logits, constants))
    outputs = groups_kernel.call(schedule, what, interpret, *inputs)
    outputs = [in_rows(schedule, x)[:rows] for x in outputs]
    raw = more[0]
    raw_sums = outputs[2][:, : what.number] if raw else outputs[1][:, :0]
    return group_sums(outputs, what.number, raw), raw_sums


def group_sums(outputs: list[jax.Array], number: int, raw: bool = False) -> GroupSums:
    """The groups of the kernels' outputs [R, width]: maxima, sums, raw ones, weighted ones."""
    maxima, sums, *more = (x[:, :number] for x in outputs)
    more = more[raw:]
    return GroupSums(maxima, sums, more[0] * jnp.float32(LN_2) if more else None)


def scale_of(inverse: jax.Array) -> jax.Array:
    """The factor of logit differences in exponents of 2, from 1 / T; finite in any case."""
    return jnp.minimum(inverse * jnp.float32(LOG2_E), jnp.float32(_LARGEST))


def in_units(schedule: Schedule, x: jax.Array) -> jax.Array:
    """x [rows, n] in the kernel's order: of each unit first the even, then the odd rows."""
    if schedule.halves == 1:
        return x
    return x.reshape(-1, SUBLANES, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def in_rows(schedule: Schedule, x: jax.Array) -> jax.Array:
    """The inverse of `in_units`."""
    if schedule.halves == 1:
        return x
    return x.reshape(-1, 2, SUBLANES, x.shape[1]).swapaxes(1, 2).reshape(x.shape)

"""The read of sampled rows by TPU kernels: what `sampled_rows.read` does.

`groups` reads the logits once, for the groups' maxima and sums. If a row needs candidates, the
kernel of calls without sampling reads them once more (`sampled_on_tpu`). Drawing is left to XLA: it
works on [R, V / 256] and [R, 256] numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends import sampled_on_tpu
from pallas_kernels.backends.mosaic_tpu import chip, groups
from pallas_kernels.backends.mosaic_tpu.plan import CUT, choose_plan
from pallas_kernels.backends.mosaic_tpu.rows import LARGEST, LOG2_E, in_rows, in_units
from pallas_kernels.backends.xla.group_sums import GroupSums
from pallas_kernels.backends.xla.groups import Part, Read, Top, as_many_as_needed, whole_groups
from pallas_kernels.lowering.blocks import vary_like

Found = tuple[GroupSums, jax.Array]  # [R, G] each; sums at temperature 1, or [R, 0]


def read(part: Part, inverse: jax.Array, needed: jax.Array, k: int) -> Read:
    """`sampled_rows.read`, with the kernels.

    Raises:
      DoesNotFit: the chip's VMEM is too small for the groups; candidates are then left to XLA.
    """

    def top(count: int) -> Top:
        return Top(*sampled_on_tpu.largest(part.logits, count))

    found = vary_like(read_groups(part, inverse, k >= 0), (part, inverse))
    return Read(*found, *as_many_as_needed(part.logits, needed, k, top))


def read_groups(
    part: Part,
    inverse: jax.Array,
    raw: bool,
    interpret: Any = False,
    cut: tuple[int, int] = CUT,
) -> Found:
    """The groups of all rows.

    Where groups end with the columns, or the row ends in its last one, one launch reads the
    columns. Else (`part.tail` has two groups) it reads the whole groups among them, and another one
    the tail.
    """
    logits, tail = part.logits, part.tail
    if tail.shape[1] < 2:
        return _groups_of(logits, logits.shape[1], None, inverse, raw, interpret, cut)
    rest = tail.reshape(len(tail), -1)
    last = _groups_of(rest, rest.shape[1], None, inverse, raw, interpret, cut)
    tokens = whole_groups(part) * tail.shape[2]
    if not tokens:
        return last
    first = _groups_of(logits, tokens, part.offset, inverse, raw, interpret, cut)
    joined: Found = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), first, last)
    return joined


def _groups_of(
    logits: jax.Array,
    tokens: int,
    offset: jax.Array | None,
    inverse: jax.Array,
    raw: bool,
    interpret: Any,
    cut: tuple[int, int],
) -> Found:
    """The groups of so many tokens from column `offset` on."""
    rows, dtype = len(logits), logits.dtype.name
    if dtype == "float16":
        logits = logits.astype(jnp.float32)  # in the kernel
    options: dict[str, Any] = {"gathered": False, "entropy": False, "cut": cut}
    plan = choose_plan(logits.shape, rows, 0, dtype, interpreted=bool(interpret), **options)
    chip.must_fit(plan)
    what = groups.Groups(tokens, offset is not None, raw)
    scale = jnp.minimum(inverse * jnp.float32(LOG2_E), jnp.float32(LARGEST))
    scale = lax.bitcast_convert_type(scale, jnp.int32)
    given = jnp.stack([jnp.zeros_like(scale), scale, jnp.zeros_like(scale)], axis=1)
    given = in_units(plan, jnp.pad(given, ((0, plan.num_units * plan.unit - rows), (0, 0))))
    place = jnp.zeros(1, jnp.int32) if offset is None else offset.reshape(1)
    every = vary_like((place, logits, given), (place, logits, given))
    found = groups.call(plan, what, interpret, *every)
    maxima, sums, *more = (in_rows(plan, one)[:rows, : what.number] for one in found)
    return GroupSums(maxima, sums), more[0] if raw else sums[:, :0]

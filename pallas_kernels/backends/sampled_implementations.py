"""Which implementation reads rows that are sampled: XLA anywhere, kernels where they can run.

As in `implementations`: what the shapes forbid is known when a call is traced, the platform when it
is lowered.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.backends import choose
from pallas_kernels.backends.mosaic_tpu.plan import DoesNotFit
from pallas_kernels.backends.xla import groups
from pallas_kernels.backends.xla.groups import Part, Read
from pallas_kernels.lowering.platforms import lowered_for

LEAST_ON_TPU = 512  # tokens: two groups; by the compiler's cycles XLA's sums win below


def read(
    part: Part,
    inverse: jax.Array,
    needed: jax.Array,
    k: int,
    implementation: choose.Implementation | None = None,
) -> Read:
    """`sampled_rows.read` in the kernels, in programs that are lowered for CUDA or a TPU.

    Sums differ between implementations by rounding; within one, a group's do not depend on rows,
    dtype, K, vocabulary or shard.

    Args:
      part: the logits.
      inverse: `group_sums.inverse_temperature` of each row.
      needed: how many candidates each row needs.
      k: static, as for `sampled_rows.read`.
      implementation: "xla"; "mosaic_gpu"; "mosaic_tpu"; None: the kernels wherever they can run,
        but for the shortest rows on a TPU.

    Raises:
      ValueError: there is no implementation of this name.
      NotImplementedError: the kernels cannot run on logits of this shape; on another platform, the
        lowering says so.
    """
    choose.check_name(implementation)

    def by_xla(part: Part, inverse: jax.Array, needed: jax.Array) -> Read:
        return groups.read(part, inverse, needed, k)

    if implementation == "xla":
        return by_xla(part, inverse, needed)
    obstacles = {
        "mosaic_gpu": choose.shape_obstacle(part.logits),
        "mosaic_tpu": choose.tpu_obstacle(part.logits),
    }
    if implementation is None:
        slow = part.logits.shape[1] < LEAST_ON_TPU
        others = {"mosaic_tpu"} if slow else set()
        names = [name for name, one in obstacles.items() if one is None and name not in others]
        if not names:
            return by_xla(part, inverse, needed)
    else:
        names, obstacle = [implementation], obstacles[implementation]
        if obstacle is not None:
            choose.refuse(implementation, obstacle)
    explicit = implementation is not None
    default = functools.partial(_refused, names[0], choose.MISSING[names[0]])
    kernels = {choose.PLATFORM[name]: _kernels(name, by_xla, k, explicit) for name in names}
    found: Read = lowered_for(
        part,
        inverse,
        needed,
        like=by_xla,
        default=default if explicit else by_xla,
        **kernels,
    )
    return found


def _refused(name: str, obstacle: str, *_: Any) -> Read:
    choose.refuse(name, obstacle)


def _kernels(name: str, by_xla: Callable[..., Read], k: int, explicit: bool) -> Callable[..., Read]:
    """The kernels, unless this host's device has none; a batch of `vmap` is read by XLA."""

    @jax.custom_batching.custom_vmap
    def kernels(part: Part, inverse: jax.Array, needed: jax.Array) -> Read:
        if name == "mosaic_gpu":
            capability = choose.cuda_capability()  # None: the program is for another host
            obstacle = None
            if capability is not None:
                obstacle = choose.capability_obstacle(capability)
            if obstacle is not None:
                return _refused(name, obstacle) if explicit else by_xla(part, inverse, needed)
        run = importlib.import_module(f"pallas_kernels.{name}.run_sampled")
        try:
            found: Read = run.read(part, inverse, needed, k)
            return found
        except DoesNotFit as error:
            obstacle = str(error)
        return _refused(name, obstacle) if explicit else by_xla(part, inverse, needed)

    @kernels.def_vmap
    def _(_: int, is_batched: Any, *arguments: Any) -> tuple[Read, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
        found = jax.vmap(by_xla, in_axes=tuple(axes))(*arguments)
        return found, jax.tree.map(lambda _: True, found)

    return kernels

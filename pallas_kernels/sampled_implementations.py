"""Which implementation reads rows that are sampled: XLA anywhere, kernels where they can run.

As in `implementations`: what the shapes forbid is known when a call is traced, the platform when it
is lowered.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import implementations, sampled_rows
from pallas_kernels.mosaic_tpu.plan import DoesNotFit
from pallas_kernels.platforms import lowered_for
from pallas_kernels.sampled_rows import Part, Read

LEAST_ON_TPU = 512  # tokens: two groups; by the compiler's cycles XLA's sums win below


def read(
    part: Part,
    inverse: jax.Array,
    needed: jax.Array,
    k: int,
    implementation: implementations.Implementation | None = None,
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
    implementations.check_name(implementation)

    def by_xla(part: Part, inverse: jax.Array, needed: jax.Array) -> Read:
        return sampled_rows.read(part, inverse, needed, k)

    if implementation == "xla":
        return by_xla(part, inverse, needed)
    obstacles = {
        "mosaic_gpu": implementations.shape_obstacle(part.logits),
        "mosaic_tpu": implementations.tpu_obstacle(part.logits),
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
            implementations.refuse(implementation, obstacle)
    explicit = implementation is not None
    default = functools.partial(_refused, names[0], implementations.MISSING[names[0]])
    kernels = {
        implementations.PLATFORM[name]: _kernels(name, by_xla, k, explicit) for name in names
    }
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
    implementations.refuse(name, obstacle)


def _kernels(name: str, by_xla: Callable[..., Read], k: int, explicit: bool) -> Callable[..., Read]:
    """The kernels, unless this host's device has none; a batch of `vmap` is read by XLA."""

    @jax.custom_batching.custom_vmap
    def kernels(part: Part, inverse: jax.Array, needed: jax.Array) -> Read:
        if name == "mosaic_gpu":
            capability = implementations.cuda_capability()  # None: the program is for another host
            obstacle = None
            if capability is not None:
                obstacle = implementations.capability_obstacle(capability)
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

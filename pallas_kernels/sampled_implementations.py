"""Which implementation reads rows that are sampled: XLA anywhere, the GPU kernels where they can.

As in `implementations`: what the shapes forbid is known when a call is traced, the platform when it
is lowered.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import implementations, sampled_rows
from pallas_kernels.platforms import lowered_for
from pallas_kernels.sampled_rows import Part, Read


def read(
    part: Part,
    inverse: jax.Array,
    needed: jax.Array,
    k: int,
    implementation: implementations.Implementation | None = None,
) -> Read:
    """`sampled_rows.read` in the kernels, in programs that are lowered for CUDA.

    Sums differ between implementations by rounding; within one, a group's do not depend on rows,
    dtype, K, vocabulary or shard.

    Args:
      part: the logits.
      inverse: `group_sums.inverse_temperature` of each row.
      needed: how many candidates each row needs.
      k: static, as for `sampled_rows.read`.
      implementation: "xla"; "mosaic_gpu"; None: the kernels wherever they can run.

    Raises:
      ValueError: there is no implementation of this name.
      NotImplementedError: "mosaic_gpu" cannot run on logits of this shape; on another platform, the
        lowering says so.
    """
    implementations.check_name(implementation)
    if implementation == "mosaic_tpu":
        implementations.refuse(implementation, "it has no groups' sums yet")

    def by_xla(part: Part, inverse: jax.Array, needed: jax.Array) -> Read:
        return sampled_rows.read(part, inverse, needed, k)

    if implementation == "xla":
        return by_xla(part, inverse, needed)
    obstacle = implementations.shape_obstacle(part.logits)
    explicit = implementation is not None
    if obstacle is not None:
        if explicit:
            implementations.refuse(GPU, obstacle)
        return by_xla(part, inverse, needed)
    found: Read = lowered_for(
        part,
        inverse,
        needed,
        like=by_xla,
        default=functools.partial(_refused, NOT_CUDA) if explicit else by_xla,
        cuda=_on_cuda(by_xla, k, explicit),
    )
    return found


GPU, NOT_CUDA = "mosaic_gpu", "there is no CUDA device here"


def _refused(obstacle: str, *_: Any) -> Read:
    implementations.refuse(GPU, obstacle)


def _on_cuda(by_xla: Callable[..., Read], k: int, explicit: bool) -> Callable[..., Read]:
    """The kernels, unless this host's device has none; a batch of `vmap` is read by XLA."""

    @jax.custom_batching.custom_vmap
    def kernels(part: Part, inverse: jax.Array, needed: jax.Array) -> Read:
        capability = implementations.cuda_capability()  # None: the program is for another host
        obstacle = None if capability is None else implementations.capability_obstacle(capability)
        if obstacle is not None:
            return _refused(obstacle) if explicit else by_xla(part, inverse, needed)
        from pallas_kernels.mosaic_gpu import run_sampled

        return run_sampled.read(part, inverse, needed, k)

    @kernels.def_vmap
    def _(_: int, is_batched: Any, *arguments: Any) -> tuple[Read, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
        found = jax.vmap(by_xla, in_axes=tuple(axes))(*arguments)
        return found, jax.tree.map(lambda _: True, found)

    return kernels

"""A kernel for CUDA devices that can run it, where XLA has a function that does the same."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.backends import choose


def on_cuda(kernel: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel in programs for CUDA; what XLA does on a device too old for it, and under `vmap`.

    Args:
      kernel: a function of trees of arrays; traced only where a program is lowered for CUDA.
      otherwise: what XLA does, of the same arguments.
    """

    @jax.custom_batching.custom_vmap
    def cuda(*arguments: Any) -> Any:
        capability = choose.cuda_capability()  # None: the program is for another host
        if capability is not None and choose.capability_obstacle(capability) is not None:
            return otherwise(*arguments)
        return kernel(*arguments)

    @cuda.def_vmap
    def _(_: int, is_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
        found = jax.vmap(otherwise, in_axes=tuple(axes))(*arguments)
        return found, jax.tree.map(lambda _: True, found)

    run: Callable[..., Any] = cuda
    return run

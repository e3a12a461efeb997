"""What follows the read of sampled rows, by kernels where they can run: a draw, and token ranks.

As in `sampled_implementations`, which reads the rows: what the shapes forbid is known when a call
is traced, the platform when it is lowered. TPUs take XLA here.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.backends import choose
from pallas_kernels.lowering.cuda_kernel import on_cuda
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.sampling.rows import GroupedRows

MOST_GROUPS = 4096  # of a row, that a warpgroup holds in registers: 1,048,576 tokens
MOST_TAKEN = 128  # tokens of a row, one a thread


class RowsToDraw(NamedTuple):
    """B slots, each with a row of N to draw from, and what the read left of all rows."""

    rows: Int32[Array, " B"]  # valid ones; -1 where nothing is drawn
    cut_logit: Float32[Array, " B"]  # as `kept_groups.keeps` takes it; -inf where all is kept
    cut_id: Int32[Array, " B"]
    taken_ids: Int32[Array, "B M"]  # distinct tokens that are not drawn; -1 where there is none
    seed: UInt32[Array, " B"]
    position: Int32[Array, " B"]
    maxima: Float32[Array, "N G"]  # of the groups
    sums: Float32[Array, "N G"]
    largest: Float32[Array, " N"]  # m
    inverse: Float32[Array, " N"]  # 1 / T


class Drawn(NamedTuple):
    """Of each slot; a score of -inf and any token where none is left or nothing is drawn."""

    score: Float32[Array, " B"]  # log of the sum of exp((x - m) / T) over the group, and its noise
    token_ids: Int32[Array, " B"]


def draw(
    rows: GroupedRows,
    given: RowsToDraw,
    purposes: tuple[int, int],
    by_xla: Callable[..., Drawn],
    *arguments: Any,
) -> Drawn:
    """A token of each slot's row, by a kernel in programs that are lowered for CUDA.

    The kernel needs rows that are whole on a device, at most `MOST_GROUPS` groups and `MOST_TAKEN`
    taken tokens. It draws what XLA draws but where rounding of float32 decides.

    Args:
      rows: the logits.
      given: the slots.
      purposes: static; of the noise of groups, and of that of tokens.
      by_xla: `by_xla(rows, *arguments)`, what XLA does instead.
      arguments: trees of arrays.
    """

    def otherwise(arrays: Any, _: Any, arguments: Any) -> Drawn:
        return by_xla(rows.with_arrays(*arrays), *arguments)

    def kernel(arrays: Any, given: RowsToDraw, _: Any) -> Drawn:
        found: Drawn = _module("draw").draw(arrays[0], given, purposes)
        return found

    fits = given.maxima.shape[1] <= MOST_GROUPS and given.taken_ids.shape[1] <= MOST_TAKEN
    everything = rows.arrays, given, arguments
    if rows.shard.axis_name is not None or not fits:
        return otherwise(*everything)
    found: Drawn = _chosen(rows.logits, otherwise, kernel, *everything)
    return found


def num_larger(
    logits: Float[Array, "N V"],
    maxima: Float32[Array, "N G"],
    token_ids: Int32[Array, " N"],
    by_xla: Callable[..., Int32[Array, " N"]],
) -> Int32[Array, " N"]:
    """How many logits of each row are strictly larger than its token's; anything without a token.

    Args:
      logits: the rows, whole.
      maxima: of their groups. The kernel reads those groups alone that have a larger logit.
      token_ids: -1 where nothing is counted; other rows are valid.
      by_xla: `by_xla(logits, token_ids)`, what XLA does instead.
    """

    def otherwise(logits: jax.Array, _: jax.Array, token_ids: jax.Array) -> jax.Array:
        return by_xla(logits, token_ids)

    def kernel(*given: jax.Array) -> jax.Array:
        found: jax.Array = _module("count_larger").count_larger(*given)
        return found

    if maxima.shape[1] > MOST_GROUPS:
        return by_xla(logits, token_ids)
    counts: jax.Array = _chosen(logits, otherwise, kernel, logits, maxima, token_ids)
    return counts


def _module(name: str) -> Any:
    """A module that is imported only where a program is lowered for CUDA: it takes long."""
    return importlib.import_module(f"pallas_kernels.backends.mosaic_gpu.{name}")


def _chosen(
    logits: jax.Array, by_xla: Callable[..., Any], kernel: Callable[..., Any], *arguments: Any
) -> Any:
    """What the kernel returns where it can run, elsewhere and under `vmap` what XLA does."""
    if choose.shape_obstacle(logits) is not None:
        return by_xla(*arguments)
    traced, like = jax.make_jaxpr(by_xla, return_shape=True)(*arguments)
    tree = jax.tree.structure(like)

    # Traced once, here: what the function found around it, as it is now, becomes an argument.
    def once(constants: Any, arguments: Any) -> Any:
        closed = ClosedJaxpr(traced.jaxpr, constants)
        return jax.tree.unflatten(tree, jaxpr_as_fun(closed)(*jax.tree.leaves(arguments)))

    cuda = on_cuda(lambda _, given: kernel(*given), once)
    return lowered_for(traced.consts, arguments, like=once, default=once, cuda=cuda)

"""The divergence of hidden states and a head from a teacher's support: contract and checks."""

from __future__ import annotations  # signatures print as they stand here

import functools
from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from pallas_kernels.contract.arguments import float_array, known_values
from pallas_kernels.contract.rows import check_ids, check_options
from pallas_kernels.contract.types import RowFloats
from pallas_kernels.linear.call import (
    MAX_KEPT_IDS,
    allowed_words,
    check_bias,
    check_product,
    check_tile,
    definition_of,
)
from pallas_kernels.linear.divergence import (
    SUM_ROUNDING,
    Divergence,
    SupportCall,
    SupportInputs,
    support_divergence,
)
from pallas_kernels.linear.types import (
    Call,
    EitherHead,
    HeadBias,
    HiddenOfRows,
    KeptIds,
    KeptLogprobs,
)
from pallas_kernels.meshes import linear_placement, split
from pallas_kernels.meshes.placement import AxisName, MeshLayout


def linear_support_kl(
    hidden: HiddenOfRows,
    head: EitherHead,
    support_ids: KeptIds,
    support_logprobs: KeptLogprobs,
    *,
    divergence: Divergence = "forward",
    temperatures: RowFloats | None = None,
    bias: HeadBias | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    logits_dtype: str = "float32",
    head_axes: str = "VH",
    row_tile: int | None = None,
    axis_name: AxisName | None = None,
    row_axis_name: AxisName | None = None,
    vocab_size: int | None = None,
    mesh: Mesh | None = None,
) -> Float32[Array, " R"]:
    """The divergence between a teacher, known on C tokens a row, and a student's hidden states.

    The teacher's support and one bucket for all other tokens, which has the rest of its mass, are a
    distribution p of C + 1 buckets; q is the student's over the same, from logits that are never
    all there. In nats:

        forward          sum of p (log p - log q)
        reverse          sum of q (log q - log p)
        jensen_shannon   half of both, each from the middle (p + q) / 2

    The student's rest is a sum over its tokens, so it keeps its digits however small it is. The
    teacher's is 1 minus its support, 2^-24 at least: what float32 can tell. A support of all V
    tokens leaves no rest: it must sum to 1.

    Memory: a few percent of R * V logits, as `linear_topk_logprobs`; the same meshes. Of R rows,
    R (2 + C) words a shard travel.

    Transformations: `grad` and `vjp` by hidden, head, bias and temperatures; the blocks are
    computed again. The teacher is a constant. `jvp` is refused with JAX's TypeError.

    Args:
      hidden: [R, H] bfloat16, float16 or float32.
      head: [V, H] of the same dtype, or as `head_axes` says.
      support_ids: [R, C] int32, 1 <= C <= 4096, no token twice in a row. An id outside [0, V) is no
        token: pad with -1.
      support_logprobs: [R, C] float32, the teacher's logprobs of these tokens; -inf is legal. Those
        beside an id that is no token are not read.
      divergence: "forward", "reverse" or "jensen_shannon".
      temperatures: [R] float32, of the student's logits, as `topk_logprobs` has them. The teacher's
        logprobs should be of the same ("scaled" ones).
      bias, scale, soft_cap, logits_dtype, head_axes, row_tile: as `linear_topk_logprobs` has them.
      axis_name, row_axis_name, vocab_size, mesh: as there.

    Returns:
      [R] float32. NaN in a row whose logits are invalid, or whose teacher has a NaN, a mass of
      more than 1, or all tokens and less than 1.

    Raises:
      TypeError, ValueError: a shape, a dtype or a number is not as above; where they are known
        (outside of `jit`, or NumPy arrays), also ids of V and more, an id that is named twice, and
        logprobs whose probabilities sum to more than 1, or those of all tokens to less.
    """
    raw_ids, raw_logprobs = support_ids, support_logprobs  # jit would hide NumPy's values
    hidden, head = check_product(hidden, head, head_axes)
    num_rows = hidden.shape[0]
    support_ids = check_ids("support_ids", support_ids, (num_rows, "C"))
    count = support_ids.shape[1]
    if not 0 < count <= MAX_KEPT_IDS:
        raise ValueError(
            f"support_ids names {count} ids for each row; it must be 1 to {MAX_KEPT_IDS}: the "
            "rest's bucket stands for the others"
        )
    logprobs = float_array("support_logprobs", support_logprobs)
    if logprobs.dtype != jnp.float32 or logprobs.shape != support_ids.shape:
        raise ValueError(
            f"support_logprobs is {logprobs.dtype.name} {list(logprobs.shape)}; it must be float32 "
            f"{list(support_ids.shape)}, as support_ids"
        )
    if divergence not in get_args(Divergence):
        names = ", ".join(map(repr, get_args(Divergence)))
        raise ValueError(f"divergence = {divergence!r} must be one of {names}")
    _, temperatures, _ = check_options(None, temperatures, None, num_rows)
    axis = head_axes.index("V")
    place = linear_placement.placed_product(
        hidden, head, mesh, axis_name, row_axis_name, vocab_size, axis
    )
    _check_support(known_values(raw_ids), known_values(raw_logprobs), place.vocab_size)
    definition = definition_of(scale, soft_cap, logits_dtype)._replace(transposed=bool(axis))
    if num_rows == 0:
        return jnp.zeros(0, jnp.float32)
    bias = check_bias(bias, head.shape[axis])
    call = Call(definition, 0, False, place.shard, row_tile=check_tile(row_tile))
    which = SupportCall(call, divergence)
    inputs = SupportInputs(hidden, head, bias, support_ids, logprobs, temperatures)
    words = allowed_words(inputs, head=head_axes.lower())
    return split.run_inputs(place, _divergence_of(which), inputs, words)


@functools.cache
def _divergence_of(
    which: SupportCall,
) -> Callable[[MeshLayout, SupportInputs], Float32[Array, " R"]]:
    """One device's part of the call, always the same object."""

    def of_part(_: MeshLayout, inputs: SupportInputs) -> Float32[Array, " R"]:
        return support_divergence(which, inputs)

    return jax.jit(of_part, static_argnums=0)


def _check_support(ids: np.ndarray | None, logprobs: np.ndarray | None, vocab_size: int) -> None:
    """Refuse what is no support; values that are None are not known."""
    if ids is None:
        return
    if (beyond := ids >= vocab_size).any():
        row, place = np.argwhere(beyond)[0].tolist()
        raise ValueError(
            f"support_ids[{row}, {place}] = {ids[row, place]} is outside the vocabulary (0 to "
            f"{vocab_size - 1}): pad with -1, and give teacher and student one vocabulary"
        )
    ordered = np.sort(ids, axis=1)
    if (twice := (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        row, place = np.argwhere(twice)[0].tolist()
        raise ValueError(
            f"support_ids names {ordered[row, place]} twice in row {row}: name each token once"
        )
    if logprobs is None:
        return
    mass = np.where(ids >= 0, np.exp(logprobs.astype(np.float64)), 0).sum(axis=1)
    least = np.where((ids >= 0).sum(axis=1) == vocab_size, 1 - SUM_ROUNDING, 0)
    if (wrong := mass < least).any():
        row = int(wrong.argmax())
        raise ValueError(
            f"support_logprobs of row {row} name all {vocab_size} tokens and sum to "
            f"{mass[row]:.6g} as probabilities, and must to 1: no token is left for the rest"
        )
    if (wrong := ~(mass <= 1 + SUM_ROUNDING)).any():
        row = int(wrong.argmax())
        raise ValueError(
            f"support_logprobs of row {row} sum to {mass[row]:.6g} as probabilities, and may to 1: "
            "give logprobs over the whole vocabulary, not logits, nor those of a set alone"
        )

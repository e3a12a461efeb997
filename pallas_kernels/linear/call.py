"""Logprobs from hidden states and a head: the contract, and the checks."""

from __future__ import annotations  # signatures print as they stand here

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pallas_kernels.backends.choose import KERNELS
from pallas_kernels.contract.rows import (
    LOGITS_DTYPES,
    MAX_VOCABULARY,
    check_extra_token_ids,
    check_floats,
    check_ids,
    check_k,
    check_matrix,
    check_options,
    check_targets,
    outputs_of,
    skipped_rows,
)
from pallas_kernels.contract.types import (
    AnyArray,
    IdTable,
    RowCount,
    RowFloats,
    RowIds,
    TopkLogprobs,
)
from pallas_kernels.linear import backward, kept
from pallas_kernels.linear.divergence import SupportInputs
from pallas_kernels.linear.types import (
    Call,
    Definition,
    EitherHead,
    Head,
    HeadBias,
    Hidden,
    HiddenOfRows,
    KeptIds,
    LinearInputs,
    LinearKeptLogprobs,
)
from pallas_kernels.lowering.implementation import Implementation, check_name, refuse, resolved
from pallas_kernels.meshes import linear_placement, split
from pallas_kernels.meshes.placement import AxisName, MeshLayout
from pallas_kernels.meshes.split import Words

MAX_KEPT_IDS = 4096
MAX_NAMED = 512
MAX_TILE = 4096


def linear_topk_logprobs(
    hidden: Hidden,
    head: EitherHead,
    token_ids: RowIds,
    k: int,
    *,
    row_ids: RowIds | None = None,
    num_rows: RowCount | None = None,
    temperatures: RowFloats | None = None,
    extra_token_ids: IdTable | None = None,
    bias: HeadBias | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    logits_dtype: str = "float32",
    head_axes: str = "VH",
    log_sum_exp: bool = False,
    entropy: bool = False,
    row_tile: int | None = None,
    implementation: Implementation | None = None,
    axis_name: AxisName | None = None,
    row_axis_name: AxisName | None = None,
    vocab_size: int | None = None,
    mesh: Mesh | None = None,
) -> TopkLogprobs:
    """`topk_logprobs` of logits that are never all there: from hidden states and the head.

    The logits are defined by one sentence:

        logits = round(soft_cap(scale * (hidden @ head.T) + bias))

    The product is accumulated in float32 (as `jax.default_matmul_precision` has it), all of the
    rest is float32, and they are rounded once to `logits_dtype`. Ids, token ranks, ties, errors and
    rows without an answer are what `topk_logprobs` says of these logits. A product of other columns
    may add in another order: then logits differ in their last bits from those of one whole product,
    and so may ids and ranks of near-ties.

    Memory: of R * V logits, a few percent exist at a time (`docs/linear.md`); where R < 1024 and
    they are few, all. With `row_ids`, the named rows of hidden are copied.

    Bits: products of another number of rows or columns may add in another order. With `row_tile`
    all have one shape, and a row's logprobs have the same bits whatever R, K, its place, the other
    options (but `head_axes`) and the number of shards of head and rows, here and in the forward
    pass of a gradient; on a GPU where XLA takes one algorithm for all of them. It takes a tile of
    rows at a time, and fills up fewer.

    Transformations: `grad` and `vjp` differentiate the logprobs of all kinds, `log_sum_exp` and
    `entropy` by hidden, head, bias and temperatures; the blocks are computed again. `jvp` is
    refused with JAX's TypeError about `custom_vjp`. Fold a batch into rows instead of `vmap`.

    Meshes: the head may be split over the vocabulary, hidden over rows, or both. Explicit axes and
    existing arrays tell; where axes are automatic, pass `mesh` and name them. Inside
    `jax.shard_map`, give each device its rows of the head, equally many and in order, and the mesh
    axis as `axis_name`. R * (4 + C + 2 K) words a shard travel, and one; the gradient of hidden is
    summed once over the vocabulary's axis, those of head and bias over the rows'. Where rows are
    split, `row_ids` is refused.

    Args:
      hidden: [N, H] bfloat16, float16 or float32.
      head: [V, H] of the same dtype, or as `head_axes` says.
      token_ids: [R] int32, the token whose logprob and token rank are wanted, for each target row.
      k: how many of the largest logits to return, a Python int, 0 <= k <= min(512, V).
      row_ids: [R] int32, the row of hidden that each target row reads; without it R = N.
      num_rows: int32 scalar, may be traced: target rows from there on are skipped.
      temperatures: [R] float32, as `topk_logprobs` has them.
      extra_token_ids: [R, C] int32, C <= 512: more tokens whose logprobs are wanted.
      bias: [V] bfloat16, float16 or float32, added to the logits.
      scale: a Python number that the product is multiplied with.
      soft_cap: a positive Python number, cap * tanh(x / cap); None: there is none.
      logits_dtype: "bfloat16", "float16" or "float32".
      head_axes: "VH", or "HV" for a head [H, V], as kernels of dense layers are. No copy is made.
      log_sum_exp, entropy: whether these results are wanted, see `TopkLogprobs`.
      row_tile: 1 to 4096, so many rows of every product; None: as many as are fastest.
      implementation: "xla", or None for what `use_implementation` names, else the fastest. The
        product is XLA's in any case; for K > 0 a TPU's kernel reads the logits that are there.
      axis_name: the mesh axis over which the head is split.
      row_axis_name: outside `shard_map`, the mesh axis of `mesh` over which hidden is split.
      vocab_size: V, where rows of padding follow in the head.
      mesh: outside `shard_map`, the mesh of the named axes.

    Returns:
      `TopkLogprobs` without top logits; see its docstring.

    Raises:
      TypeError, ValueError: a shape, a dtype or a number is not as above.
      NotImplementedError: there is no such implementation of this call, or that of
        `use_implementation` cannot run here.
    """
    hidden, head = check_product(hidden, head, head_axes)
    axis = head_axes.index("V")
    token_ids, row_ids = check_targets(token_ids, row_ids, "hidden", hidden.shape[0])
    num_targets = token_ids.shape[0]
    place = linear_placement.placed_product(
        hidden, head, mesh, axis_name, row_axis_name, vocab_size, axis
    )
    k = check_k(k, place.vocab_size)
    if row_ids is not None and place.layout.rows:
        raise ValueError(
            f"row_ids with hidden split over {place.layout.rows}: gather the rows first, or "
            "name them inside a shard_map of your own"
        )
    num_rows, temperatures, _ = check_options(num_rows, temperatures, None, num_targets)
    if extra_token_ids is None:
        # None, as a slice of what is there: outside of `jit`, nothing is sent from the host.
        extra_token_ids = lax.slice_in_dim(token_ids.reshape(-1, 1), 0, 0, axis=1)
    extra_token_ids = check_extra_token_ids(extra_token_ids, num_targets, MAX_NAMED)
    check_name(implementation)
    if implementation in KERNELS:
        refuse(implementation, "it has no product with a head")
    definition = definition_of(scale, soft_cap, logits_dtype)._replace(transposed=bool(axis))
    reader = resolved(implementation)
    outputs = outputs_of(k, log_sum_exp=log_sum_exp, entropy=entropy)
    call = Call(
        definition, k, entropy, place.shard, implementation=reader, row_tile=check_tile(row_tile)
    )
    if num_targets == 0 or hidden.shape[0] == 0:
        return skipped_rows(num_targets, outputs, extra_token_ids.shape[1])
    bias = check_bias(bias, head.shape[axis])
    inputs = LinearInputs(
        hidden, head, bias, token_ids, row_ids, num_rows, temperatures, extra_token_ids
    )
    words = allowed_words(inputs, head=head_axes.lower(), row_ids=".", num_rows="")
    results = split.run_inputs(place, _topk_of(call), inputs, words)
    return results if log_sum_exp else results._replace(log_sum_exp=None)


@functools.cache
def _topk_of(call: Call) -> Callable[[MeshLayout, LinearInputs], TopkLogprobs]:
    """One device's part of the call, always the same object."""

    def topk(layout: MeshLayout, inputs: LinearInputs) -> TopkLogprobs:
        count = split.own_num_rows(layout, inputs.num_rows, inputs.hidden.shape[0])
        return backward.differentiable_topk_logprobs(call, inputs._replace(num_rows=count))

    return jax.jit(topk, static_argnums=0)


def linear_kept_logprobs(
    hidden: HiddenOfRows,
    head: Head,
    token_ids: RowIds,
    kept_token_ids: KeptIds,
    *,
    temperatures: RowFloats | None = None,
    bias: HeadBias | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    logits_dtype: str = "float32",
    row_tile: int | None = None,
    axis_name: AxisName | None = None,
    row_axis_name: AxisName | None = None,
    vocab_size: int | None = None,
    mesh: Mesh | None = None,
) -> LinearKeptLogprobs:
    """Logprobs under the softmax of the kept tokens' logits alone, which no other token enters.

    The logits are those of `linear_topk_logprobs`; of the head, the kept rows alone are read. So a
    learner computes what a sampler drew from when it kept few tokens: O(R C) numbers, and at most
    8 MiB of gathered rows, or one row's. The same transformations and meshes. The head's gradient
    is summed in float32.

    Args:
      hidden: [R, H] bfloat16, float16 or float32.
      head: [V, H] of the same dtype.
      token_ids: [R] int32, the tokens whose logprobs are wanted.
      kept_token_ids: [R, C] int32, C <= 4096, in any order, no token twice. An id outside [0, V)
        is no token: pad with -1.
      temperatures: [R] float32, as `topk_logprobs` has them.
      bias, scale, soft_cap, logits_dtype: as `linear_topk_logprobs` has them.
      row_tile: as there; bits then depend on C, and on no other row, call or mesh.
      axis_name, row_axis_name, vocab_size, mesh: as there.

    Returns:
      `LinearKeptLogprobs(logprobs [R] float32, kept_logprobs [R, C] float32)`. A token that its row
      does not keep has logprob -inf, and no derivative.

    Raises:
      TypeError, ValueError: a shape, a dtype or a number is not as above.
    """
    hidden, head = check_product(hidden, head)
    num_targets = hidden.shape[0]
    token_ids = check_ids("token_ids", token_ids, (num_targets,))
    kept_token_ids = check_ids("kept_token_ids", kept_token_ids, (num_targets, "C"))
    if not 0 < kept_token_ids.shape[1] <= MAX_KEPT_IDS:
        raise ValueError(
            f"kept_token_ids names {kept_token_ids.shape[1]} ids for each row; it must be 1 to "
            f"{MAX_KEPT_IDS}: for more, linear_topk_logprobs reads the whole head"
        )
    _, temperatures, _ = check_options(None, temperatures, None, num_targets)
    place = linear_placement.placed_product(
        hidden, head, mesh, axis_name, row_axis_name, vocab_size
    )
    definition = definition_of(scale, soft_cap, logits_dtype)
    call = Call(definition, 0, False, place.shard, row_tile=check_tile(row_tile))
    if num_targets == 0:
        shape = kept_token_ids.shape
        return LinearKeptLogprobs(jnp.zeros(0, jnp.float32), jnp.zeros(shape, jnp.float32))
    bias = check_bias(bias, head.shape[0])
    inputs = kept.KeptInputs(hidden, head, bias, token_ids, kept_token_ids, temperatures)
    words = allowed_words(inputs, head="vh")
    return split.run_inputs(place, _kept_of(call), inputs, words)


@functools.cache
def _kept_of(call: Call) -> Callable[[MeshLayout, kept.KeptInputs], LinearKeptLogprobs]:
    """One device's part of the call, always the same object."""

    def of_part(_: MeshLayout, inputs: kept.KeptInputs) -> LinearKeptLogprobs:
        return kept.differentiable_kept_logprobs(call, inputs)

    return jax.jit(of_part, static_argnums=0)


def allowed_words(inputs: LinearInputs | kept.KeptInputs | SupportInputs, **others: str) -> Words:
    """The axes of the inputs that there are: of rows, except the bias and the others."""
    others["bias"] = "v"
    named = inputs._asdict().items()
    return tuple(others.get(name, "n" + "." * (x.ndim - 1)) for name, x in named if x is not None)


def check_product(
    hidden: AnyArray, head: AnyArray, axes: str = "VH"
) -> tuple[jax.Array, jax.Array]:
    """hidden [N, H] and head as arrays, if they have one supported dtype and one H."""
    if axes not in ("VH", "HV"):
        raise ValueError(f"head_axes = {axes!r} must be 'VH' for a head [V, H], or 'HV' for [H, V]")
    v, h = axes.index("V"), axes.index("H")
    hidden, head = (
        check_matrix(name, x, shape)
        for name, x, shape in (("hidden", hidden, "[N, H]"), ("head", head, f"[{', '.join(axes)}]"))
    )
    if hidden.dtype != head.dtype:
        raise TypeError(
            f"hidden has dtype {hidden.dtype.name} and head {head.dtype.name}; convert one of "
            "them: the product is accumulated in float32 whatever they are"
        )
    if hidden.shape[1] != head.shape[h]:
        raise ValueError(
            f"hidden has H = {hidden.shape[1]} and head {head.shape[h]}; head must be "
            f"[{', '.join(axes)}]: transpose it, or say its head_axes"
        )
    if not 0 < head.shape[v] <= MAX_VOCABULARY:
        raise ValueError(
            f"head has {head.shape[v]} tokens; it must have 1 to {MAX_VOCABULARY}: split a "
            "larger one over several devices"
        )
    return hidden, head


def check_bias(bias: AnyArray | None, width: int) -> jax.Array | None:
    if bias is None:
        return None
    array = check_floats("bias", bias)
    if array.shape != (width,):
        raise ValueError(f"bias has shape {list(array.shape)}; it must be [{width}], as the head")
    return array


def check_tile(row_tile: int | None) -> int | None:
    if row_tile is None:
        return None
    if isinstance(row_tile, bool) or not isinstance(row_tile, int):
        raise TypeError(f"row_tile = {row_tile!r} must be a Python int, or None for no tiles")
    if not 1 <= row_tile <= MAX_TILE:
        raise ValueError(f"row_tile = {row_tile} must be 1 to {MAX_TILE}: 32 is a good size")
    return row_tile


def definition_of(scale: float, soft_cap: float | None, logits_dtype: DTypeLike) -> Definition:
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale = {scale!r} must be a finite Python number")
    if soft_cap is not None and (
        not isinstance(soft_cap, (int, float)) or not 0 < soft_cap < math.inf
    ):
        raise ValueError(
            f"soft_cap = {soft_cap!r} must be a positive Python number, or None for no cap"
        )
    try:
        name = logits_dtype if isinstance(logits_dtype, str) else jnp.dtype(logits_dtype).name
    except TypeError:
        name = repr(logits_dtype)
    if name not in LOGITS_DTYPES:
        raise ValueError(f"logits_dtype = {name!r} must be one of {', '.join(LOGITS_DTYPES)}")
    cap = None if soft_cap is None else float(soft_cap)
    return Definition(float(scale), cap, name)

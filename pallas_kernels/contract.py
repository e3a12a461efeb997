"""Top K, logprobs and token ranks of chosen rows of logits: the contract, and who computes it."""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.finish import skipped_rows
from pallas_kernels.implementations import Implementation, choose_implementation
from pallas_kernels.sharding import partitioned, placement, shards
from pallas_kernels.transformations import transformable
from pallas_kernels.types import AnyArray, TopkLogprobs


def topk_logprobs(
    logits: Float[AnyArray, "N V"],
    token_ids: Int32[AnyArray, " R"],
    k: int,
    *,
    row_ids: Int32[AnyArray, " R"] | None = None,
    num_rows: Int32[AnyArray, ""] | np.int32 | int | None = None,
    temperatures: Float32[AnyArray, " R"] | None = None,
    extra_token_ids: Int32[AnyArray, "R C"] | None = None,
    implementation: Implementation | None = None,
    axis_name: str | None = None,
    vocab_size: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> TopkLogprobs:
    """Logprob and token rank of one token per target row, and the row's K largest logits.

    The logprob of token t is (x[t] - m) - log(sum(exp(x - m))) in float32, over the full
    vocabulary, with m the row's maximum. Against float64 on the same logits its error is at most
    1e-5 + 2e-7 |logprob|. Ids, token ranks and the order of ties (lowest id first, -0.0 equal to
    0.0) are exact, and the same in every implementation.

    Rows and tokens without an answer:
      A logit of -inf is legal: its logprob is -inf. Where fewer than K are finite, the missing
      columns hold id -1 and logprob -inf.
      An invalid row (a NaN of either sign, a +inf, or no finite logit): logprobs NaN, token rank
      0, top K ids -1. Column 0 keeps the given token id.
      A skipped row (its index is `num_rows` or more, or its row id is outside [0, N)): all ids
      -1, logprobs NaN, token rank 0.
      A token id outside [0, V): NaN for that token, token rank 0; the row's top K stand.

    Meshes: logits may be split by rows, by the vocabulary, or by both. Outside of `jax.shard_map`
    nothing need be named: explicit axes and existing arrays tell, and the compiler does for
    automatic axes. Each device reads its own part. Without `row_ids` the results are split as the
    rows are; otherwise every device gets them whole. Ids, token ranks and order are those of one
    device. Where the vocabulary is split, R * (4 + C + 2 K) words a shard travel; where rows
    are and `row_ids` name them, the results do; logits never do. Inside `shard_map`, give each
    device its columns, equally many and in order, and the mesh axis as `axis_name`. Where V does
    not divide evenly, pad the last columns with anything and give `vocab_size`.

    Transformations: `vmap` folds a batch into rows. `jvp` and `grad` differentiate the logprobs of
    all kinds by logits and temperatures; ids and token ranks have no derivative, nor have rows and
    tokens without an answer.

    Args:
      logits: [N, V] bfloat16, float16 or float32; with `axis_name` inside `shard_map`, the
        device's columns of them.
      token_ids: [R] int32, the token whose logprob and token rank are wanted, for each target row.
      k: how many of the largest logits to return, a Python int, 0 <= k <= min(512, V).
      row_ids: [R] int32, the logits row that each target row reads; repeats are fine, and no row
        is copied. Without it R = N and target row i reads row i.
      num_rows: int32 scalar, may be traced: only the first num_rows target rows are worked on.
      temperatures: [R] float32. Logprobs become those of log_softmax((x - m) / T); order and
        token ranks still come from x. T = 0 means greedy and uses T = 1; a negative or infinite T
        gives NaN logprobs.
      extra_token_ids: [R, C] int32, C <= 128: more tokens whose logprobs are wanted.
      implementation: "xla", "mosaic_gpu", or None for the fastest that runs here.
      axis_name: the mesh axis over which the vocabulary is sharded.
      vocab_size: V, where columns of padding follow.
      mesh: outside `shard_map`, the mesh of `axis_name`, if the logits do not tell.

    Returns:
      `TopkLogprobs(token_ids [R, k + 1] int32, logprobs [R, k + 1] float32, token_ranks [R] int32,
      extra_logprobs [R, C] float32)`; see its docstring.

    Raises:
      TypeError, ValueError: a shape, a dtype, k or the implementation's name is not as above.
      NotImplementedError: the chosen implementation cannot run here; the message says why.
    """
    logits = checks.check_logits(logits)
    token_ids = checks.check_ids("token_ids", token_ids, ("R",))
    num_targets = token_ids.shape[0]
    place = placement.placed(logits, axis_name, mesh, vocab_size)
    k = checks.check_k(k, place.vocab_size)
    if row_ids is None:
        checks.check_num_targets(num_targets, logits.shape[0])
    else:
        row_ids = checks.check_ids("row_ids", row_ids, (num_targets,))
    num_rows, temperatures, extra_token_ids = checks.check_options(
        num_rows, temperatures, extra_token_ids, num_targets
    )
    num_extra = 0 if extra_token_ids is None else extra_token_ids.shape[1]
    if num_targets == 0 or logits.shape[0] == 0:  # no row to read: nothing to compile for
        return skipped_rows(num_targets, k, num_extra)
    arguments = (logits, token_ids, row_ids, num_rows, temperatures, extra_token_ids)
    return _run(place, implementation, k, arguments)


def greedy_topk_logprobs(
    logits: Float[AnyArray, "N V"],
    k: int,
    *,
    num_rows: Int32[AnyArray, ""] | np.int32 | int | None = None,
    temperatures: Float32[AnyArray, " N"] | None = None,
    extra_token_ids: Int32[AnyArray, "N C"] | None = None,
    implementation: Implementation | None = None,
    axis_name: str | None = None,
    vocab_size: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> TopkLogprobs:
    """`topk_logprobs` of each row's own greedy choice: the fused path of greedy verification.

    Equal to `topk_logprobs(logits, greedy_token_ids(logits), k, ...)`, but the GPU kernels read the
    logits only once for both. Column 0 of `token_ids` is the greedy choice, in invalid rows too;
    `token_ranks` is 1 where the row is valid, else 0. Take it where all N rows' greedy choices are
    needed anyway; where few rows were accepted or asked for logprobs, `greedy` and then
    `topk_logprobs` with `row_ids` may be cheaper.

    Args, Returns, Raises: as `topk_logprobs`, with R = N.
    """
    logits = checks.check_logits(logits)
    num_targets = logits.shape[0]
    place = placement.placed(logits, axis_name, mesh, vocab_size)
    k = checks.check_k(k, place.vocab_size)
    num_rows, temperatures, extra_token_ids = checks.check_options(
        num_rows, temperatures, extra_token_ids, num_targets
    )
    num_extra = 0 if extra_token_ids is None else extra_token_ids.shape[1]
    if num_targets == 0:
        return skipped_rows(num_targets, k, num_extra)
    arguments = (logits, None, None, num_rows, temperatures, extra_token_ids)
    return _run(place, implementation, k, arguments)


def _run(
    place: placement.Place,
    implementation: Implementation | None,
    k: int,
    arguments: Any,
) -> TopkLogprobs:
    """The call where its logits are; without token ids: of the greedy choice."""
    call = shards.call_of(implementation, k)
    if place.mesh is not None:
        return placement.run(place, call, arguments)
    if place.layout.vocabulary:  # inside `shard_map`
        return call(place.shard, *arguments)
    runner = choose_implementation(implementation, arguments[0])  # an error comes before any work
    if place.unknown:
        split = functools.partial(partitioned.run, call, place.shard)
        return transformable(lambda *arguments: split(arguments), place.shard)(*arguments)
    return shards.whole(runner, place.shard, k, *arguments)

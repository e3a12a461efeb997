"""Top K, logprobs and token ranks of chosen rows of logits: the contract, and who computes it."""

from __future__ import annotations  # signatures print as they stand here

import functools
from collections.abc import Callable
from types import ModuleType

import jax
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.backends import answers, read
from pallas_kernels.backends.choose import kernels_or_xla
from pallas_kernels.backends.groups import WIDTH
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.backends.xla.tails import columns_of_all
from pallas_kernels.contract.arguments import check_bool
from pallas_kernels.contract.rows import (
    Outputs,
    Rows,
    check_changes,
    check_k,
    check_logits,
    check_options,
    check_targets,
    is_inclusive,
    outputs_of,
    skipped_rows,
)
from pallas_kernels.contract.types import (
    AnyArray,
    Biases,
    BiasIds,
    BitMask,
    IdTable,
    Logits,
    RankTies,
    RowCount,
    RowFloats,
    RowIds,
    TopkLogprobs,
)
from pallas_kernels.lowering.implementation import (
    Implementation,
    resolved,
    use_implementation,
)
from pallas_kernels.meshes import split
from pallas_kernels.meshes.placement import AxisName, Place, Split, VocabShard, placed
from pallas_kernels.topk.derivatives import transformable
from pallas_kernels.topk.digests import row_digests


def topk_logprobs(
    logits: Logits,
    token_ids: RowIds,
    k: int,
    *,
    row_ids: RowIds | None = None,
    num_rows: RowCount | None = None,
    temperatures: RowFloats | None = None,
    extra_token_ids: IdTable | None = None,
    allowed: BitMask | None = None,
    bias_token_ids: BiasIds | None = None,
    bias: Biases | None = None,
    rank_ties: RankTies = "strict",
    log_sum_exp: bool = False,
    entropy: bool = False,
    top_logits: bool = False,
    digests: bool = False,
    implementation: Implementation | None = None,
    axis_name: AxisName | None = None,
    vocab_size: int | None = None,
    mesh: Mesh | None = None,
) -> TopkLogprobs:
    """Logprob and token rank of one token per target row, and the row's K largest logits.

    The logprob of token t is (x[t] - m) - log(sum(exp(x - m))) in float32, over the full
    vocabulary, with m the row's maximum. Against float64 on the same logits its error is at most
    `1e-5 + 2e-7 |logprob|`. Ids, token ranks and the order of ties (lowest id first, -0.0 equal to
    0.0) are exact, and the same in every implementation.

    Rows and tokens without an answer:
      A logit of -inf is legal: its logprob is -inf. Where fewer than K are finite, the missing
      columns hold id -1 and logprob -inf.
      An invalid row (a NaN of either sign, a +inf, or no finite logit): logprobs NaN, token rank
      0, top K ids -1. Column 0 keeps the given token id.
      A skipped row (its index is `num_rows` or more, or its row id is outside [0, N)): all ids
      -1, logprobs NaN, token rank 0.
      A token id outside [0, V): NaN for that token, token rank 0; the row's top K stand.

    Changes: `allowed` and the bias change logits while they are read, in this order: a forbidden
    token's logit is -inf, whatever its own and its bias; another one that a bias names is the
    float32 sum of its logit and its biases, and is not rounded back. All results are those of the
    changed logits: a row with no token left is invalid, a bias of -inf forbids, a bias of NaN or
    +inf makes a row invalid. Several biases of a token are added to one another first.

    Meshes: logits may be split by rows, by the vocabulary, or by both. Outside of `jax.shard_map`
    nothing need be named: explicit axes and existing arrays tell, and the compiler does for
    automatic axes. Each device reads its own part. Without `row_ids` the results are split as the
    rows are; otherwise every device gets them whole. Ids, token ranks and order are those of one
    device. Where the vocabulary is split, R * (6 + C + 2 K) words a shard travel; where rows
    are and `row_ids` name them, the results do. Of the logits 255 columns travel where a device's
    columns end inside of a group of 256 tokens, all where it has fewer than 256, else none. Inside
    `shard_map`, give each device its columns, equally many and in order, and the mesh axis as
    `axis_name`. Where V does not divide evenly, pad the last columns with anything and give
    `vocab_size`.

    Transformations: `vmap` folds a batch into rows. `jvp` and `grad` differentiate the logprobs of
    all kinds, `log_sum_exp`, `entropy` and `top_logits` by logits, temperatures and `bias`; ids and
    token ranks have no derivative, nor have rows and tokens without an answer.

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
      extra_token_ids: [R, C] int32, C <= 512: more tokens whose logprobs are wanted.
      allowed: [R, ceil(V / 32)] uint32 or int32, a bit a token: bit j of word w, the lowest being
        bit 0, allows token 32 w + j; as xgrammar's token bitmask. Bits from V on are not read.
      bias_token_ids: [R, D] int32, D <= 4096: tokens that get a bias; ids outside [0, V) get none.
      bias: [R, D] float32, what is added to their logits.
      rank_ties: "strict" counts the strictly larger logits, and 1; "inclusive" counts logits at
        least as large, the token's own among them, as vLLM does.
      log_sum_exp, entropy, top_logits, digests: whether these results are wanted, see
        `TopkLogprobs`. Digests take a read of their own.
      implementation: "xla", "mosaic_gpu", "mosaic_tpu", or None for what `use_implementation`
        names, else the fastest that runs here and is proved here (docs/check_device.md).
      axis_name: the mesh axis over which the vocabulary is sharded.
      vocab_size: V, where columns of padding follow.
      mesh: outside `shard_map`, the mesh of `axis_name`, if the logits do not tell.

    Returns:
      `TopkLogprobs(token_ids [R, k + 1] int32, logprobs [R, k + 1] float32, token_ranks [R] int32,
      extra_logprobs [R, C] float32, log_sum_exp [R], entropy [R], top_logits [R, k] float32,
      digests [R, 2] uint32)`; see its docstring. The last four are None unless they are wanted.

    Raises:
      TypeError, ValueError: a shape, a dtype, k or the implementation's name is not as above.
      NotImplementedError: the chosen implementation cannot run here; the message says why.
    """
    logits = check_logits(logits)
    token_ids, row_ids = check_targets(token_ids, row_ids, "logits", logits.shape[0])
    place = placed(logits, Split(mesh, axis_name, vocab_size))
    outputs = outputs_of(
        k,
        log_sum_exp=log_sum_exp,
        entropy=entropy,
        top_logits=top_logits,
        inclusive=is_inclusive(rank_ties),
    )
    options = num_rows, temperatures, extra_token_ids
    changes = allowed, bias_token_ids, bias
    check_bool("digests", digests)
    rows = Rows(logits, token_ids, row_ids)
    results = _run(place, implementation, outputs, rows, options, changes)
    if not digests:
        return results
    words = row_digests(
        logits, row_ids=row_ids, num_rows=num_rows,
        axis_name=axis_name, vocab_size=vocab_size, mesh=mesh,
    )  # fmt: skip
    return results._replace(digests=words)


def _run(
    place: Place,
    implementation: Implementation | None,
    outputs: Outputs,
    rows: Rows,
    options: tuple[AnyArray | np.int32 | int | None, AnyArray | None, AnyArray | None],
    changes: tuple[AnyArray | None, AnyArray | None, AnyArray | None],
) -> TopkLogprobs:
    """The call where its logits are, with its options, and its changes of logits, checked here."""
    num_targets = rows.num_targets
    outputs = outputs._replace(k=check_k(outputs.k, place.vocab_size))
    num_rows, temperatures, extra_token_ids = check_options(*options, num_targets)
    rows = rows._replace(
        num_rows=num_rows,
        temperatures=temperatures,
        extra_token_ids=extra_token_ids,
        changes=check_changes(*changes, num_targets, place.vocab_size),
    )
    if num_targets == 0 or rows.logits.shape[0] == 0:  # no row to read: nothing to compile for
        return skipped_rows(num_targets, outputs, rows.extra_ids.shape[1])
    part = own_part(resolved(implementation), outputs)
    if place.is_here:
        return part(place.shard, rows)
    if place.unknown:
        return _where_compiled(place, part)(rows)
    return split.run_split(place, part, rows)


@functools.cache
def _where_compiled(
    place: Place, part: Callable[[VocabShard, Rows], TopkLogprobs]
) -> Callable[[Rows], TopkLogprobs]:
    """A call whose logits the compiler may split: what it asks for later gets a derivative here.

    Compiled, as `own_part` is: a derivative outside of `jit` runs one program too.
    """
    return jax.jit(transformable(functools.partial(split.run_split, place, part), place.shard))


@functools.cache
def own_part(
    implementation: Implementation | None, outputs: Outputs
) -> Callable[[VocabShard, Rows], TopkLogprobs]:
    """One device's part of a call, always the same object.

    It is compiled here too: a call outside jit runs one program and not one per operation, and a
    program with several equal calls holds one.
    """

    def call(shard: VocabShard, rows: Rows) -> TopkLogprobs:
        def part(rows: Rows) -> TopkLogprobs:
            with use_implementation(implementation):  # a rule of `vmap` may trace it later
                return _of_shard(outputs, shard, rows)

        return transformable(part, shard)(rows)

    return jax.jit(call, static_argnums=0)


def _of_shard(outputs: Outputs, shard: VocabShard, rows: Rows) -> TopkLogprobs:
    """The call on the columns of `shard`: all of them, or this device's."""
    logits, shard = shard.without_padding(rows.logits)
    rows, width = rows._replace(logits=logits), logits.shape[1]
    if shard.axis_name is None:
        return topk_of_whole_rows(outputs, rows)
    if width < WIDTH:  # a shard that is narrower than a group: all columns are gathered
        rows = rows._replace(logits=columns_of_all(shard.masked(logits), shard))
        return topk_of_whole_rows(outputs, rows)
    return answers.topk_logprobs_of_shard(read.part_sums, rows, outputs, shard)


def topk_of_whole_rows(outputs: Outputs, rows: Rows) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` of whole rows.

    The GPU kernels write the answers of unchanged rows themselves, in their pass 2.
    """

    def by_kernels(kernels: ModuleType, rows: Rows) -> TopkLogprobs:
        call = getattr(kernels, "topk_logprobs", None)
        if call is not None and rows.changes is None:
            results: TopkLogprobs = call(rows, outputs)
            return results
        return answers.topk_logprobs(kernels.row_sums, rows, outputs)

    def by_xla(rows: Rows) -> TopkLogprobs:
        return answers.topk_logprobs(xla.row_sums, rows, outputs)

    return kernels_or_xla(
        "rows", by_kernels, by_xla, rows, logits=rows.logits, size=(rows.num_targets, outputs.k)
    )

"""One device's part of a call: all columns of its rows, or those of a vocabulary shard.

Every shard runs the same kernel on its part (`from_parts`). What travels for R rows and C extra ids
is R * (1 + C) words summed, and R * (3 + 2 K) words gathered from every shard, R more for entropy.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.backends.choose import Implementation, Runner, choose_implementation
from pallas_kernels.backends.xla.greedy import greedy
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.meshes.vocab_shard import VocabShard
from pallas_kernels.topk import parts
from pallas_kernels.topk.derivatives import transformable


@functools.cache
def call_of(implementation: Implementation | None, wanted: Wanted) -> Callable[..., TopkLogprobs]:
    """A function of (shard, *arguments): one device's part of a call, always the same object."""

    def call(shard: VocabShard, *arguments: Any) -> TopkLogprobs:
        return transformable(functools.partial(part, shard), shard)(*arguments)

    def part(
        shard: VocabShard, logits: jax.Array, token_ids: jax.Array | None, *rest: Any
    ) -> TopkLogprobs:
        if shard.axis_name is None:
            runner = choose_implementation(implementation, logits)
            return whole(runner, shard, wanted, logits, token_ids, *rest)
        if token_ids is None:
            *_, changes = rest
            changed = of_logits.apply(logits, parts.mine(changes, shard, logits.shape[1]))
            token_ids = greedy(
                changed, axis_name=shard.axis_name, vocab_size=shard.vocab_size
            ).token_ids
        row_parts = choose_implementation(implementation, logits).row_parts
        return parts.topk_logprobs(row_parts, shard, logits, token_ids, wanted, *rest)

    return call


def whole(
    runner: Runner,
    shard: VocabShard,
    wanted: Wanted,
    logits: jax.Array,
    token_ids: jax.Array | None,
    row_ids: jax.Array | None,
    *rest: Any,
) -> TopkLogprobs:
    """The call on logits of which this device has all columns."""
    width = logits.shape[1]
    logits = shard.masked(logits)
    if shard.size(width) < width:
        *others, changes = rest
        rest = (*others, parts.mine(changes, shard, width))
    if token_ids is None:
        return runner.greedy_topk(logits, wanted, *rest)
    return runner.topk(logits, token_ids, wanted, row_ids, *rest)

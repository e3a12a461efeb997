"""A row's sum, and so its logprobs: the one definition, for every call, batch and mesh.

With m the row's maximum and T its temperature, the weight of a group is its own sum, that of
exp((x - maximum of the group) / T) in the order of `xla/group_sums.py`, times exp((maximum of the
group - m) / T). The row's sum is that of the weights of its groups as integers, to whose last digit
each was rounded (`exact_sums`): neither the order of groups nor who holds them can change a bit of
it. A logprob of a logit x is (x - m) / T less the logarithm of that sum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.groups import GroupSums, bounded
from pallas_kernels.backends.xla.selection import top_k_of_parts
from pallas_kernels.contract.rows import Outputs, RowSums
from pallas_kernels.lowering.row_pieces import summed
from pallas_kernels.meshes.placement import WHOLE, VocabShard
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.quotient import quotient

LEAST = -200.0  # the exponential of this is 0 in float32


class PartSums(NamedTuple):
    """The sums of R rows after one read, or of a part of their columns."""

    groups: GroupSums  # [R, G], those of the part, at each row's temperature
    num_larger: Int32[Array, " R"]  # logits that the given token's rank counts
    top_ids: Int32[Array, "R K"]  # columns of the part; unspecified where the logit is -inf
    top_logits: Float32[Array, "R K"]  # descending, ties lowest id first


def no_part(num_targets: int, num_groups: int, outputs: Outputs) -> PartSums:
    """The sums of no column."""
    zeros = jnp.zeros((num_targets, num_groups), jnp.float32)
    groups = GroupSums(jnp.full_like(zeros, -jnp.inf), zeros, zeros if outputs.entropy else None)
    return PartSums(
        groups,
        jnp.zeros(num_targets, jnp.int32),
        jnp.zeros((num_targets, outputs.k), jnp.int32),
        jnp.full((num_targets, outputs.k), -jnp.inf, jnp.float32),
    )


def as_part(sums: RowSums, num_groups: int) -> PartSums:
    """Sums of a part as one group of it, beside groups without a token."""

    def first_of(x: jax.Array, missing: float) -> jax.Array:
        others = jnp.full((x.shape[0], num_groups - 1), missing, x.dtype)
        return jnp.concatenate([x[:, None], others], axis=1)

    empty = sums.sum_exp == 0  # -inf alone
    groups = GroupSums(
        first_of(jnp.where(empty, jnp.float32(-jnp.inf), sums.maximum), -jnp.inf),
        first_of(sums.sum_exp, 0),
        None if sums.weighted is None else first_of(sums.weighted, 0),
    )
    return PartSums(groups, sums.num_larger, sums.top_ids, sums.top_logits)


def scaled(x: jax.Array, largest: jax.Array, inverse: jax.Array) -> jax.Array:
    """(x - m) / T, at most 0; shapes broadcast."""
    # A minimum that changes nothing, but after which no compiler contracts product and sum.
    return jnp.minimum((x - largest) * inverse, jnp.float32(0))


def moved(weighted: jax.Array, apart: jax.Array, sums: jax.Array) -> jax.Array:
    """Minus the groups' sums of s exp(s), s relative to m; of those relative to their maxima.

    apart: `scaled` of the groups' maxima.
    """
    by_sum = jnp.maximum(apart, jnp.float32(LEAST)) * sums
    # As in `scaled`.
    return -(weighted + jnp.minimum(by_sum, jnp.float32(0)))


def row_mass(
    groups: GroupSums, largest: jax.Array, inverse: jax.Array, vocab_size: int
) -> exact_sums.Mass:
    """The rows' sums of exp((x - m) / T), from those of their groups; any split gives its bits."""
    weights = groups.sums * exponential(scaled(groups.maxima, largest[:, None], inverse[:, None]))
    return exact_sums.mass(weights, vocab_size)


def inverse_of(temperatures: jax.Array | None, num_targets: int) -> jax.Array:
    """1 / T [R] of usable temperatures, as groups take it; 1 without one, and where it is NaN."""
    if temperatures is None:
        return jnp.ones(num_targets, jnp.float32)
    inverse = bounded(quotient(jnp.ones_like(temperatures), temperatures))
    return jnp.where(jnp.isnan(temperatures), jnp.float32(1), inverse)


def _largest_of(groups: GroupSums) -> jax.Array:
    """m [R]; +inf where a group has a NaN or +inf, whose row has no answer."""
    spoiled = jnp.isnan(groups.maxima) | jnp.isnan(groups.sums)
    return jnp.where(spoiled, jnp.float32(jnp.inf), groups.maxima).max(axis=1)


def joined(
    part: PartSums,
    inverse: jax.Array,
    k: int,
    vocab_size: int,
    shard: VocabShard = WHOLE,
    width: int = 0,
) -> RowSums:
    """The sums of whole rows, of the parts of all shards: two small exchanges, none for one part.

    Args:
      part: this device's columns, K of them or as many as it has.
      inverse: of each row.
      k: static, the columns of the result.
      vocab_size: V.
      shard, width: the part's columns, `width` of them.
    """
    groups = part.groups
    largest = shard.across_maximum(_largest_of(groups))
    apart = scaled(groups.maxima, largest[:, None], inverse[:, None])
    factors = exponential(apart)
    digits = [*exact_sums.digits(groups.sums * factors, vocab_size)]
    number = len(digits)
    if groups.weighted is not None:
        by_exponent = moved(groups.weighted, apart, groups.sums) * factors
        # 0 or more, and at most V / e; a product of 0 and infinity is of a row without an answer.
        digits += exact_sums.digits(jnp.maximum(by_exponent, jnp.float32(0)), vocab_size)
    sums = summed(*digits)
    ids, logits, larger = part.top_ids, part.top_logits, part.num_larger
    if shard.axis_name is not None:
        ids = ids + shard.ids(width)[0]
        sums_of_shards, counts, ids, logits = shard.gathered_together((sums, larger, ids, logits))
        sums = tuple(x.sum(0, dtype=jnp.int32) for x in sums_of_shards)
        larger = counts.sum(0, dtype=jnp.int32)
        ids, logits = top_k_of_parts(ids, logits, k)
    weighted = None
    if groups.weighted is not None:
        weighted = -_to_float(sums[number:], vocab_size)
    return RowSums(largest, _to_float(sums[:number], vocab_size), larger, ids, logits, weighted)


def _to_float(sums: tuple[jax.Array, ...], vocab_size: int) -> jax.Array:
    return exact_sums.to_float(exact_sums.of_sums(tuple(sums), vocab_size), vocab_size)

"""What one read of the rows leaves for verification, and the raw logprobs that it gives as well."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends import answers
from pallas_kernels.backends import read as reads
from pallas_kernels.backends.greedy import greedy
from pallas_kernels.backends.groups import FEW as FEW_CANDIDATES
from pallas_kernels.backends.groups import MANY as MANY_CANDIDATES
from pallas_kernels.backends.groups import GroupSums, inverse_temperature
from pallas_kernels.contract.types import Greedy, Outputs, RowSums, TopkLogprobs
from pallas_kernels.meshes.vocab_shard import WHOLE
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.sampling import exact_sums
from pallas_kernels.sampling.parameters import Sampling, Truncation, truncates
from pallas_kernels.sampling.rows import GroupedRows


class RowRead(NamedTuple):
    """The rows' sums and candidates; the same on every vocabulary shard."""

    groups: GroupSums  # [N, G], at each row's temperature
    raw_sums: Float32[Array, "N _"]  # at temperature 1, where they were asked for
    top_ids: Int32[Array, "N _"]  # of the rows that are cut; -1 where there are no more
    top_logits: Float32[Array, "N _"]
    largest: Float32[Array, " N"]  # m
    inverse: Float32[Array, " N"]  # 1 / T
    total: exact_sums.Mass  # of exp((x - m) / T) over the row
    log_total: Float32[Array, " N"]
    valid: Bool[Array, " N"]

    def scaled(self, x: Float32[Array, "N C"]) -> Float32[Array, "N C"]:
        """(x - m) / T, at most 0."""
        return scaled(x, self.largest[:, None], self.inverse[:, None])

    def log_probs(self, x: Float32[Array, "N C"], cut: Truncation) -> Float32[Array, "N C"]:
        """log p of kept tokens with these logits."""
        return jnp.minimum(self.scaled(x) - (self.log_total + cut.log_kept)[:, None], 0.0)


def scaled(x: jax.Array, largest: jax.Array, inverse: jax.Array) -> jax.Array:
    """(x - m) / T, at most 0; shapes broadcast."""
    # A minimum that changes nothing, but after which no compiler contracts product and sum.
    return jnp.minimum((x - largest) * inverse, jnp.float32(0))


def read(rows: GroupedRows, sampling: Sampling, *, raw_k: int = -1) -> RowRead:
    """Read all rows once.

    Args:
      rows: of any requests.
      sampling: of each row [N].
      raw_k: static; raw logprobs with so many top columns are wanted of the rows. -1: none.
    """
    inverse = inverse_temperature(sampling.temperature)
    count = num_candidates(sampling, rows.vocab_size)
    needed = jnp.where((sampling.temperature > 0) & truncates(sampling), count, 0)
    groups, raw_sums, top_ids, top_logits = rows.read(inverse, needed, raw_k)
    if raw_k > 0:
        largest = top_logits[:, 0]
    else:
        largest = jnp.where(jnp.isnan(groups.maxima), -jnp.inf, groups.maxima).max(axis=1)
    total = mass(groups, largest, inverse, rows.vocab_size)
    return RowRead(
        groups=groups,
        raw_sums=raw_sums,
        top_ids=top_ids,
        top_logits=top_logits,
        largest=largest,
        inverse=inverse,
        total=total,
        log_total=logarithm(exact_sums.to_float(total, rows.vocab_size)),
        valid=jnp.isfinite(largest) & ~jnp.isnan(groups.sums).any(axis=1),
    )


def num_candidates(sampling: Sampling, vocab_size: int) -> Int32[Array, " N"]:
    """How many candidates the read of a row that is cut gives.

    As many as top-k. Of top-p most rows keep no more than many tokens, and of min-p few;
    `distribution.cuts` reads more of the others.
    """
    by_k = (sampling.top_k > 0) & (sampling.top_k <= MANY_CANDIDATES)
    others = jnp.where(sampling.top_p < 1, MANY_CANDIDATES, FEW_CANDIDATES)
    if vocab_size <= MANY_CANDIDATES:
        others = jnp.full_like(sampling.top_k, vocab_size)
    return jnp.minimum(jnp.where(by_k, sampling.top_k, others), vocab_size)


def mass(
    groups: GroupSums, largest: jax.Array, inverse: jax.Array, vocab_size: int
) -> exact_sums.Mass:
    """The rows' sums of exp((x - m) / T), from those of their groups; any split gives its bits."""
    weights = groups.sums * exponential(scaled(groups.maxima, largest[:, None], inverse[:, None]))
    return exact_sums.total(weights, vocab_size)


def greedy_ids(rows: GroupedRows, found: RowRead, *, raw_k: int = -1) -> Int32[Array, " N"]:
    """This device's part of each valid row's greedy token: 0 where another device has it.

    raw_k: as for the `read`.
    """
    if raw_k > 0:
        return found.top_ids[:, 0]
    group = jnp.argmax(found.groups.maxima, axis=1).astype(jnp.int32)  # the first of equal ones
    x, ids = rows.tokens(jnp.arange(len(group), dtype=jnp.int32), group)
    first = jnp.min(jnp.where(x == found.largest[:, None], ids, rows.vocab_size), axis=1)
    return jnp.where(rows.has(group), first, 0)


def with_invalid(
    rows: GroupedRows, found: RowRead, token_ids: Int32[Array, " N"]
) -> Int32[Array, " N"]:
    """Greedy tokens [N], those of invalid rows put right: they are seldom, and take a read."""

    def again() -> jax.Array:
        shard = rows.shard
        with jax.named_scope("invalid_rows"):
            choice: Greedy = greedy(
                rows.logits, axis_name=shard.axis_name, vocab_size=shard.vocab_size
            )
        return choice.token_ids

    chosen: jax.Array = lax.cond(jnp.all(found.valid), lambda: token_ids, again)
    return chosen


def logprobs_of_read(
    logits: Float[Array, "N V"],
    token_ids: Int32[Array, " N"],
    top_ids: Int32[Array, "N K"],
    top_logits: Float32[Array, "N K"],
    maximum: Float32[Array, " N"],
    sum_exp: Float32[Array, " N"],
    maxima: Float32[Array, "N G"],
) -> TopkLogprobs:
    """`topk_logprobs(logits, token_ids, K)` from what a read has left.

    A token that is among the row's top K has its rank from them; for the others, and for those
    alone, the row's larger logits are counted.

    Args:
      logits: the rows, whole.
      token_ids: one of each row; -1 where none is wanted.
      top_ids, top_logits: the row's top K.
      maximum: m.
      sum_exp: of exp(x - m); NaN where the row is invalid.
      maxima: of the rows' groups.
    """
    index = jnp.arange(len(token_ids), dtype=jnp.int32)
    x = WHOLE.named_logits(logits, index, token_ids[:, None])
    larger = (top_logits > x).sum(axis=1, dtype=jnp.int32)
    wanted = (token_ids >= 0) & ~jnp.isnan(sum_exp)
    k = top_ids.shape[1]
    uncounted = wanted & ((larger == k) if k else True)
    some = jnp.where(uncounted, token_ids, -1)
    counted = reads.num_larger(logits, maxima, some)
    larger = jnp.where(uncounted, counted, larger)
    everything = jnp.ones(len(token_ids), bool)
    sums = RowSums(maximum, sum_exp, larger, top_ids, top_logits)
    return answers.answers(Outputs(k), logits.shape[1], sums, token_ids, x, everything, None)

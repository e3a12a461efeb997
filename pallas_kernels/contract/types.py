"""What the calls take and return, and what one read of a row leaves.

Shapes are jaxtyping annotations, one letter an axis: N rows of logits, R target rows, K1 = K + 1
columns for K top logits, C extra ids, V vocabulary. The tests check them at run time. A letter
alone is written with a leading space, so that linters do not take it for the name of a type.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import register_namedtuple_serialization
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.contract.changes import Changes

AnyArray = jax.Array | np.ndarray  # what the functions of the door take
# Their arguments by name: signatures print these, and not what they stand for.
Logits = Float[AnyArray, "N V"]
RowIds = Int32[AnyArray, " R"]
RowFloats = Float32[AnyArray, " R"]
IdTable = Int32[AnyArray, "R C"]
RowCount = Int32[AnyArray, ""] | np.int32 | int
BitMask = UInt32[AnyArray, "R W"] | Int32[AnyArray, "R W"]
BiasIds = Int32[AnyArray, "R D"]
Biases = Float32[AnyArray, "R D"]


class TopkLogprobs(NamedTuple):
    """Logprobs of R target rows, with K top columns and C extra ids.

    The last three are None where they were not asked for, and NaN for rows without an answer.

    Attributes:
      token_ids: column 0 is the given token, columns 1 to K are the largest logits in descending
        order, equal logits by id, lowest first; -1 where there is no such token.
      logprobs: natural logarithms, of the tokens in `token_ids`.
      token_ranks: 1 + the number of tokens with a strictly larger logit than the given token's; 0
        where there is no answer.
      extra_logprobs: of `extra_token_ids`; C = 0 where none were named.
      log_sum_exp: log(sum(exp(x / T))), with T = 1 without temperatures.
      entropy: -sum(p log p) of p = softmax(x / T), in nats.
      top_logits: the logits of columns 1 to K, before the temperature; -inf where the id is -1.
    """

    token_ids: Int32[Array, "R K1"]
    logprobs: Float32[Array, "R K1"]
    token_ranks: Int32[Array, " R"]
    extra_logprobs: Float32[Array, "R C"]
    log_sum_exp: Float32[Array, " R"] | None = None
    entropy: Float32[Array, " R"] | None = None
    top_logits: Float32[Array, "R K"] | None = None


class Greedy(NamedTuple):
    """The greedy choice of N rows.

    token_ids: the lowest id among the row's largest non-NaN logits; 0 if all are NaN.
    valid: false where the row has a NaN, a +inf or no finite logit.
    """

    token_ids: Int32[Array, " N"]
    valid: Bool[Array, " N"]


# An exported program names the types of its results.
for _type in (TopkLogprobs, Greedy):
    register_namedtuple_serialization(_type, serialized_name=f"pallas_kernels.{_type.__name__}")

RankTies = Literal["strict", "inclusive"]


class Outputs(NamedTuple):
    """The static part of a call: it decides the program, and the shapes that come out of it."""

    k: int
    log_sum_exp: bool = False
    entropy: bool = False
    top_logits: bool = False
    inclusive: bool = False  # ranks count equal logits too


class Rows(NamedTuple):
    """The arrays of a call, checked: R target rows of logits [N, V], or of a part of their columns.

    token_ids: without them, each row's greedy choice.
    changes: of the R rows.
    """

    logits: Float[Array, "N V"]
    token_ids: Int32[Array, " R"] | None = None
    row_ids: Int32[Array, " R"] | None = None
    num_rows: Int32[Array, ""] | None = None
    temperatures: Float32[Array, " R"] | None = None
    extra_token_ids: Int32[Array, "R C"] | None = None
    changes: Changes | None = None

    @property
    def num_targets(self) -> int:
        """R."""
        first = next(x for x in (self.token_ids, self.row_ids, self.logits) if x is not None)
        return first.shape[0]

    @property
    def extra_ids(self) -> jax.Array:
        """The extra ids [R, C]; C = 0 where none were named."""
        if self.extra_token_ids is None:
            return jnp.zeros((self.num_targets, 0), jnp.int32)
        return self.extra_token_ids

    @property
    def places(self) -> jax.Array:
        """The row of the logits [R] that each target row reads, clamped to those that there are."""
        if self.row_ids is None:
            return jnp.arange(self.num_targets, dtype=jnp.int32)
        return jnp.clip(self.row_ids, 0, self.logits.shape[0] - 1)


class RowSums(NamedTuple):
    """What one read of R rows, or of a part of their columns, leaves of them.

    maximum: [R] float32; unspecified where the row has a NaN: not every backend's maximum keeps it.
    sum_exp: [R] float32, sum of exp((x - maximum) / temperature); NaN where the row has a NaN, 0
        or NaN where it has -inf alone.
    num_larger: [R] int32, the number of logits strictly larger than the given token's; with
        inclusive ranks, those equal to it count too.
    top_ids: [R, K] int32, columns of this part; unspecified where the logit is -inf.
    top_logits: [R, K] float32, descending, ties lowest id first.
    weighted: [R] float32, sum of s exp(s), s = (x - maximum) / temperature; None without entropy.
    """

    maximum: jax.Array
    sum_exp: jax.Array
    num_larger: jax.Array
    top_ids: jax.Array
    top_logits: jax.Array
    weighted: jax.Array | None = None


def no_sums(num_targets: int, outputs: Outputs) -> RowSums:
    """The sums of no column."""
    zeros = jnp.zeros(num_targets, jnp.float32)
    return RowSums(
        maximum=jnp.full(num_targets, -jnp.inf, jnp.float32),
        sum_exp=zeros,
        num_larger=jnp.zeros(num_targets, jnp.int32),
        top_ids=jnp.zeros((num_targets, outputs.k), jnp.int32),
        top_logits=jnp.full((num_targets, outputs.k), -jnp.inf, jnp.float32),
        weighted=zeros if outputs.entropy else None,
    )


def is_inclusive(rank_ties: str) -> bool:
    """Whether ranks count equal logits too.

    Raises:
      ValueError: there is no such way to count.
    """
    if rank_ties not in get_args(RankTies):
        raise ValueError(
            f"rank_ties = {rank_ties!r} is not known; choose one of "
            f"{', '.join(map(repr, get_args(RankTies)))}"
        )
    return rank_ties == "inclusive"


def skipped_rows(num_targets: int, outputs: Outputs, num_extra: int) -> TopkLogprobs:
    """The results of rows that were not worked on."""

    def nan(*shape: int) -> jax.Array:
        return jnp.full((num_targets, *shape), jnp.nan, jnp.float32)

    return TopkLogprobs(
        token_ids=jnp.full((num_targets, outputs.k + 1), -1, jnp.int32),
        logprobs=nan(outputs.k + 1),
        token_ranks=jnp.zeros(num_targets, jnp.int32),
        extra_logprobs=nan(num_extra),
        log_sum_exp=nan() if outputs.log_sum_exp else None,
        entropy=nan() if outputs.entropy else None,
        top_logits=nan(outputs.k) if outputs.top_logits else None,
    )


def skipped_like(found: TopkLogprobs) -> TopkLogprobs:
    """The results of as many rows that were not worked on, for what was wanted of these."""

    def nan(x: jax.Array) -> jax.Array:
        return jnp.full(x.shape, jnp.nan, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    nothing: TopkLogprobs = jax.tree.map(nan, found)
    return nothing._replace(
        token_ids=jnp.full(found.token_ids.shape, -1, jnp.int32),
        token_ranks=jnp.zeros(found.token_ranks.shape, jnp.int32),
    )

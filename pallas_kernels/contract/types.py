"""Types of the calls' arguments and results, and of what one read of a row leaves.

Shapes are jaxtyping annotations, one letter an axis: N rows of logits, R target rows, K1 = K + 1
columns for K top logits, C extra ids, V vocabulary. The tests check them at run time. A letter
alone is written with a leading space, so that linters do not take it for the name of a type.
"""

from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.export import register_namedtuple_serialization
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.contract.field_docs import with_field_docs

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


@with_field_docs
class TopkLogprobs(NamedTuple):
    """Logprobs of R target rows, with K top columns and C extra ids.

    The last four are None where they were not asked for; of rows without an answer the first three
    of them are NaN.

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
      digests: `row_digests` of the rows as they were given: of invalid ones too, 0 of skipped ones.
    """

    token_ids: Int32[Array, "R K1"]
    logprobs: Float32[Array, "R K1"]
    token_ranks: Int32[Array, " R"]
    extra_logprobs: Float32[Array, "R C"]
    log_sum_exp: Float32[Array, " R"] | None = None
    entropy: Float32[Array, " R"] | None = None
    top_logits: Float32[Array, "R K"] | None = None
    digests: UInt32[Array, "R 2"] | None = None


@with_field_docs
class Greedy(NamedTuple):
    """The greedy choice of N rows.

    Attributes:
      token_ids: the lowest id among the row's largest non-NaN logits; 0 if all are NaN.
      valid: false where the row has a NaN, a +inf or no finite logit.
    """

    token_ids: Int32[Array, " N"]
    valid: Bool[Array, " N"]


# An exported program names the types of its results.
for _type in (TopkLogprobs, Greedy):
    register_namedtuple_serialization(_type, serialized_name=f"pallas_kernels.{_type.__name__}")

RankTies = Literal["strict", "inclusive"]

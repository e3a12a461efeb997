"""Results in the arrays that serving engines hold: one padded table a batch, a K for each row.

vLLM and tpu-inference call the three arrays `LogprobsTensors`; sglang-jax holds the same tables
under other names. Each request reads its own leading columns on the host.
"""

from __future__ import annotations  # signatures print as they stand here

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import register_namedtuple_serialization
from jaxtyping import Float32, Int32
from numpy.typing import NDArray

from pallas_kernels.contract.arguments import in_32_bits
from pallas_kernels.contract.field_docs import with_field_docs
from pallas_kernels.contract.rows import check_ids
from pallas_kernels.contract.types import Logits, RowIds
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.topk.call import topk_logprobs


@with_field_docs
class LogprobsTensors(NamedTuple):
    """Logprobs of R rows, with the names that vLLM gives them.

    Attributes:
      logprob_token_ids: K + 1 columns: the given token, then the top K.
      logprobs: of these.
      selected_token_ranks: of the given token; 1 is the most likely one.
    """

    logprob_token_ids: Int32[jax.Array, "R K1"]
    logprobs: Float32[jax.Array, "R K1"]
    selected_token_ranks: Int32[jax.Array, " R"]


register_namedtuple_serialization(LogprobsTensors, serialized_name="pallas_kernels.LogprobsTensors")


def logprobs_tensors(
    logits: Logits, token_ids: RowIds, k: int, top_k_nums: RowIds | None = None, **options: Any
) -> LogprobsTensors:
    """`topk_logprobs` as one table of K + 1 columns, of which each row fills its own number.

    Args:
      logits: [N, V], as `topk_logprobs` takes them. Logprobs of the whole vocabulary will do too:
        they are their own log_softmax.
      token_ids: [R] int32, the sampled or given tokens.
      k: K, the most that any row wants, a Python int.
      top_k_nums: [R] int32, how many of the K each row wants; None: all of them. Of a JAX array
        more than K are K, and fewer than none are none: nobody waits to look at it.
      options: further arguments of `topk_logprobs`, except `extra_token_ids`.

    Returns:
      `LogprobsTensors(logprob_token_ids [R, K + 1] int32, logprobs [R, K + 1] float32,
      selected_token_ranks [R] int32)`: the given token, then the top K. A column after
      a row's own number holds id -1 and logprob -inf. Token ranks are 1 + the number of larger
      logits; vLLM's own count tied tokens too, as `rank_ties="inclusive"` does.

    Raises:
      TypeError, ValueError, NotImplementedError: as `topk_logprobs`; ValueError too where a NumPy
        array asks for fewer than 0 or more than K.
    """
    results = topk_logprobs(logits, token_ids, k, **options)
    ids, logprobs = results.token_ids, results.logprobs
    if top_k_nums is not None:
        num_columns = check_ids("top_k_nums", top_k_nums, (ids.shape[0],))
        if isinstance(top_k_nums, np.ndarray):
            for number in (top_k_nums.min(initial=0), top_k_nums.max(initial=0)):
                if not 0 <= number <= k:
                    raise ValueError(f"top_k_nums has {number}: give numbers from 0 to k = {k}")
        ids, logprobs = compiled(_first_columns)(ids, logprobs, num_columns)
    return LogprobsTensors(ids, logprobs, results.token_ranks)


def _first_columns(
    ids: jax.Array, logprobs: jax.Array, num_columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The given token and so many columns behind it of each row; no tokens in the others."""
    padding = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] > num_columns[:, None]
    return jnp.where(padding, jnp.int32(-1), ids), jnp.where(padding, -jnp.inf, logprobs)


def padded_token_ids(
    token_ids: Sequence[Sequence[int] | None], width: int | None = None
) -> NDArray[np.int32]:
    """Lists of token ids as a table [R, C] for `extra_token_ids`, padded with -1.

    Args:
      token_ids: the ids that each row wants; None wants none. Row r's logprobs are then the first
        len(token_ids[r]) columns of `extra_logprobs`.
      width: C, at least that of the longest list; None: its length. A few fixed widths keep a
        program from being compiled for every batch.

    Raises:
      TypeError: what is listed is no integer.
      ValueError: a list is longer than `width`, or an id is no number of int32.
    """
    lists = [() if ids is None else ids for ids in token_ids]
    longest = max(map(len, lists), default=0)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a row names {longest} token ids; the table has {width} columns")
    table = np.full((len(lists), width), -1, np.int32)
    for row, ids in zip(table, lists, strict=True):
        numbers = np.asarray(ids)
        if len(ids) and numbers.dtype.kind not in "iu":
            raise TypeError(f"token_ids has {ids!r}: give lists of integers, or None")
        row[: len(ids)] = in_32_bits("token_ids", numbers)
    return table

"""Logprobs of the rows of a batch whose requests differ in mode, K and chosen token ids.

One kernel call serves them all: raw rows run it at temperature 1, the others at their own. What a
batch asks for at most is static (`Widths`), so a batch of raw logprobs runs no more than that.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ipc import wire
from ipc.wire import LogprobsMode
from jax_specdec.pack import Rows
from jax_specdec.sampling import Sampling
from pallas_kernels import TopkLogprobs, topk_logprobs

CHOSEN_BUCKETS = (0, 8, 32, wire.MAX_CHOSEN)  # widths of the table of chosen token ids


class Widths(NamedTuple):
    """The most that the slots of a batch ask for; a program is compiled for each."""

    k: int | None = None  # the static K, at least every slot's; None: nobody asks for logprobs
    chosen: int = 0  # C: columns of the table of chosen token ids
    mode: LogprobsMode = LogprobsMode.RAW  # the costliest of the slots' modes

    @property
    def columns(self) -> int:
        return 0 if self.k is None else self.k + 1


class Asked(NamedTuple):
    """What the host knows of each slot when a step is launched. Axes: B slots, C chosen ids."""

    generation: jax.Array  # [B] uint32
    verdict: jax.Array  # [B] int32: PREEMPTED or RECOVERY_STOP where it was evicted, else 0
    columns: jax.Array  # [B] int32: 0 for no logprobs, K + 1 otherwise
    mode: jax.Array  # [B] int32 LogprobsMode
    num_chosen: jax.Array  # [B] int32
    chosen_ids: jax.Array  # [B, C] int32; anything from num_chosen on
    draft_logprobs: jax.Array  # [B] bool
    sampling: Sampling


def row_logprobs(
    logits: jax.Array, token_ids: jax.Array, rows: Rows, asked: Asked, widths: Widths
) -> TopkLogprobs:
    """The logprobs of `rows`, each in the mode of its slot's request.

    Raw: log_softmax of the logits. Scaled: of the logits divided by the temperature (1 for greedy
    requests). Token ranks and order are those of the logits in every mode, and invalid rows as
    `topk_logprobs` says.

    Args:
      logits: [B, S, V] float.
      token_ids: [B, S] int32.
      rows: R = B * S, as `select_rows` makes them; rows from `rows.num` on enter no kernel.
      asked: by slot. Columns beyond what a slot asked for are computed too: `pack` leaves them out.
      widths: static; k must not be None.

    Returns:
      `TopkLogprobs` of R rows with K = widths.k and C = widths.chosen.
    """
    assert widths.k is not None, "rows without columns have no logprobs"
    batch, num_positions, vocab = logits.shape
    slot = jnp.minimum(rows.flat // num_positions, batch - 1)
    temperatures = None
    if widths.mode is not LogprobsMode.RAW:
        is_raw = asked.mode == LogprobsMode.RAW
        temperatures = jnp.where(is_raw, 1.0, asked.sampling.temperature)[slot]
    flat_logits = logits.reshape(-1, vocab)
    return topk_logprobs(
        flat_logits,
        token_ids.reshape(-1).at[rows.flat].get(mode="fill", fill_value=-1),
        widths.k,
        row_ids=rows.flat,
        num_rows=rows.num,
        temperatures=temperatures,
        extra_token_ids=asked.chosen_ids[slot] if widths.chosen else None,
    )


def chosen_bucket(count: int) -> int:
    """The smallest width of at least `count` chosen token ids."""
    for width in CHOSEN_BUCKETS:
        if count <= width:
            return width
    raise wire.WireError(f"{count} chosen token ids are over the limit {wire.MAX_CHOSEN}")

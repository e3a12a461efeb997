"""Logprobs of the rows of a batch whose requests differ in mode, K and chosen token ids.

One kernel call serves them all: raw rows run it at temperature 1, the others at their own. What a
batch asks for at most is static (`Widths`), so a batch of raw logprobs runs no more than that.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ipc import wire
from ipc.wire import LogprobsMode
from jax_specdec.pack import Rows
from jax_specdec.sampling import Sampling, Truncation, truncation
from jax_specdec.sharding import ONE_DEVICE, Parallel
from pallas_kernels import TopkLogprobs, topk_logprobs
from pallas_kernels.sharded import named_logits

CHOSEN_BUCKETS = (0, 16, wire.MAX_CHOSEN)  # widths of the table of chosen token ids


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
    logits: jax.Array,
    token_ids: jax.Array,
    rows: Rows,
    asked: Asked,
    widths: Widths,
    parallel: Parallel = ONE_DEVICE,
    *,
    cut: Truncation | None = None,
) -> TopkLogprobs:
    """The logprobs of `rows`, each in the mode of its slot's request.

    Raw: log_softmax of the logits. Scaled: of the logits divided by the temperature (1 for greedy
    requests). Processed: of the distribution after temperature, top-k, top-p and min-p; excluded
    tokens have -inf, and the top columns that they leave hold id -1. Token ranks and order are
    those of the logits in every mode, and invalid rows as `topk_logprobs` says.

    Args:
      logits: [B, S, V] float.
      token_ids: [B, S] int32.
      rows: R = B * S, as `select_rows` makes them; rows from `rows.num` on enter no kernel.
      asked: by slot. Columns beyond what a slot asked for are computed too: `pack` leaves them out.
      widths: static; k must not be None.
      parallel: the devices among which the logits' vocabulary is split.
      cut: [B, S], the truncation of the logits by `asked.sampling`, where the tokens were sampled
        and it is known already; without it, processed rows make a search of their own.

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
    found = topk_logprobs(
        flat_logits,
        token_ids.reshape(-1).at[rows.flat].get(mode="fill", fill_value=-1),
        widths.k,
        row_ids=rows.flat,
        num_rows=rows.num,
        temperatures=temperatures,
        extra_token_ids=asked.chosen_ids[slot] if widths.chosen else None,
        mesh=parallel.mesh,
        axis_name=parallel.axis_name,
    )
    if widths.mode is not LogprobsMode.PROCESSED:
        return found
    if cut is None:
        cut = _cut(logits, asked, parallel)
    return _processed(logits, rows, slot, asked, found, cut, parallel)


def _cut(logits: jax.Array, asked: Asked, parallel: Parallel) -> Truncation:
    """The truncation of the slots in processed mode; of the others, what costs nothing."""
    in_mode = asked.mode == LogprobsMode.PROCESSED
    none = Sampling.greedy(len(in_mode))
    return parallel.over_vocabulary(
        lambda shard, logits, sampling: truncation(logits, sampling, shard=shard),
        logits,
        jax.tree.map(lambda own, other: lax.select(in_mode, own, other), asked.sampling, none),
    )


def _processed(
    logits: jax.Array,
    rows: Rows,
    slot: jax.Array,
    asked: Asked,
    found: TopkLogprobs,
    cut: Truncation,
    parallel: Parallel,
) -> TopkLogprobs:
    """Scaled logprobs, renormalized over what the slot's sampling keeps where it asked for that."""
    cut = jax.tree.map(lambda x: x.reshape(-1).at[rows.flat].get(mode="fill", fill_value=0), cut)
    is_processed = (asked.mode == LogprobsMode.PROCESSED)[slot][:, None]
    is_greedy = asked.sampling.temperature[slot][:, None] == 0
    flat_logits = logits.reshape(-1, logits.shape[-1])

    def renormalized(ids: jax.Array, logprobs: jax.Array) -> jax.Array:
        x = parallel.over_vocabulary(
            lambda shard, logits, whole: named_logits(logits, whole[0], whole[1], shard),
            flat_logits,
            (rows.flat, ids),
        )
        # log_kept is rounded by itself: without the minimum, a probability might exceed 1.
        kept = jnp.minimum(logprobs - cut.log_kept[:, None], 0.0)
        kept = jnp.where(is_greedy, 0.0, kept)
        processed = jnp.where(cut.keeps(x, ids), kept, -jnp.inf)
        # NaN says that the row is invalid or the token unknown: that stays.
        return jnp.where(is_processed & ~jnp.isnan(logprobs), processed, logprobs)

    logprobs = renormalized(found.token_ids, found.logprobs)
    is_top = jnp.arange(found.token_ids.shape[1], dtype=jnp.int32)[None, :] > 0
    excluded = is_processed & is_top & (logprobs == -jnp.inf)
    extra_logprobs = found.extra_logprobs
    if extra_logprobs.shape[1]:
        extra_logprobs = renormalized(asked.chosen_ids[slot], extra_logprobs)
    return TopkLogprobs(
        jnp.where(excluded, -1, found.token_ids), logprobs, found.token_ranks, extra_logprobs
    )


def chosen_bucket(count: int) -> int:
    """The smallest width of at least `count` chosen token ids."""
    for width in CHOSEN_BUCKETS:
        if count <= width:
            return width
    raise wire.WireError(f"{count} chosen token ids are over the limit {wire.MAX_CHOSEN}")

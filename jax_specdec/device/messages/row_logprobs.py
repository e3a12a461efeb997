"""Logprobs of the rows of a batch whose requests differ in mode, K and chosen token ids.

One kernel call serves them all: raw rows run it at temperature 1, the others at their own. What a
batch asks for at most is static (`Widths`), so a batch of raw logprobs runs no more than that.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipc import wire
from ipc.wire import LogprobsMode
from jax_specdec.device.messages.pack import Rows, k_bucket
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.device.sampling.distribution import Sampling, Truncation, truncation
from jax_specdec.requests import SamplingParams
from jax_specdec.wording import counted
from pallas_kernels import TopkLogprobs, named_logits, topk_logprobs

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


def widths_of(params: Sequence[SamplingParams], vocab_size: int) -> Widths:
    """The static limits of what the requests of a batch ask for."""
    asked = [one for one in params if one.num_columns]
    if not asked:
        return Widths()
    return Widths(
        k=k_bucket(max(one.num_columns for one in asked) - 1, vocab_size),
        chosen=chosen_bucket(max(len(one.extra_token_ids) for one in asked)),
        mode=LogprobsMode(max(one.logprobs_mode for one in asked)),
    )


def asked_of(
    params: Sequence[SamplingParams],
    widths: Widths,
    *,
    generation: int | Sequence[int] = 1,
    verdict: int | Sequence[int] = 0,
) -> Asked:
    """What the requests of a batch ask for, on the device: request b is in slot b.

    Args:
      params: of B requests.
      widths: `widths_of` them.
      generation: of each slot, or of all; it changes whenever a slot gets another request.
      verdict: of each slot, or of all; see `Asked`.

    Raises:
      ValueError: not as many generations or verdicts as requests.
    """
    chosen_ids = np.zeros((len(params), widths.chosen), np.int32)
    for row, one in zip(chosen_ids, params, strict=True):
        row[: len(one.extra_token_ids)] = one.extra_token_ids
    return Asked(
        generation=_each("generations", generation, len(params), np.uint32),
        verdict=_each("verdicts", verdict, len(params), np.int32),
        columns=_array([one.num_columns for one in params], np.int32),
        mode=_array([one.logprobs_mode for one in params], np.int32),
        num_chosen=_array([len(one.extra_token_ids) for one in params], np.int32),
        chosen_ids=jnp.asarray(chosen_ids),
        draft_logprobs=_array([one.draft_logprobs for one in params], np.bool_),
        sampling=sampling_of(lambda name: [getattr(one, name) for one in params]),
    )


def sampling_of(values: Callable[[str], object]) -> Sampling:
    """Of what `values` has for each of its names: scalars, or lists [B] of them."""
    return Sampling(
        temperature=_array(values("temperature"), np.float32),
        top_k=_array(values("top_k"), np.int32),
        top_p=_array(values("top_p"), np.float32),
        min_p=_array(values("min_p"), np.float32),
        seed=_array(values("seed"), np.uint32),
    )


def _each(what: str, value: int | Sequence[int], count: int, dtype: type[np.generic]) -> jax.Array:
    values = [value] * count if isinstance(value, int) else list(value)
    if len(values) != count:
        raise ValueError(
            f"{len(values)} {what} for {counted(count, 'request')}: one for each, or one for all"
        )
    return _array(values, dtype)


def _array(values: object, dtype: type[np.generic]) -> jax.Array:
    return jnp.asarray(np.array(values, dtype))


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

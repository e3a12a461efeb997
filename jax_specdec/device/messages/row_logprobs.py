"""Logprobs of the rows of a batch whose requests differ in mode, K and chosen token ids.

One call serves them all: raw rows run it at temperature 1, the others at their own. It takes what
verification has read of the rows, or reads those that are wanted. What a batch asks for at most is
static (`Widths`), so a batch of raw logprobs runs no more than that.

Logits are [B, S, V], or flat rows [N, V] with the row of each slot and position: no row is copied.

Axes: B slots, S positions, V vocabulary, R = B * S rows, N flat rows, K1 = K + 1 columns, C chosen
token ids.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from ipc.field_docs import with_field_docs
from ipc.wire import LogprobsMode
from jax_specdec.device.messages.arguments import check_array, check_option_type, check_step_logits
from jax_specdec.device.messages.batch_options import BatchOptions, Widths, check_batch_options
from jax_specdec.device.messages.logit_changes import RowChanges
from jax_specdec.device.messages.pack import SentRows, select_rows
from jax_specdec.device.messages.row_values import value_names, with_processed_values
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.requests import DIGEST_BITS
from pallas_kernels import TopkLogprobs, row_digests, topk_logprobs
from pallas_kernels.sampling import (
    CompactQ,
    Drafts,
    RowsRead,
    Sampling,
    Truncation,
    logprobs_of_read,
    truncation,
)


@with_field_docs
class DraftReport(NamedTuple):
    """A draft message's logprobs: the fields of a `TopkLogprobs`, by slot and draft.

    Attributes:
      token_ids: the draft, then the top K of the logits that it was drawn from.
      logprobs: of these.
      token_ranks: of the draft; 1 is the most likely token.
      extra_logprobs: of the ids that the slot's request named.
    """

    token_ids: Int32[Array, "B D K1"]
    logprobs: Float32[Array, "B D K1"]
    token_ranks: Int32[Array, "B D"]
    extra_logprobs: Float32[Array, "B D C"]


def row_logprobs(
    logits: Float[Array, "B S V"] | Float[Array, "N V"],
    token_ids: Int32[Array, "B S"],
    rows: SentRows,
    options: BatchOptions,
    widths: Widths,
    parallel: Parallel = ONE_DEVICE,
    *,
    row_ids: Int32[Array, "B S"] | None = None,
    cut: Truncation | None = None,
    read: RowsRead | None = None,
    changed_read: RowsRead | None = None,
    changes: RowChanges | None = None,
    extra_token_ids: Int32[Array, "R C"] | None = None,
    model_logits: Float[Array, "B S V"] | Float[Array, "N V"] | None = None,
) -> TopkLogprobs:
    """The logprobs of `rows`, each in the mode of its slot's request.

    Raw: log_softmax of the logits. Scaled: of the logits divided by the temperature (1 for greedy
    requests). Processed: of the distribution after temperature, top-k, top-p and min-p; excluded
    tokens have -inf, and the top columns that they leave hold id -1. Token ranks and order are
    those of the logits in every mode, and invalid rows as `topk_logprobs` says.

    Args:
      logits: of every position, or flat.
      token_ids: the token of every position, whose logprob goes into column 0.
      rows: as `select_rows` makes them; rows from `rows.num` on enter no kernel.
      options: by slot. Columns beyond what a slot asked for are computed too: `pack` leaves them
        out.
      widths: static; k must not be None.
      parallel: the devices among which the logits' vocabulary is split.
      row_ids: of flat logits, as `verify` had them.
      cut: [B, S], the truncation of the logits by `options.sampling`, where the tokens were sampled
        and it is known already; without it, processed rows make a search of their own.
      read: what `verify` has read of the logits with `k = widths.k`; without it, and for values of
        rows, which need other sums, the rows are read here.
      changed_read: the same of the changed logits, if there are `changes`.
      changes: of each row's logits, by which the tokens were chosen; processed logprobs are of the
        changed ones, the others of the logits themselves. They need `cut`.
      extra_token_ids: of each row, in place of `options.chosen_ids`; not where there is a `read`.
      model_logits: the model's, where `logits` are changed ones of some rows: digests are of these.

    Returns:
      K = widths.k top columns and C = widths.chosen further logprobs of each row, and the values of
      a row that `widths` names.
    """
    check_array("token_ids", token_ids, "integers", ("B", "S"), "one a position [B, S]")
    batch, num_positions = token_ids.shape
    check_step_logits(logits, row_ids, (batch, num_positions))
    check_option_type("rows", rows, SentRows, "`select_rows(num_rows, num_positions)`")
    check_batch_options(options, widths, batch)
    if widths.k is None:
        raise ValueError(
            "widths.k is None: no request asks for logprobs, so there are none to make"
        )
    check_array("rows.flat", rows.flat, "integers", (batch * num_positions,), "B * S places")
    slot = jnp.minimum(rows.flat // num_positions, batch - 1)
    flat_logits, place = flattened(logits, rows, row_ids)
    digests = None
    if widths.values & DIGEST_BITS:
        rows_of_model = flat_logits
        if model_logits is not None:
            check_step_logits(model_logits, row_ids, (batch, num_positions), "model_logits")
            rows_of_model = flattened(model_logits, rows, row_ids)[0]
        digests = row_digests(
            rows_of_model, row_ids=place, num_rows=rows.num, **parallel.vocabulary
        )
    values: dict[str, Any] = dict.fromkeys(value_names(widths.values), True)
    read = None if values else read
    chosen_ids = options.chosen_ids[slot] if extra_token_ids is None else extra_token_ids
    flat_changes, of_slots = None, {}
    if changes is not None and widths.mode is LogprobsMode.PROCESSED:
        assert cut is not None, "the cut of changed logits is what `verify` found"
        is_processed = options.mode == LogprobsMode.PROCESSED
        changes, read = _of_processed(
            changes, by_row(is_processed, logits, row_ids), read, changed_read
        )
        flat_changes = jax.tree.map(
            lambda x: x.reshape(-1, x.shape[-1]).at[place].get(mode="clip"), changes
        )
        of_slots = changes._asdict()
    is_raw = None if widths.mode is LogprobsMode.RAW else options.mode == LogprobsMode.RAW
    if read is not None:
        results = logprobs_of_read(
            logits,
            _wanted_ids(token_ids, rows),
            read,
            row_ids=row_ids,
            scaled=None if is_raw is None else ~is_raw,
            extra_token_ids=options.chosen_ids if widths.chosen else None,
            **parallel.columns,
            **of_slots,
        )
        results = picked(results, rows)
    else:
        temperatures = None
        if is_raw is not None:
            temperatures = jnp.where(is_raw, 1.0, options.sampling.temperature)[slot]
        results = topk_logprobs(
            flat_logits,
            token_ids.reshape(-1).at[rows.flat].get(mode="fill", fill_value=-1),
            widths.k,
            row_ids=place,
            num_rows=rows.num,
            temperatures=temperatures,
            extra_token_ids=chosen_ids if widths.chosen else None,
            mesh=parallel.mesh,
            axis_name=parallel.axis_name,
            **values,
            **{} if flat_changes is None else flat_changes._asdict(),
        )
    results = results._replace(digests=digests)
    if widths.mode is not LogprobsMode.PROCESSED:
        return results
    if cut is None:
        in_mode = options.mode == LogprobsMode.PROCESSED
        cut = cut_where(in_mode, logits, options.sampling, parallel, row_ids)
    processed = _processed(
        (flat_logits, place), flat_changes, rows, slot, options, chosen_ids, results, cut, parallel
    )
    if not values:
        return processed
    cut = jax.tree.map(lambda x: x.reshape(-1).at[rows.flat].get(mode="fill", fill_value=0), cut)
    placed = flat_logits, place, rows.num
    return with_processed_values(processed, placed, flat_changes, slot, options, cut, parallel)


def flattened(
    logits: jax.Array, rows: SentRows, row_ids: Int32[Array, "B S"] | None
) -> tuple[Float[Array, "N V"], Int32[Array, " R"]]:
    """The rows of all logits, and the place of each of `rows` among them; out of bounds: none."""
    flat = logits.reshape(-1, logits.shape[-1])
    if row_ids is None:
        return flat, rows.flat
    number = flat.shape[0]
    place = row_ids.reshape(-1).at[rows.flat].get(mode="fill", fill_value=number)
    return flat, jnp.where(place >= 0, place, number)


def by_row(
    of_slots: Bool[Array, " B"], logits: jax.Array, row_ids: Int32[Array, "B S"] | None
) -> jax.Array:
    """Which rows are of these slots: [B, S] of logits [B, S, V], [N] of flat ones."""
    if row_ids is None:
        return jnp.broadcast_to(of_slots[:, None], logits.shape[:2])
    number = logits.shape[0]
    place = jnp.where(row_ids >= 0, row_ids, number)
    slot_values = jnp.broadcast_to(of_slots[:, None], row_ids.shape)
    return jnp.zeros(number, bool).at[place].set(slot_values, mode="drop")


def _of_processed(
    changes: RowChanges,
    is_processed: Bool[Array, "*rows"],
    read: RowsRead | None,
    changed_read: RowsRead | None,
) -> tuple[RowChanges, RowsRead | None]:
    """The changes of rows that want processed logprobs, and their read; others have none."""

    def where(x: jax.Array, other: jax.Array) -> jax.Array:
        shape = (*is_processed.shape, *[1] * (x.ndim - is_processed.ndim))
        return jnp.where(is_processed.reshape(shape), x, other)

    no_change = jnp.int32(-1), jnp.int32(-1), jnp.float32(0)
    processed_changes = (
        None if x is None else where(x, no) for x, no in zip(changes, no_change, strict=True)
    )
    if read is not None:
        read = jax.tree.map(where, changed_read, read)
    return RowChanges(*processed_changes), read


def _wanted_ids(token_ids: Int32[Array, "B S"], rows: SentRows) -> Int32[Array, "B S"]:
    """The token ids of these rows, and -1 of all others."""
    is_wanted = jnp.zeros(token_ids.size, bool).at[rows.flat].set(True, mode="drop")
    return jnp.where(is_wanted.reshape(token_ids.shape), token_ids, -1)


def picked(results: TopkLogprobs, rows: SentRows) -> TopkLogprobs:
    """These rows of the logprobs of all rows; from `rows.num` on, as rows that are skipped."""

    def of(x: jax.Array, missing: float) -> jax.Array:
        return x.at[rows.flat].get(mode="fill", fill_value=missing)

    return TopkLogprobs(
        of(results.token_ids, -1),
        of(results.logprobs, jnp.nan),
        of(results.token_ranks, 0),
        of(results.extra_logprobs, jnp.nan),
    )


def cut_where(
    is_cut: Bool[Array, " B"],
    logits: Float[Array, "B S V"] | Float[Array, "N V"],
    sampling: Sampling,
    parallel: Parallel,
    row_ids: Int32[Array, "B S"] | None = None,
) -> Truncation:
    """The truncation [B, S] of the `is_cut` slots' rows; others are taken for greedy: no search."""
    none = Sampling.greedy(len(is_cut))
    cut_sampling = jax.tree.map(lambda x, other: lax.select(is_cut, x, other), sampling, none)
    if row_ids is not None:  # each row is a slot of its own
        number = logits.shape[0]
        place = jnp.where(row_ids >= 0, row_ids, number)
        cut_sampling = jax.tree.map(
            lambda x, other: (
                jnp.broadcast_to(other, (number,))
                .at[place]
                .set(jnp.broadcast_to(x[:, None], row_ids.shape), mode="drop")
            ),
            cut_sampling,
            Sampling.greedy(1),
        )
    cut = parallel.over_vocabulary(
        lambda shard, logits, sampling: truncation(logits, sampling, shard=shard),
        logits,
        cut_sampling,
    )
    if row_ids is None:
        return cut
    of_rows: Truncation = jax.tree.map(lambda x: x.at[row_ids].get(mode="clip"), cut)
    return of_rows


def _processed(
    placed: tuple[Float[Array, "N V"], Int32[Array, " R"]],
    changes: Annotated[RowChanges | None, "B S = R"],
    rows: SentRows,
    slot: Int32[Array, " R"],
    options: BatchOptions,
    chosen_ids: Int32[Array, "R C"],
    results: TopkLogprobs,
    cut: Truncation,
    parallel: Parallel,
) -> TopkLogprobs:
    """Scaled logprobs, renormalized over what the slot's sampling keeps where it asked for that.

    placed: all rows of the logits, and the place of each of `rows` among them.
    """
    cut = jax.tree.map(lambda x: x.reshape(-1).at[rows.flat].get(mode="fill", fill_value=0), cut)
    is_processed = (options.mode == LogprobsMode.PROCESSED)[slot][:, None]
    is_greedy = options.sampling.temperature[slot][:, None] == 0
    flat_logits, place = placed

    def renormalized(
        ids: Int32[Array, "R N"], logprobs: Float32[Array, "R N"]
    ) -> Float32[Array, "R N"]:
        x = parallel.over_vocabulary(
            lambda shard, logits, by_row: shard.named_logits(logits, by_row[0], by_row[1]),
            flat_logits,
            (place, ids),
        )
        if changes is not None:
            x = changes.at(x, ids)
        # log_kept is rounded by itself: without the minimum, a probability might exceed 1.
        kept_logprobs = jnp.minimum(logprobs - cut.log_kept[:, None], 0.0)
        kept_logprobs = jnp.where(is_greedy, 0.0, kept_logprobs)
        processed = jnp.where(cut.keeps(x, ids), kept_logprobs, -jnp.inf)
        # NaN says that the row is invalid or the token unknown: that stays.
        return jnp.where(is_processed & ~jnp.isnan(logprobs), processed, logprobs)

    return _in_mode(results, chosen_ids, is_processed, renormalized)


def draft_rows(
    options: BatchOptions, widths: Widths, parallel: Parallel = ONE_DEVICE
) -> Callable[..., DraftReport] | None:
    """Reports on drafts, made as these are drawn: `drafting.draw(report_drafts=)`.

    Raw and scaled logprobs are of the draft model's logits, processed ones of the q that the draft
    was drawn from. Rows of slots that did not ask for their drafts' enter no kernel.

    Args:
      options: by slot.
      widths: static, of `options`.
      parallel: the devices among which the logits' vocabulary is split.

    Returns:
      A function of logits [B, 1, V], or flat [N, V] with `row_ids` [B], and drafts (D = 1) to
      logprobs [B, 1, ...] by slot; None where no slot asks for logprobs.
    """
    check_batch_options(options, widths, None)
    if widths.k is None:
        return None
    # Processed rows are first made as scaled ones are, at their own temperature.
    scaled = widths._replace(mode=min(widths.mode, LogprobsMode.SCALED), values=0)

    def report_drafts(
        logits: jax.Array, drafts: Drafts, row_ids: jax.Array | None = None
    ) -> DraftReport:
        assert isinstance(drafts.q, CompactQ)
        wants = options.draft_logprobs & (options.num_columns > 0)
        by_slot_and_draft = None
        if row_ids is not None:
            by_slot_and_draft = row_ids[:, None]
            wants &= (row_ids >= 0) & (row_ids < logits.shape[0])
        rows = select_rows(wants.astype(jnp.int32), 1)
        results = row_logprobs(
            logits, drafts.token_ids, rows, options, scaled, parallel, row_ids=by_slot_and_draft
        )
        if widths.mode is LogprobsMode.PROCESSED:
            slot = jnp.minimum(rows.flat, len(wants) - 1)
            results = _of_q(results, options, slot, drafts.q)

        # From the order of the rows to that of the slots: an index out of bounds is dropped.
        def by_slot(x: jax.Array) -> jax.Array:
            return jnp.zeros_like(x).at[rows.flat].set(x, mode="drop")[:, None]

        return DraftReport(
            by_slot(results.token_ids),
            by_slot(results.logprobs),
            by_slot(results.token_ranks),
            by_slot(results.extra_logprobs),
        )

    return report_drafts


def _of_q(
    results: TopkLogprobs, options: BatchOptions, slot: Int32[Array, " R"], q: CompactQ
) -> TopkLogprobs:
    """Logprobs under q, of one draft a slot, where the slot asked for processed ones."""
    ids, log_q = q.ids[slot, 0], q.logprobs[slot, 0]  # [R, M]

    def under_q(
        named: Int32[Array, "R N"], logprobs: Float32[Array, "R N"]
    ) -> Float32[Array, "R N"]:
        same = (named[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :]
        processed = jnp.where(same, log_q[:, None, :], -jnp.inf).max(axis=2)
        return jnp.where(is_processed & ~jnp.isnan(logprobs), processed, logprobs)

    is_processed = (options.mode == LogprobsMode.PROCESSED)[slot][:, None]
    return _in_mode(results, options.chosen_ids[slot], is_processed, under_q)


def _in_mode(
    results: TopkLogprobs,
    chosen_ids: Int32[Array, "R C"],
    is_processed: Bool[Array, "R 1"],
    processed: Callable[[jax.Array, jax.Array], jax.Array],
) -> TopkLogprobs:
    """The rows with `processed(ids, logprobs)`; top columns that are excluded hold id -1."""
    logprobs = processed(results.token_ids, results.logprobs)
    is_top = jnp.arange(results.token_ids.shape[1], dtype=jnp.int32)[None, :] > 0
    excluded = is_processed & is_top & (logprobs == -jnp.inf)
    extra_logprobs = results.extra_logprobs
    if extra_logprobs.shape[1]:
        extra_logprobs = processed(chosen_ids, extra_logprobs)
    return results._replace(
        token_ids=jnp.where(excluded, -1, results.token_ids),
        logprobs=logprobs,
        extra_logprobs=extra_logprobs,
    )

"""The messages of one step: what it emitted, and the drafts that it verified, packed for one copy.

Each is a function of the step's output and of what the slots' requests asked for when the step was
launched, so a message never depends on what the host learns later.

Axes: B slots, S = D + 1 positions, D drafts, V vocabulary, W words.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from ipc import wire
from ipc.field_docs import with_field_docs
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.device.messages.arguments import check_array, check_option_type, check_step_logits
from jax_specdec.device.messages.batch_options import BatchOptions, Widths, check_batch_options
from jax_specdec.device.messages.logit_changes import RowChanges
from jax_specdec.device.messages.pack import (
    KeptRows,
    PackedSlots,
    SentRows,
    Stamp,
    pack,
    select_rows,
)
from jax_specdec.device.messages.row_logprobs import (
    by_row,
    cut_where,
    flattened,
    picked,
    row_logprobs,
)
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.kept_sets import PaddedKept
from pallas_kernels import TopkLogprobs
from pallas_kernels.sampling import Drafts, RowsRead, Truncation, Verified, kept_sets


@with_field_docs
class StepOutput(NamedTuple):
    """The output of one step, still on the device.

    Attributes:
      logits: the target's; flat with `row_ids`.
      token_ids: those that the step emits.
      num_tokens: the leading ones, which are sent.
      num_rows: the leading ones that were emitted, from rows of the target.
      num_drafts: verified; with a prefill's first token, handed over.
      drafts: verified in this step; `num` counts those that were drawn.
      state: SlotState.
      running: some slot goes on after this step.
      read: of the target's logits, where verifying them left it.
      changed_read: and of these with `changes`.
      cut: of the logits that chose [B, S], as `verify` found it.
      changed: The logits that chose; None: `logits`.
      changes: of `logits`, by which these chose.
      fates: of the drafts, as `loop.step.fates_of` says.
      row_ids: of flat logits, as `verify` had them.
    """

    logits: Float[Array, "B S V"] | Float[Array, "N V"]
    token_ids: Int32[Array, "B S"]
    num_tokens: Int32[Array, " B"]
    num_rows: Int32[Array, " B"]
    num_drafts: Int32[Array, " B"]
    drafts: Drafts
    state: Int32[Array, " B"]
    running: Bool[Array, ""]
    read: RowsRead | None = None
    changed_read: RowsRead | None = None
    cut: Truncation | None = None
    changed: Float[Array, "B S V"] | Float[Array, "N V"] | None = None
    changes: RowChanges | None = None
    fates: Int32[Array, " B"] | None = None
    row_ids: Int32[Array, "B S"] | None = None

    @property
    def chose(self) -> jax.Array:
        """The logits that the tokens were chosen from, before `changes`."""
        return self.logits if self.changed is None else self.changed


def step_output(
    logits: Float[Array, "B S V"] | Float[Array, "N V"],
    drafts: Drafts,
    verified: Verified,
    *,
    active: Bool[Array, " B"],
    running: Bool[Array, ""],
    changed: Float[Array, "B S V"] | Float[Array, "N V"] | None = None,
    changes: RowChanges | None = None,
) -> StepOutput:
    """The output of a step, from its verification: the tokens of the slots that are decoding.

    Args:
      logits: the target's own, as `verify` had them: flat ones go with the row ids in `verified`.
      drafts: as they were verified.
      verified: what `verify` made of the two.
      active: whether a slot is decoding. Other slots are stopped, and emit nothing.
      running: whether some slot goes on after this step.
      changed: what was verified, where penalties or the like changed the logits. Processed logprobs
        and kept sets are of these; raw and scaled ones of the target's own.
      changes: what `verify` was given of masks and biases, which says the same without a copy;
        None: what `verified` has of them.
    """
    check_option_type("verified", verified, Verified, "what `verify` returned")
    check_array("verified.token_ids", verified.token_ids, "integers", ("B", "S"), "[B, S]")
    batch, num_positions = slots = verified.token_ids.shape
    check_step_logits(logits, verified.row_ids, slots)
    check_option_type("drafts", drafts, Drafts, "the `Drafts` that `verify` had")
    of_drafts = batch, num_positions - 1
    check_array("drafts.token_ids", drafts.token_ids, "integers", of_drafts, "[B, S - 1]")
    check_array("active", active, "bools", (batch,), "one a slot [B]")
    check_array("running", running, "bools", (), "one bool, [],")
    if changed is not None:
        check_step_logits(changed, verified.row_ids, slots, "changed")
    if changes is None and verified.changes is not None and changed is None:
        changes = RowChanges(*verified.changes)
    num_tokens = jnp.where(active, verified.num_tokens, 0)
    num_drafts = jnp.where(active, drafts.num, 0)
    return StepOutput(
        logits=logits,
        token_ids=verified.token_ids,
        num_tokens=num_tokens,
        num_rows=num_tokens,
        num_drafts=num_drafts,
        drafts=drafts._replace(num=num_drafts),
        state=jnp.where(active, SlotState.TOKENS, SlotState.STOPPED).astype(jnp.int32),
        running=running,
        cut=verified.cut,
        read=verified.read,
        changed_read=verified.changed_read,
        changed=changed,
        changes=changes,
        row_ids=verified.row_ids,
    )


def target_message(
    output: StepOutput,
    options: BatchOptions,
    stamp: Stamp | UInt32[Array, "2"],
    draft_follows: Bool[Array, ""] | bool = False,
    *,
    widths: Widths,
    parallel: Parallel = ONE_DEVICE,
) -> UInt32[Array, " W"]:
    """The target message of a step, packed.

    Args:
      output: the step's.
      options: by slot, as when the step was launched. Where it has a verdict, the slot is free.
      stamp: of the header, or the step's number alone: low and high half.
      draft_follows: whether the step's draft message is sent after this one.
      widths: the static limits of `options`. Where no slot asks for logprobs, no kernel runs.
      parallel: the devices among which the logits' vocabulary is split.

    Returns:
      W = `most_words(B, S, widths)` words; see `pack`.
    """
    check_message(output, options, stamp, widths)
    (batch, num_positions), vocab = output.token_ids.shape, output.logits.shape[-1]
    num_rows = jnp.where(options.num_columns > 0, output.num_rows, 0)
    rows, results = _empty_results()
    if widths.k is not None:
        rows = select_rows(num_rows, num_positions)
        results = row_logprobs(
            _logits_of_modes(output, options, widths),
            output.token_ids,
            rows,
            options,
            widths,
            parallel,
            row_ids=output.row_ids,
            cut=output.cut,
            read=output.read,
            changed_read=output.changed_read,
            changes=output.changes,
            model_logits=output.logits,
        )
    kept = row_kept_sets(output, options, parallel) if widths.kept else None
    slots = _slots(output, options, output.num_tokens, num_rows, output.num_drafts)
    return pack(
        slots._replace(kept=options.kept.astype(jnp.int32), values=options.values),
        output.token_ids,
        rows,
        results,
        stamp,
        kind=Kind.TARGET,
        running=output.running,
        draft_follows=draft_follows,
        vocab_size=vocab,
        num_words=most_words(batch, num_positions, widths, vocab),
        kept=kept,
    )


def _logits_of_modes(output: StepOutput, options: BatchOptions, widths: Widths) -> jax.Array:
    """The logits that each slot's logprobs are of: the model's own unless processed."""
    if output.changed is None or widths.mode is not LogprobsMode.PROCESSED:
        return output.logits
    is_processed = options.mode == LogprobsMode.PROCESSED
    is_processed = by_row(is_processed, output.logits, output.row_ids)[..., None]
    return jnp.where(is_processed, output.changed, output.logits.astype(jnp.float32))


def row_kept_sets(
    output: StepOutput, options: BatchOptions, parallel: Parallel = ONE_DEVICE
) -> KeptRows:
    """The kept sets of the emitted tokens of the slots that asked, slot after slot.

    They are of the cut that the tokens were drawn with; without `output.cut`, a search finds it.
    """
    rows = select_rows(jnp.where(options.kept, output.num_rows, 0), output.token_ids.shape[1])
    cut = output.cut
    if cut is None:
        assert output.changes is None, "the cut that `verify` found is of the changed logits"
        cut = cut_where(options.kept, output.chose, options.sampling, parallel, output.row_ids)
    row_cut = jax.tree.map(
        lambda x: x.reshape(-1).at[rows.flat].get(mode="fill", fill_value=0), cut
    )
    changes = {}
    if output.changes is not None:
        changes = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), output.changes._asdict())
    flat_logits, place = flattened(output.chose, rows, output.row_ids)
    sets = parallel.over_vocabulary(
        lambda shard, logits, by_row: kept_sets(logits, *by_row[:3], shard=shard, **by_row[3]),
        flat_logits,
        (place, rows.num, row_cut, changes),
    )
    return KeptRows(rows.num, PaddedKept(*sets))


def draft_message(
    output: StepOutput,
    options: BatchOptions,
    stamp: Stamp | UInt32[Array, "2"],
    *,
    widths: Widths,
    parallel: Parallel = ONE_DEVICE,
) -> UInt32[Array, " W"]:
    """The draft message of a step, packed: the logprobs, under the draft model, of what it drafted.

    It has all drafts that the step verified, accepted or not, of the slots that asked for them,
    in their own columns and mode, as `drafting.draw` reports them. A draft that was not drawn has
    none.

    Arguments and result are those of `target_message`, with D drafts instead of S positions.

    Raises:
      ValueError: the drafts have no q, or there is no report on them though a slot wants to know.
    """
    check_message(output, options, stamp, widths)
    drafts = output.drafts
    if drafts.q is None:
        raise ValueError(
            "this drafter draws no drafts, so its drafts have no logprobs: "
            "send the target message alone"
        )
    batch, num_drafts = drafts.token_ids.shape
    vocab = output.logits.shape[-1]
    num_tokens = jnp.where(options.draft_logprobs, drafts.num, 0)
    num_rows = jnp.where(options.num_columns > 0, num_tokens, 0)
    rows, results = _empty_results()
    if widths.k is not None:
        if drafts.report is None:
            raise ValueError(
                "nothing is known of these drafts' logprobs: give `drafting.draw` the argument "
                "report_drafts=draft_rows(options, widths)"
            )
        rows = select_rows(num_rows, num_drafts)
        report = drafts.report
        named = (report.token_ids, report.logprobs, report.token_ranks, report.extra_logprobs)
        flat = TopkLogprobs(*(x.reshape(batch * num_drafts, *x.shape[2:]) for x in named))
        results = picked(flat, rows)
        # They may be of an earlier batch, with other widths. A slot's own columns are in both.
        results = results._replace(
            token_ids=_as_wide(results.token_ids, widths.num_columns),
            logprobs=_as_wide(results.logprobs, widths.num_columns),
            extra_logprobs=_as_wide(results.extra_logprobs, widths.chosen),
        )
    decodes = _states(output, options) == SlotState.TOKENS
    return pack(
        _slots(output, options, num_tokens, num_rows, jnp.where(decodes, output.num_drafts, 0)),
        drafts.token_ids,
        rows,
        results,
        stamp,
        kind=Kind.DRAFT,
        running=output.running,
        draft_follows=False,
        vocab_size=vocab,
        num_words=most_words(batch, num_drafts, widths._replace(kept=False, values=0), vocab),
    )


def check_message(output: StepOutput, options: BatchOptions, stamp: object, widths: Widths) -> None:
    """Refuse what no message can be made of."""
    check_option_type("output", output, StepOutput, "what `step_output` returned")
    check_batch_options(options, widths, output.token_ids.shape[0])
    if not isinstance(stamp, Stamp):
        check_array("stamp", stamp, "integers", (2,), "a `Stamp`, or a number's halves [2]")


def _as_wide(x: jax.Array, columns: int) -> jax.Array:
    """x [R, N] with so many columns: what is cut off or added is nobody's."""
    return jnp.pad(x[:, :columns], ((0, 0), (0, max(0, columns - x.shape[1]))))


def _slots(
    output: StepOutput,
    options: BatchOptions,
    num_tokens: Int32[Array, " B"],
    num_rows: Int32[Array, " B"],
    num_drafts: Int32[Array, " B"],
) -> PackedSlots:
    """The slots of either message: its own counts, and what the slots' requests asked for."""
    return PackedSlots(
        state=_states(output, options),
        mode=options.mode,
        columns=options.num_columns,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_drafts=num_drafts,
        num_chosen=options.num_chosen,
        values=jnp.zeros_like(options.values),
        kept=jnp.zeros_like(options.mode),
        generation=options.generation,
    )


def _states(output: StepOutput, options: BatchOptions) -> Int32[Array, " B"]:
    """The slots' states: an eviction hides what the step made of the slot."""
    return jnp.where(options.verdict > 0, options.verdict, output.state)


def _empty_results() -> tuple[SentRows, TopkLogprobs]:
    """No rows, and their logprobs."""
    none = jnp.zeros(0, jnp.int32)
    float32 = jnp.float32
    ids, logprobs = jnp.zeros((0, 1), jnp.int32), jnp.zeros((0, 1), float32)
    empty = TopkLogprobs(ids, logprobs, none, jnp.zeros((0, 0), float32))
    return SentRows(none, jnp.int32(0)), empty


def most_words(batch: int, num_positions: int, widths: Widths, vocab_size: int) -> int:
    """The longest message that B slots of S positions can make within `widths`."""
    return wire.words_bound(
        [num_positions] * batch,
        [widths.num_columns] * batch,
        [widths.chosen + wire.num_values(widths.values)] * batch,
        [min(wire.MAX_KEPT, vocab_size) if widths.kept else None] * batch,
    )

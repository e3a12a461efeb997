"""The messages of one step: what it emitted, and the drafts that it verified, packed for one copy.

Each is a function of the step's output and of what the slots' requests asked for when the step was
launched, so a message never depends on what the host learns later.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ipc import wire
from ipc.wire import Kind, SlotState
from jax_specdec.device.messages.pack import Rows, SlotFields, pack, select_rows
from jax_specdec.device.messages.row_logprobs import Asked, Widths, row_logprobs
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.device.sampling.distribution import Truncation
from jax_specdec.device.sampling.verify import Drafts, Verified
from pallas_kernels import TopkLogprobs


class StepOutput(NamedTuple):
    """What one step emitted, still on the device. Axes: B slots, S positions, V vocabulary."""

    logits: jax.Array  # [B, S, V]: the target's
    token_ids: jax.Array  # [B, S] int32
    num_tokens: jax.Array  # [B] int32: what is sent of them
    num_rows: jax.Array  # [B] int32: the leading ones that were emitted, from rows of the target
    num_drafts: jax.Array  # [B] int32: verified; with a prefill's first token, handed over
    drafts: Drafts  # verified in this step; `num` counts those that were drawn from `logits`
    state: jax.Array  # [B] int32 SlotState
    running: jax.Array  # [] bool: some slot goes on after this step
    greedy_rows: TopkLogprobs | None = None  # of all B * S rows' greedy choices, on the fused path
    cut: Truncation | None = None  # [B, S], of `logits`, as `verify` found it


def step_output(
    logits: jax.Array,
    drafts: Drafts,
    verified: Verified,
    *,
    active: jax.Array,
    running: jax.Array,
) -> StepOutput:
    """What a step emitted, from its verification: the tokens of the slots that are decoding.

    Args:
      logits: [B, S, V], the target's, as they were verified.
      drafts: [B, D], as they were verified.
      verified: what `verify` made of the two.
      active: [B] bool: decoding. Other slots are stopped, and emit nothing.
      running: [] bool: some slot goes on after this step.
    """
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
    )


def target_message(
    output: StepOutput,
    asked: Asked,
    step_number: jax.Array,
    draft_follows: jax.Array | bool = False,
    *,
    widths: Widths,
    process_rank: int = 0,
    parallel: Parallel = ONE_DEVICE,
) -> jax.Array:
    """The target message of a step, packed.

    Args:
      output: of the step.
      asked: by slot, as when the step was launched; it has been freed where a verdict is told.
      step_number: [2] uint32, low and high half.
      draft_follows: whether the step's draft message is sent after this one. [] bool
      widths: the static limits of `asked`. Where nobody asked for logprobs, no kernel runs.
      parallel: the devices among which the logits' vocabulary is split.

    Returns:
      [W] uint32, W = `most_words(B, S, widths)`; see `pack`.
    """
    batch, num_positions, vocab = output.logits.shape
    num_rows = jnp.where(asked.columns > 0, output.num_rows, 0)
    if widths.k is None:
        rows, found = _nothing()
    else:
        rows = select_rows(num_rows, num_positions)
        if output.greedy_rows is not None:
            # A greedy request's emitted tokens are its rows' greedy choices, accepted drafts too.
            found = jax.tree.map(
                lambda x: x.at[rows.flat].get(mode="fill", fill_value=0), output.greedy_rows
            )
        else:
            found = row_logprobs(
                output.logits, output.token_ids, rows, asked, widths, parallel, cut=output.cut
            )
    slots = SlotFields(
        state=jnp.where(asked.verdict > 0, asked.verdict, output.state),
        mode=asked.mode,
        columns=asked.columns,
        num_tokens=output.num_tokens,
        num_rows=num_rows,
        num_drafts=output.num_drafts,
        num_chosen=asked.num_chosen,
        generation=asked.generation,
    )
    return pack(
        slots,
        output.token_ids,
        rows,
        found,
        kind=Kind.TARGET,
        step=step_number,
        running=output.running,
        draft_follows=draft_follows,
        process_rank=process_rank,
        vocab_size=vocab,
        num_words=most_words(batch, num_positions, widths),
    )


def draft_message(
    output: StepOutput,
    asked: Asked,
    step_number: jax.Array,
    *,
    widths: Widths,
    process_rank: int = 0,
    parallel: Parallel = ONE_DEVICE,
) -> jax.Array:
    """The draft message of a step, packed: the logprobs, under the draft model, of what it drafted.

    It has all drafts that the step verified, accepted or not, of the slots that asked for them,
    in their own columns and mode. A draft that was not drawn from logits has none.

    Args, Returns: as `target_message`, with D drafts instead of S positions.

    Raises:
      ValueError: the drafter has no logits.
    """
    drafts, logits = output.drafts, output.drafts.logits
    if logits is None:
        raise ValueError("this drafter draws from no logits: it has no draft message")
    batch, num_drafts, vocab = logits.shape
    num_tokens = jnp.where(asked.draft_logprobs, drafts.num, 0)
    num_rows = jnp.where(asked.columns > 0, num_tokens, 0)
    if widths.k is None:
        rows, found = _nothing()
    else:
        rows = select_rows(num_rows, num_drafts)
        found = row_logprobs(
            logits, drafts.token_ids, rows, asked, widths, parallel, cut=drafts.cut
        )
    state = jnp.where(asked.verdict > 0, asked.verdict, output.state)
    slots = SlotFields(
        state=state,
        mode=asked.mode,
        columns=asked.columns,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_drafts=jnp.where(state == SlotState.TOKENS, output.num_drafts, 0),
        num_chosen=asked.num_chosen,
        generation=asked.generation,
    )
    return pack(
        slots,
        drafts.token_ids,
        rows,
        found,
        kind=Kind.DRAFT,
        step=step_number,
        running=output.running,
        draft_follows=False,
        process_rank=process_rank,
        vocab_size=vocab,
        num_words=most_words(batch, num_drafts, widths),
    )


def _nothing() -> tuple[Rows, TopkLogprobs]:
    """No rows, and the logprobs of none."""
    none = jnp.zeros(0, jnp.int32)
    empty = TopkLogprobs(jnp.zeros((0, 1), jnp.int32), jnp.zeros((0, 1)), none, jnp.zeros((0, 0)))
    return Rows(none, jnp.int32(0)), empty


def most_words(batch: int, num_positions: int, widths: Widths) -> int:
    """The longest message that B slots of S positions can make within `widths`."""
    return wire.words_bound(
        [num_positions] * batch, [widths.columns] * batch, [widths.chosen] * batch
    )

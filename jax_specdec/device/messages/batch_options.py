"""Options of a batch's requests, as the device needs them: values a slot, and static limits.

Axes: B slots, C chosen token ids.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from ipc import wire
from ipc.field_docs import with_field_docs
from ipc.wire import LogprobsMode
from jax_specdec.device.messages.arguments import (
    check_array,
    check_option_type,
    check_requests,
    check_size,
)
from jax_specdec.requests import MAX_BIASED_IDS, MAX_HELD_IDS, SamplingParams
from jax_specdec.wording import pluralize
from pallas_kernels.sampling import Sampling

K_BUCKETS = (0, 5, 20, 64, 128, 256, 512)
CHOSEN_BUCKETS = (0, 16, wire.MAX_CHOSEN, wire.MAX_CHOSEN_OF_ROW)  # the last for prompts
CHANGES_BUCKETS = (0, 16, 300, max(MAX_BIASED_IDS, MAX_HELD_IDS))  # OpenAI allows 300


def k_bucket(k: int, vocab_size: int) -> int:
    """The smallest static K of at least `k`, at most the vocabulary."""
    for size in K_BUCKETS:
        if k <= size:
            return min(size, vocab_size)
    raise wire.WireError(f"K = {k} is over the limit {wire.MAX_TOP_K}")


def chosen_bucket(count: int) -> int:
    """The smallest width of a table of at least `count` chosen token ids."""
    for width in CHOSEN_BUCKETS:
        if count <= width:
            return width
    raise wire.WireError(f"{count} chosen token ids are over the limit {wire.MAX_CHOSEN_OF_ROW}")


def changes_bucket(count: int) -> int:
    """The smallest width of tables of at least `count` biased or held ids; requests are checked."""
    return next(width for width in CHANGES_BUCKETS if count <= width)


def words_bucket(num_words: int) -> int:
    """The smallest copy of at least `num_words` words: a power of two, or one and a half of one.

    It is never more than half again what is needed.
    """
    power = 1 << max(num_words - 1, 1).bit_length()
    return power * 3 // 4 if num_words <= power * 3 // 4 else power


@with_field_docs
class Widths(NamedTuple):
    """The most that the slots of a batch ask for; a program is compiled for each.

    Attributes:
      k: the static K, at least every slot's; None: no slot asks for logprobs.
      chosen: C: columns of the table of chosen token ids.
      mode: the costliest of the slots' modes.
      kept: some slot asks for kept sets.
      values: bits of `RowValue` that some slot asks for.
    """

    k: int | None = None
    chosen: int = 0
    mode: LogprobsMode = LogprobsMode.RAW
    kept: bool = False
    values: int = 0

    @property
    def num_columns(self) -> int:
        """Columns of logprobs a row: 0 without logprobs, K + 1 otherwise."""
        return 0 if self.k is None else self.k + 1


@with_field_docs
class BatchOptions(NamedTuple):
    """The options of each slot that the host knows when it launches a step.

    Attributes:
      generation: how often the slot was filled, as the engine counts.
      verdict: PREEMPTED or RECOVERY_STOP where the slot was evicted, else 0.
      num_columns: 0 for no logprobs, K + 1 otherwise.
      mode: LogprobsMode.
      num_chosen: ids that the request named.
      chosen_ids: anything from num_chosen on.
      draft_logprobs: whether the draft's are wanted too.
      kept: the kept sets of emitted tokens.
      values: bits of `RowValue`, of the rows of emitted tokens.
      sampling: how each slot draws.
    """

    generation: UInt32[Array, " B"]
    verdict: Int32[Array, " B"]
    num_columns: Int32[Array, " B"]
    mode: Int32[Array, " B"]
    num_chosen: Int32[Array, " B"]
    chosen_ids: Int32[Array, "B C"]
    draft_logprobs: Bool[Array, " B"]
    kept: Bool[Array, " B"]
    values: Int32[Array, " B"]
    sampling: Sampling


def check_batch_options(options: BatchOptions, widths: Widths, num_slots: int | None) -> None:
    """Refuse options and widths that are none, or of another number of slots."""
    what = "`options_of_requests(params, widths)`"
    check_option_type("options", options, BatchOptions, what)
    check_option_type("widths", widths, Widths, "`widths_of(params, vocab_size)`")
    slots = "B" if num_slots is None else num_slots
    check_array("options.num_columns", options.num_columns, "integers", (slots,), "one a slot [B]")


def widths_of(params: Sequence[SamplingParams], vocab_size: int) -> Widths:
    """The static limits of what the requests of a batch ask for.

    Raises:
      ValueError: a request asks for more top columns than the vocabulary has tokens.
    """
    check_requests(params)
    check_size("vocab_size", vocab_size, "the vocabulary's")
    asking = [slot_params for slot_params in params if slot_params.num_columns]
    kept = any(slot_params.kept_token_ids for slot_params in params)
    if not asking:
        return Widths(kept=kept)
    k = max(slot_params.num_columns for slot_params in asking) - 1
    if k > vocab_size:
        raise ValueError(
            f"logprobs = {k} of a request are more than the {vocab_size} tokens of the vocabulary: "
            f"ask for {vocab_size} at most"
        )
    return Widths(
        k=k_bucket(k, vocab_size),
        chosen=chosen_bucket(max(len(slot_params.extra_token_ids) for slot_params in asking)),
        mode=LogprobsMode(max(slot_params.logprobs_mode for slot_params in asking)),
        kept=kept,
        values=functools.reduce(operator.or_, (slot_params.row_values for slot_params in asking)),
    )


def options_of_requests(
    params: Sequence[SamplingParams],
    widths: Widths,
    *,
    generation: int | Sequence[int] = 1,
    verdict: int | Sequence[int] = 0,
) -> BatchOptions:
    """The options of a batch's requests, on the device: request b is in slot b.

    Args:
      params: of B requests.
      widths: `widths_of` them.
      generation: of each slot, or of all; it changes whenever a slot gets another request.
      verdict: of each slot, or of all; see `BatchOptions`.

    Raises:
      ValueError: not as many generations or verdicts as requests.
    """
    check_requests(params)
    check_option_type("widths", widths, Widths, "`widths_of(params, vocab_size)`")
    chosen_ids: Any = np.zeros((len(params), widths.chosen), np.int32)
    for b, slot_params in enumerate(params):
        chosen_ids[b, : len(slot_params.extra_token_ids)] = slot_params.extra_token_ids
    options = BatchOptions(
        generation=_of_requests("generations", generation, len(params), np.uint32),
        verdict=_of_requests("verdicts", verdict, len(params), np.int32),
        num_columns=_on_host([slot_params.num_columns for slot_params in params], np.int32),
        mode=_on_host([slot_params.logprobs_mode for slot_params in params], np.int32),
        num_chosen=_on_host([len(slot_params.extra_token_ids) for slot_params in params], np.int32),
        chosen_ids=chosen_ids,
        draft_logprobs=_on_host([slot_params.draft_logprobs for slot_params in params], np.bool_),
        kept=_on_host([slot_params.kept_token_ids for slot_params in params], np.bool_),
        values=_on_host([slot_params.row_values for slot_params in params], np.int32),
        sampling=host_sampling(params),
    )
    on_device: BatchOptions = jax.device_put(options)
    return on_device


def host_sampling(params: Sequence[SamplingParams]) -> Annotated[Sampling, "NumPy arrays"]:
    """The sampling parameters of B requests, still on the host."""
    return Sampling(
        temperature=_on_host([slot_params.temperature for slot_params in params], np.float32),
        top_k=_on_host([slot_params.top_k for slot_params in params], np.int32),
        top_p=_on_host([slot_params.top_p for slot_params in params], np.float32),
        min_p=_on_host([slot_params.min_p for slot_params in params], np.float32),
        seed=_on_host([slot_params.seed for slot_params in params], np.uint32),
    )


def _of_requests(
    what: str, values: int | Sequence[int], count: int, dtype: type[np.generic]
) -> Any:
    values = [values] * count if isinstance(values, int) else values
    if len(values) != count:
        raise ValueError(
            f"{len(values)} {what} for {pluralize(count, 'request')}: one for each, or one for all"
        )
    return _on_host(values, dtype)


def _on_host(values: object, dtype: type[np.generic]) -> Any:
    """A NumPy array, where a carrier says `Array`: all go to the device in one call."""
    return np.array(values, dtype)

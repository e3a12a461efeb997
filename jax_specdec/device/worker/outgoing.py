"""A worker's messages on their way from the device to the host.

Each is packed on the device, cut to the most words that it can have by what the host knows, and
copied while the device goes on. Axes: B slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from ipc import wire
from jax_specdec.device.loop.host_slots import Slot, draft_bound, prompt_bound, target_bound
from jax_specdec.device.loop.kinds import StepKind
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.prompt_chunks import ScoredChunk
from jax_specdec.device.messages.batch_options import BatchOptions, Widths, words_bucket
from jax_specdec.device.messages.pack import Stamp
from jax_specdec.device.messages.step_messages import StepOutput


@dataclass(frozen=True)
class Outgoing:
    """Makes the words of messages and starts their copies.

    Attributes:
      process_rank: the number in the headers.
      digest: there, too.
      sends_drafts: whether there are draft messages. There are none where drafts are not drawn, or
        where a prefill node hands them over.
    """

    process_rank: int
    digest: int
    sends_drafts: bool

    def stamp(self, step: int, weights_version: int) -> Stamp:
        """Of a message of this step, whose rows these weights made."""
        halves = np.array([step & 0xFFFFFFFF, step >> 32], np.uint32)  # the low word first
        return Stamp(
            halves, *np.array([self.process_rank, weights_version, self.digest], np.uint32)
        )

    def step_messages(
        self,
        programs: Compiled,
        output: StepOutput,
        stamp: Stamp,
        host_slots: Sequence[Slot],
        widths: Widths,
        options: BatchOptions,
    ) -> tuple[jax.Array, ...]:
        """A step's target message and, where a request asks for it, its draft message.

        Args:
          programs: those that pack.
          output: the step's, on the device.
          stamp: of the step.
          host_slots: [B] as they were when it was launched.
          widths: the static limits of what they ask for.
          options: what they ask for, on the device.

        Returns:
          [words] uint32 each.
        """
        draft_follows = self.draft_follows(host_slots)
        follows = np.bool_(draft_follows)
        words = programs.target_message(output, options, stamp, follows, widths=widths)
        sent = [self._copy(programs, words, target_bound(host_slots))]
        if draft_follows:
            words = programs.draft_message(output, options, stamp, widths=widths)
            sent.append(self._copy(programs, words, draft_bound(host_slots)))
        return tuple(sent)

    def rehearse(
        self,
        programs: Compiled,
        output: StepOutput,
        host_slots: Sequence[Slot],
        kind: StepKind,
        options: BatchOptions,
    ) -> None:
        """Make all that a step of this kind may send, and send nothing; arguments as above."""
        stamp, widths = self.stamp(0, 0), kind.widths
        follows = np.bool_(False)
        messages = [programs.target_message(output, options, stamp, follows, widths=widths)]
        if kind.reports_drafts:
            messages.append(programs.draft_message(output, options, stamp, widths=widths))
        for words in messages:
            for count in copied_lengths(programs, words.size):
                np.asarray(programs.leading(words, count))

    def draft_follows(self, host_slots: Sequence[Slot]) -> bool:
        """Whether the next step has a draft message."""
        asks = (slot.decoding and slot.params.draft_logprobs for slot in host_slots)
        return self.sends_drafts and any(asks)

    def prompt_message(
        self,
        programs: Compiled,
        scored: ScoredChunk,
        num_tokens: int,
        stamp: Stamp,
        index: np.int32,
        scoring: Slot,
        host_slots: Sequence[Slot],
        widths: Widths,
        options: BatchOptions,
    ) -> jax.Array:
        """The message of one chunk of the prompt of slot `index`, [words] uint32.

        Args:
          programs: those that pack.
          scored: the chunk's logprobs, on the device.
          num_tokens: tokens of it that are the prompt's; the rest is padding.
          stamp: of the step that it precedes.
          index: of the slot whose prompt it is.
          scoring: the slot, as `for_prompt` makes it.
          host_slots: [B] all slots.
          widths: the static limits of what `scoring` asks for.
          options: what it asks for, on the device.
        """
        words = programs.prompt_message(
            scored,
            index,
            options,
            np.array([slot.generation for slot in host_slots], np.uint32),
            stamp,
            widths=widths,
            vocab_size=programs.config.model.vocab_size,
        )
        return self._copy(programs, words, prompt_bound(host_slots, scoring, num_tokens))

    def _copy(self, programs: Compiled, words: jax.Array, bound: int) -> jax.Array:
        """Start the copy of a message of at most `bound` words to the host."""
        # Packing compiles once for each width, and only this cut once for each bucket.
        cut: jax.Array = programs.leading(words, min(words_bucket(bound), words.size))
        cut.copy_to_host_async()
        return cut


def copied_lengths(programs: Compiled, size: int) -> Iterator[int]:
    """The lengths that a loop's messages of at most `size` words are copied with."""
    words = target_bound([Slot()] * programs.config.num_slots) if programs.cuts else size
    while (length := words_bucket(words)) < size:
        yield length
        words = length + 1
    yield size


class DeviceCheckError(RuntimeError):
    """A message that failed a check on the device while it was packed; it is not sent."""


def check(words: np.ndarray) -> np.ndarray:
    """The message in a bucket of words, if the checks on the device passed.

    Raises:
      DeviceCheckError: a check failed; names the step and the checks.
    """
    if not isinstance(words, np.ndarray) or words.dtype != np.uint32 or words.ndim != 1:
        raise TypeError(
            f"words is {getattr(words, 'dtype', type(words).__name__)} "
            f"{getattr(words, 'shape', '')}: give a message's words on the host, uint32 [W], as "
            "`np.asarray(words)`"
        )
    if words.size < wire.HEADER_WORDS:
        raise ValueError(f"words {words.shape}: a header alone has {wire.HEADER_WORDS}")
    # Python's integers: three reads through NumPy would take ten times as long.
    header = words[: wire.HEADER_WORDS].tolist()
    num_words = _field(header, "num_words")
    if num_words > words.size:
        raise DeviceCheckError(
            f"a message of {num_words} words is longer than the {words.size} that its slots "
            "can fill; nothing of it was sent"
        )
    if _field(header, "error"):
        checks = _field(header, "error_checks")
        step = _field(header, "step_high") << 32 | _field(header, "step_low")
        raise DeviceCheckError(
            f"step {step} failed its checks on the device "
            f"({', '.join(wire.failed_checks(checks))}); nothing of it was sent"
        )
    return words[:num_words]


def _field(header: list[int], name: str) -> int:
    field = wire.HEADER[name]
    return header[field.word] >> field.shift & field.maximum

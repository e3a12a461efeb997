"""Run prompts in an engine: texts as they grow, records as requests end.

One request's text is shown at a time, in the order of the prompts; the text that another request
has by then appears at once when its turn comes. Records are written as their requests end.
"""

import collections
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax_specdec.beside.ipc  # noqa: F401
from ipc import RingError
from jax_specdec.cli.prompts import Prompt
from jax_specdec.cli.resumable import JsonlOutput, Output
from jax_specdec.cli.standard_output import RecordLines
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.export import openai
from jax_specdec.export.delivery import Delivery, DeliveryPart
from jax_specdec.records.batch import FinishReason, PromptRows, Statistics
from jax_specdec.records.record import Record, Records
from jax_specdec.text.detokenize import TokenTable
from jax_specdec.wording import pluralize

FINISHED = (
    FinishReason.STOP_TOKEN, FinishReason.STOP_SEQUENCE, FinishReason.STOP_STRING,
    FinishReason.LENGTH,
)  # fmt: skip


class TextsInOrder:
    """Shows the texts one after the other, each as it grows."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        table: TokenTable,
        show: Callable[[str, str], None],
        style: Callable[[float | None, bool], str] | None = None,
    ) -> None:
        """Show nothing before the first record: until then, the terminal shows the loading.

        Args:
          prompts: the prompts, in the order of their texts.
          table: the strings of the tokenizer.
          show: takes (kind, text), where kind is "title", "prompt", "text", "error" or a style.
          style: makes the style of a token from its logprob and whether it was an accepted draft;
            it becomes the kind of the tokens of requests that asked for logprobs. None: "text".
        """
        self._show = show
        self._style = style
        self._table = table
        self._waiting = collections.deque(prompts)
        self._titles = len(prompts) > 1
        self._lengths = dict.fromkeys((prompt.request.id for prompt in prompts), 0)
        self._hidden: dict[str, list[tuple[str, str]]] = {}
        self._ended: set[str] = set()
        self._begun = False

    def add(self, part: DeliveryPart) -> None:
        """Take the next part of a request's text, and show what it adds."""
        if not self._begun:
            self._begun = True
            self._begin()
        id, reason = part.record.request_id, part.record.finish_reason
        for kind, text in self._runs(part, self._lengths[id]):
            self._put(id, kind, text)
        self._lengths[id] += len(part.text)
        if reason is not None:
            if reason not in FINISHED:
                self._put(id, "error", f"[ended early: {openai.finish_reason(reason)}]")
            self._ended.add(id)
            self._advance()

    def _runs(self, part: DeliveryPart, begin: int) -> Iterator[tuple[str, str]]:
        """Yield the text of a part that begins there, that of tokens of one kind together."""
        record, text = part.record, part.text
        logprobs = None if self._style is None else record.logprobs
        if self._style is None or logprobs is None:
            yield "text", text
            return
        kinds = [
            self._style(logprob, at < record.num_accepted)
            for at, logprob in enumerate(logprobs[:, 0].tolist())
        ]
        # A character that tokens share is the last one's, and so is what ends the whole text.
        starts = [max(offset - begin, 0) for offset in part.offsets]
        pairs = zip(kinds, itertools.pairwise([*starts, len(text)]), strict=True)
        for kind, run in itertools.groupby(pairs, lambda pair: pair[0]):
            yield kind, "".join(text[slice(*places)] for _, places in run)

    def _put(self, id: str, kind: str, text: str) -> None:
        if not text:
            return
        if self._waiting and self._waiting[0].request.id == id:
            self._show(kind, text)
        else:
            self._hidden.setdefault(id, []).append((kind, text))

    def _begin(self) -> None:
        if self._waiting:
            prompt = self._waiting[0]
            if self._titles:
                self._show("title", f"== {prompt.request.id} ==\n")
            if not prompt.chat:  # the user wrote messages, not the text that a template makes
                self._show("prompt", self._table.decode(prompt.request.prompt_token_ids))
            for kind, text in self._hidden.pop(prompt.request.id, ()):
                self._show(kind, text)

    def _advance(self) -> None:
        while self._waiting and self._waiting[0].request.id in self._ended:
            self._waiting.popleft()
            self._show("text", "\n")
            self._begin()


class Tally:
    """How many of a run's prompts have ended, and how fast.

    Attributes:
      finished: those that ended by a stop or at their length.
      tokens: those that came.
      failed: id to the reason of those that ended otherwise, which are not written.
    """

    def __init__(self, total: int) -> None:
        """Begin now, with none of `total` prompts."""
        self.finished = self.tokens = 0
        self.failed: dict[str, str] = {}
        self._total, self._began = total, time.monotonic()
        self._first_at: float | None = None  # when the first tokens came
        self._last_at = self._began
        self._first_tokens = 0  # that came with them

    def count(self, tokens: int) -> None:
        """Count tokens that have just come."""
        if not tokens:
            return
        self._last_at = time.monotonic()
        if self._first_at is None:
            self._first_at, self._first_tokens = self._last_at, tokens
        self.tokens += tokens

    def end(self, id: str, reason: FinishReason) -> bool:
        """Count an end; whether it is one of those that are written."""
        if reason in FINISHED:
            self.finished += 1
        else:
            self.failed[id] = str(openai.finish_reason(reason))
        return reason in FINISHED

    def conclude(self, more: str = "") -> int:
        """Print the numbers, with `more` behind them, and what failed; returns the exit status."""
        print(f"{self._finished()}, {self._speed()}{more}", file=sys.stderr)
        for id, reason in self.failed.items():
            print(f"request {id!r} ended early: {reason}", file=sys.stderr)
        return 1 if self.failed else 0

    def _speed(self) -> str:
        """The tokens, and the time of loading apart from that of decoding."""
        text = pluralize(self.tokens, "token")
        if self._first_at is None:
            return text
        text += f": the first after {self._first_at - self._began:.1f} s, loading included"
        seconds, others = self._last_at - self._first_at, self.tokens - self._first_tokens
        return f"{text}, the others at {others / seconds:.1f} a second" if seconds > 0 else text

    @contextlib.contextmanager
    def noting(self, output: Path | None) -> Iterator[None]:
        """Note on an error that ends the run what was kept, and how to go on."""
        try:
            yield
        except RingError:  # there is no shared memory, and nothing has begun
            raise
        except (KeyboardInterrupt, WorkerFailed, OSError) as end:
            notes = (
                f", kept in {output}: run the same command again for the others"
                if output
                else "; with --output they are kept, and the same command runs the others"
            )
            end.add_note(f"ended before that: {self._finished()}{notes}")
            raise

    def _finished(self) -> str:
        return f"{self.finished} of {pluralize(self._total, 'request')}"


class GenerateRun:
    """The prompts of a run, whose records wait until their requests end.

    Attributes:
      tally: what became of them.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        table: TokenTable,
        settings: Sequence[str],
        output: JsonlOutput | RecordLines | None,
    ) -> None:
        """Begin with no records.

        Args:
          prompts: those to run.
          table: the strings of the tokenizer.
          settings: what a record depends on besides, for its digest; the model's name first.
          output: where records are written; None: nowhere.
        """
        self.tally = Tally(len(prompts))
        self._table, self._settings, self._output = table, settings, output
        self._open = {prompt.request.id: _Answer(prompt, table) for prompt in prompts}
        self._total = Statistics()

    def add(self, records: Records, end: Callable[[str], Any]) -> Iterator[DeliveryPart]:
        """Keep records until their request ends, then write its response.

        Args:
          records: the next ones.
          end: is called with the id of a request whose text is at a stop string.

        Yields:
          What can be shown of each record.
        """
        self.tally.count(sum(len(record.token_ids) for record in records))
        for record in records:
            id = record.request_id
            if record.statistics is not None and record.finish_reason is not None:
                self._total += record.statistics
            answer = self._open.get(id)
            if answer is None:  # its text has ended
                continue
            parts = answer.push(record)
            yield from parts
            if answer.delivery.stop_text is not None:
                end(id)
            if not parts or (reason := parts[-1].record.finish_reason) is None:
                continue
            del self._open[id]
            if reason in FINISHED and self._output is not None:
                digest = answer.prompt.digest(*self._settings)
                response = answer.response(self._settings[0])
                self._output.write(id, digest, response)
            self.tally.end(id, reason)

    @property
    def speculation(self) -> str:
        """The figures of speculation, to stand behind the tally's line."""
        total = self._total
        if not total.num_drafts:
            return ""
        return (
            f"; {total.num_accepted / total.num_drafts:.0%} of "
            f"{pluralize(total.num_drafts, 'draft')} accepted, "
            f"{total.num_tokens / total.steps:.2f} tokens a step"
        )


class _Answer:
    """The results of a prompt so far."""

    def __init__(self, prompt: Prompt, table: TokenTable) -> None:
        self.prompt, self._table = prompt, table
        self.delivery = Delivery(table, prompt.stops, min_tokens=prompt.request.params.min_tokens)
        self._rows: list[PromptRows] = []
        self._parts: list[DeliveryPart] = []

    def push(self, record: Record) -> list[DeliveryPart]:
        if record.prompt is not None:
            self._rows.append(record.prompt)
        parts = self.delivery.push(record)
        self._parts += parts
        return parts

    def response(self, model: str) -> dict[str, Any]:
        """The OpenAI-style response."""
        make = openai.chat_completion if self.prompt.chat else openai.completion
        k = self.prompt.request.params.prompt_logprobs
        return make(
            self.prompt.request, [part.record for part in self._parts], self._table, model=model,
            created=int(time.time()), text="".join(part.text for part in self._parts),
            prompt=None if k is None else openai.joined_prompt(self._rows, k),
        )  # fmt: skip


def needs_records(prompts: Sequence[Prompt]) -> bool:
    """Whether a prompt asks for what only its record has: logprobs, and kept token ids."""
    params = [prompt.request.params for prompt in prompts]
    return any(
        request_params.logprobs is not None
        or request_params.prompt_logprobs is not None
        or request_params.extra_token_ids
        or request_params.draft_logprobs
        or request_params.kept_token_ids
        for request_params in params
    )


def left_to_do(
    prompts: Sequence[Prompt], output: Output | None, settings: Sequence[str]
) -> list[Prompt]:
    """The prompts that have no record in the output yet; says what it has.

    Raises:
      ValueError: a record has a prompt's id, but another text, other parameters or settings.
    """
    remaining = []
    done = {} if output is None else output.done
    for prompt in prompts:
        record = done.get(prompt.request.id)
        if record is None:
            remaining.append(prompt)
        elif record != prompt.digest(*settings):
            raise ValueError(
                f"the output has a record of id {prompt.request.id!r} that was made from another "
                "prompt, model or parameters: choose another file, or remove this one"
            )
    if output is not None and output.cut:
        cut = pluralize(output.cut, "byte")
        print(f"cut off a half-written record of {cut}", file=sys.stderr)
    if len(remaining) < len(prompts):
        kept_text = f"{len(prompts) - len(remaining)} of {pluralize(len(prompts), 'request')}"
        print(f"in the output already: {kept_text}", file=sys.stderr)
    return remaining

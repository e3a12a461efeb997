"""The demo's requests, and a collector of their records. No jax, no terminal."""

import contextlib
import json
import os
import stat
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from ipc import wire
from jax_specdec.cli.prompts import prompt_lines, unescape
from jax_specdec.engine.updates import Update
from jax_specdec.export import openai
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.record import Record
from jax_specdec.records.statistics import Statistics
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.text import byte_tokens
from jax_specdec.text.detokenize import TokenTable

SAMPLED_TOP_P = 0.95
MODEL = "jax-specdec-tiny"

# Prompt, tokens to emit, K (None: no logprobs), temperature. At every moment one with K = 20 runs:
# the largest K of a batch is part of its program, and a second program costs a start two seconds.
_PROMPTS: tuple[tuple[str, int, int | None, float], ...] = (
    ("def __init__(self, ", 56, 20, 0.0),
    ("import os\nimport sys\nimport ", 48, 0, 0.0),
    ("    def test_", 64, 3, 0.7),
    ("class Error(Exception):\n    ", 72, 1, 0.0),
    ("for i in range(", 40, None, 0.0),
    ("    raise ValueError(", 56, 5, 0.0),
    ('    """Return the ', 80, 2, 0.5),
    ("if __name__ == ", 32, 10, 0.0),
    ("        self.assertEqual(", 64, 20, 0.9),
    ("    while True:\n        ", 72, None, 0.8),
    ("# This module ", 88, 4, 0.6),
    ("    with open(", 48, 8, 0.0),
    (
        "def is_power_of_two(number):\n    return number > 0 and number & (number - 1) == 0\n\n\n"
        "def is_even(number):\n    return ",
        48,
        5,
        0.0,
    ),
    ("    except (", 40, 0, 0.0),
    ("    parser.add_argument(", 96, 20, 0.4),
    ("        return ", 24, 20, 1.0),
    ("from collections import ", 32, 6, 0.0),
    ("    @property\n    def ", 48, None, 0.0),
)


def default_requests() -> list[Request]:
    """Built-in prompts of many lengths, greedy and sampled, with K from 0 to 20 or no logprobs."""
    return [
        _request(index, text, max_tokens, k, temperature)
        for index, (text, max_tokens, k, temperature) in enumerate(_PROMPTS)
    ]


def requests_from_file(path: Path, max_tokens: int = 64) -> list[Request]:
    r"""A greedy request with K = 5 for each line of a UTF-8 file; empty lines are skipped.

    In a line, `\n`, `\t` and `\\` stand for the characters that they name.
    """
    return [
        _request(index, unescape(line), max_tokens, 5, 0.0)
        for index, (_, line) in enumerate(prompt_lines(path))
    ]


def _request(index: int, text: str, max_tokens: int, k: int | None, temperature: float) -> Request:
    ids = tuple(byte_tokens.encode(text, start_document=True).tolist())
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=_top_p(temperature),
        seed=index,
        stop_token_ids=(byte_tokens.EOS_ID,),
        logprobs=k,
    )
    return Request(id=f"{index:02d}", prompt_token_ids=ids, params=params)


def _top_p(temperature: float) -> float:
    """The top-p of every request: sampled ones keep the nucleus, greedy ones need none."""
    return SAMPLED_TOP_P if temperature > 0 else 1.0


def with_options(
    requests: Sequence[Request],
    *,
    k: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    no_logprobs: bool = False,
    draft_logprobs: bool = False,
) -> list[Request]:
    """The requests with the options of the command line, which hold for all of them."""
    changed = []
    for request in requests:
        params = request.params
        if k is not None:
            params = replace(params, logprobs=k)
        if temperature is not None:
            params = replace(params, temperature=temperature, top_p=_top_p(temperature))
        if max_tokens is not None:
            params = replace(params, max_tokens=max_tokens)
        if no_logprobs:
            params = replace(params, logprobs=None)
        if draft_logprobs:
            params = replace(params, draft_logprobs=True)
        changed.append(replace(request, params=params))
    return changed


@dataclass
class Output:
    """One request and its records so far.

    Attributes:
      request: the request.
      records: its records, in the order of their steps.
      token_ids: all tokens of the records.
      token_logprobs: each token's own logprob; None where no logprobs were asked for.
      token_ranks: each token's rank; None where no logprobs were asked for.
      token_accepted: whether each token was a draft.
      num_drafts, num_accepted: drafts that were verified, and those of them that were accepted.
      draft_logprobs: the draft model's logprob of each draft that was verified; empty where they
        were not asked for, or there is no draft model.
    """

    request: Request
    records: list[Record] = field(default_factory=list, init=False)
    token_ids: list[int] = field(default_factory=list, init=False)
    token_logprobs: list[float] | None = field(init=False)
    token_ranks: list[int] | None = field(init=False)
    token_accepted: list[bool] = field(default_factory=list, init=False)
    num_drafts: int = field(default=0, init=False)
    num_accepted: int = field(default=0, init=False)
    draft_logprobs: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        asked = self.request.params.logprobs is not None
        self.token_logprobs, self.token_ranks = ([], []) if asked else (None, None)

    def add(self, record: Record) -> None:
        """Append the next record of this request."""
        self.records.append(record)
        self.token_ids += record.token_ids.tolist()
        self.token_accepted += [at < record.num_accepted for at in range(record.num_tokens)]
        self.num_drafts += record.num_drafts
        self.num_accepted += record.num_accepted
        logprobs, ranks = record.logprobs, record.token_ranks
        if self.token_logprobs is not None and logprobs is not None:
            self.token_logprobs += logprobs[:, 0].tolist()
        if self.token_ranks is not None and ranks is not None:
            self.token_ranks += ranks.tolist()
        drafts = None if record.draft is None else record.draft.logprobs
        if drafts is not None:
            self.draft_logprobs += drafts[:, 0].tolist()

    @property
    def prompt_text(self) -> str:
        return byte_tokens.decode(self.request.prompt_token_ids[1:])

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.records[-1].finish_reason if self.records else None

    @property
    def statistics(self) -> Statistics | None:
        """What speculation did, once the request has ended."""
        return self.records[-1].statistics if self.records else None

    @property
    def mean_logprob(self) -> float | None:
        total = self.records[-1].cumulative_logprob if self.records else None
        return None if total is None else total / max(self.num_tokens, 1)

    @property
    def mean_draft_logprob(self) -> float | None:
        """The mean of `draft_logprobs`; None where there are none."""
        return statistics.fmean(self.draft_logprobs) if self.draft_logprobs else None


@dataclass
class Collector:
    """The records of all requests, and the messages that brought them.

    Only messages that the engine delivered count, and not those that workers sent after the last
    request had ended. The messages of a lost worker and of its replacement count together.

    Attributes:
      outputs: the outputs by request id.
      messages_of: the number of messages by process rank.
      bytes_of: the bytes of these messages by process rank.
      payload_bytes: the bytes of ids, logprobs and ranks alone.
      latencies_ns: the transport latency of each message.
    """

    outputs: dict[str, Output]
    messages_of: Counter[int] = field(default_factory=Counter)
    bytes_of: Counter[int] = field(default_factory=Counter)
    payload_bytes: int = 0
    latencies_ns: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Collector":
        return cls({request.id: Output(request) for request in requests})

    def add(self, update: Update) -> None:
        for record in update.records:
            self.outputs[record.request_id].add(record)
        if update.message is None or update.latency_ns is None:
            return
        message = update.message
        fixed = wire.HEADER_WORDS + wire.SLOT_WORDS * message.num_slots
        self.messages_of[message.process_rank] += 1
        self.bytes_of[message.process_rank] += message.num_bytes
        self.payload_bytes += message.num_bytes - wire.WORD_BYTES * fixed
        self.latencies_ns.append(update.latency_ns)

    @property
    def messages(self) -> int:
        """The number of messages of all process ranks."""
        return self.messages_of.total()

    @property
    def message_bytes(self) -> int:
        """The bytes of the messages of all process ranks."""
        return self.bytes_of.total()

    def latency_us(self, share: float) -> float:
        """The transport latency that `share` of the messages stay below, in microseconds."""
        if len(self.latencies_ns) < 2:
            return self.latencies_ns[0] / 1e3 if self.latencies_ns else 0.0
        return statistics.quantiles(self.latencies_ns, n=100)[round(share * 100) - 1] / 1e3

    @property
    def total(self) -> Statistics:
        found = [output.statistics for output in self.outputs.values()]
        return sum((one for one in found if one is not None), Statistics())


def open_json(path: Path) -> TextIO:
    """Open the file that is written at the end, so that an error comes before the work.

    The file keeps its content until `write_json`.

    Raises:
      OSError: the file cannot be written, or is a directory.
    """
    return path.open("a", encoding="utf-8")


def write_json(file: TextIO, collector: Collector) -> None:
    """Replace the content of `file` by one OpenAI-style completion a line, in request order.

    Raises:
      OSError: the records cannot be written whole; the earlier content is gone.
    """
    try:
        _write_json(file, collector)
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # closed later, it would fail where no code catches it
            file.close()
        raise OSError(error.errno, error.strerror, file.name) from error


def _write_json(file: TextIO, collector: Collector) -> None:
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe or /dev/null has nothing to cut
        file.truncate(0)
    table, created = token_table(), int(time.time())
    for output in collector.outputs.values():
        found = openai.completion(
            output.request, output.records, table, model=MODEL, created=created
        )
        file.write(json.dumps(found, allow_nan=False) + "\n")


def token_table() -> TokenTable:
    """The strings of the byte tokenizer, whose special tokens are no part of a text."""
    special = range(256, byte_tokens.VOCAB_SIZE)
    return TokenTable(
        byte_tokens.token_bytes, {id: byte_tokens.token_bytes(id).decode() for id in special}
    )

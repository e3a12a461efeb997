"""From message bytes to per-request outputs: columns against lists, objects, msgpack and pickle.

Every contender starts from the bytes of one step and ends with each request's tokens, logprobs,
ranks and top K, cut by the stop rules and counted in the request's statistics. Ours are views that
are made when they are read, so that all of them are read: record by record, as streams do, and by
columns, as exports and trainers do. The content is compared first. Messages of msgpack and pickle
hold the same lists and are only decoded: their users pay that much before any of the work. All of
it is one thread's, so its CPU time is what is compared: other programs take none of it.
"""

import gc
import pickle
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import msgpack
import numpy as np

from bench.timing import Comparison, Target, compare
from ipc import wire
from ipc.wire import Kind
from jax_specdec.export.token_parts import TokenParts, token_parts
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorState, admit, step
from jax_specdec.records.record import Records
from jax_specdec.requests import Request, SamplingParams

Bytes = bytes | bytearray
TOKENS = 3  # of a request in a step: two drafts, both accepted
VOCABULARY = 131072
STOP = VOCABULARY - 1  # no message has this token, so every call does the same work

ALIKE, MIXED = f"{TOKENS}", f"1 to {TOKENS}"  # tokens of each request in a step
QUICK = (  # requests, K and tokens
    *((8, 20, tokens) for tokens in (MIXED, ALIKE)),
    *((requests, k, ALIKE) for requests, k in ((64, 20), (256, 0), (256, 20), (512, 20))),
)
FULL = (
    *((requests, k, ALIKE) for requests in (1, 8, 64, 512) for k in (0, 5, 20)),
    *((256, k, ALIKE) for k in (0, 1, 5, 10, 20)),
    *((requests, 20, MIXED) for requests in (1, 8, 64, 512)),
)
STREAM = 16  # messages that come in turn, where their numbers of tokens differ

RECORDS, COLUMNS = "ours, record by record", "ours, by columns"
STEP, STEP_PLACE = struct.Struct("<I"), wire.WORD_BYTES * wire.HEADER["step_low"].word
FEW, FEW_MICROSECONDS = 8, 40  # requests, and what a message of so many may take
MANY = 64  # requests from which on views must be worth their price
COLUMNS_OVER_LISTS = 1 / 0.9
LISTS, OBJECTS = "lists a token", "objects in dicts"


@dataclass
class Logprob:
    """One candidate of one token, as in vLLM's `vllm.logprobs.Logprob`."""

    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass
class RequestProgress:
    """State of one request, for the contenders without columns."""

    max_tokens: int
    stop_token_ids: frozenset[int]
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    steps: int = 0
    drafts: int = 0
    accepted: int = 0


def message_bytes(num_slots: int, k: int, tokens: str = ALIKE, seed: int = 0) -> bytes:
    """A target message of random logprobs: some tokens and K columns for every slot."""
    rng = np.random.default_rng(seed)
    slots = []
    for _ in range(num_slots):
        count = TOKENS if tokens == ALIKE else int(rng.integers(1, TOKENS + 1))
        logprobs = -np.sort(rng.exponential(size=(count, k + 1)).astype(np.float32))
        token_ids = rng.choice(STOP, count, replace=False)
        topk_ids = rng.integers(0, STOP, (count, k))
        if k:
            topk_ids[:, 0] = token_ids  # the usual case: the most likely token was emitted
            logprobs[:, 1] = logprobs[:, 0]
        slots.append(
            SlotContents(
                generation=1,
                num_drafts=TOKENS - 1,
                columns=k + 1,
                token_ids=token_ids,
                token_ranks=np.ones(count, np.int32),
                logprobs=logprobs,
                topk_ids=topk_ids,
            )
        )
    return encode(Kind.TARGET, 0, slots)


class Stream:
    """`state, records = step(state, decode(data))` of one message after the other.

    The state goes on, so that nothing is put off to a step that is never timed.
    """

    def __init__(self, state: ProcessorState) -> None:
        self.state, self.steps = state, 0

    def __call__(self, data: bytearray) -> Records:
        """The records of a message, which gets the number of the next step."""
        STEP.pack_into(data, STEP_PLACE, self.steps)
        self.steps += 1
        self.state, records = step(self.state, decode(data))
        return records


def columns(num_slots: int, k: int) -> Stream:
    """This project's way, for requests that end with no message."""
    state = ProcessorState.empty(num_slots)
    params = SamplingParams(max_tokens=2**31 - 1, logprobs=k, stop_token_ids=(STOP,))
    for slot in range(num_slots):
        request = Request(id=str(slot), prompt_token_ids=(1,), params=params)
        state = admit(state, slot, 1, request)
    return Stream(state)


Row = tuple[list[int], list[float], list[list[int]], list[list[float]], list[int]]


def sections(data: Bytes) -> tuple[list[list[int]], list[int], list[int], list[float], list[int]]:
    """Counts, ids, ranks, logprobs and top ids as flat lists: one `tolist` each, no validation."""
    words = np.frombuffer(data, np.uint32)
    begin = wire.HEADER_WORDS
    end = begin + int(words[3]) * wire.SLOT_WORDS
    slots = words[begin:end].reshape(-1, wire.SLOT_WORDS)
    num_tokens, columns = slots[:, 1] & 0xFFFF, slots[:, 0] >> 16
    num_drafts = slots[:, 2] & 0xFFFF
    total, cells = int(num_tokens.sum()), int((num_tokens * columns).sum())
    ids, ranks, logprobs, topk = np.split(words[end:], np.cumsum([total, total, cells]))
    counts = np.stack([num_tokens, columns, num_drafts], axis=1).tolist()
    return (
        counts,
        ids.view(np.int32).tolist(),
        ranks.view(np.int32).tolist(),
        logprobs.view(np.float32).tolist(),
        topk.view(np.int32).tolist(),
    )


def account(progress: RequestProgress, ids: list[int], drafts: int) -> int:
    """Apply one request's stop rules, count its statistics; returns how many tokens to keep."""
    progress.steps += 1
    progress.drafts += drafts
    progress.accepted += len(ids) - 1
    for n, token in enumerate(ids, 1):
        progress.num_tokens += 1
        if token in progress.stop_token_ids or progress.num_tokens >= progress.max_tokens:
            return n
    return len(ids)


def new_progress(num_slots: int) -> list[RequestProgress]:
    """Requests that no message of this benchmark ends."""
    return [RequestProgress(2**31 - 1, frozenset({STOP})) for _ in range(num_slots)]


def lists(num_slots: int) -> Callable[[Bytes], list[Row]]:
    """The seed system's way: slice to the columns that exist, `tolist` once, then lists a token."""
    progress = new_progress(num_slots)

    def call(data: Bytes) -> list[Row]:
        counts, ids, ranks, logprobs, topk = sections(data)
        token = cell = top = 0
        outputs: list[Row] = []
        for request, (n, width, drafts) in zip(progress, counts, strict=True):
            kept = account(request, ids[token : token + n], drafts)
            chosen, rows, tops = [], [], []
            for j in range(kept):
                row = logprobs[cell + j * width : cell + (j + 1) * width]
                chosen.append(row[0])
                request.cumulative_logprob += row[0]
                rows.append(row)
                tops.append(topk[top + j * (width - 1) : top + (j + 1) * (width - 1)])
            outputs.append(
                (ids[token : token + kept], chosen, tops, rows, ranks[token : token + kept])
            )
            token, cell, top = token + n, cell + n * width, top + n * (width - 1)
        return outputs

    return call


def objects(num_slots: int) -> Callable[[Bytes], list[list[dict[int, Logprob]]]]:
    """vLLM's LogprobsProcessor in short: an object for each candidate, a dictionary a token."""
    progress = new_progress(num_slots)

    def call(data: Bytes) -> list[list[dict[int, Logprob]]]:
        counts, ids, ranks, logprobs, topk = sections(data)
        token = cell = top = 0
        outputs = []
        for request, (n, width, drafts) in zip(progress, counts, strict=True):
            kept = account(request, ids[token : token + n], drafts)
            k, positions = width - 1, []
            for j in range(kept):
                row = logprobs[cell + j * width : cell + (j + 1) * width]
                candidates = topk[top + j * k : top + (j + 1) * k]
                request.cumulative_logprob += row[0]
                ranked = range(1, k + 1)
                by_id = {
                    id: Logprob(logprob, rank)
                    for id, logprob, rank in zip(candidates, row[1:], ranked, strict=True)
                }
                by_id[ids[token + j]] = Logprob(row[0], ranks[token + j])
                positions.append(by_id)
            outputs.append(positions)
            token, cell, top = token + n, cell + n * width, top + n * k
        return outputs

    return call


def touched(records: Records) -> list[tuple[Any, ...]]:
    """All arrays of every request that asked for logprobs."""
    return [
        (record.token_ids, rows[:, 0], record.topk_ids, rows, record.token_ranks)
        for record in records
        if (rows := record.logprobs) is not None
    ]


def by_columns(records: Records) -> TokenParts:
    """All arrays of all requests at once."""
    return token_parts(records.batches)


def rows_of(parts: TokenParts) -> list[tuple[Any, ...]]:
    """What `touched` makes, from columns."""
    columns, rows = parts.columns, []
    top = len(columns["topk.ids"]) // len(parts.row)
    shape = len(parts.row), top
    ids, logprobs = (columns[f"topk.{name}"].reshape(shape) for name in ("ids", "logprobs"))
    for request in range(len(parts.requests)):
        at = parts.row == request
        chosen = columns["logprob"][at]
        table = np.concatenate([chosen[:, None], logprobs[at]], axis=1)
        rows.append((columns["token_id"][at], chosen, ids[at], table, columns["token_rank"][at]))
    return rows


def as_lists(result: Any) -> list[Row]:
    """The delivered content in one form, for the comparison before any timing."""
    rows = rows_of(result) if isinstance(result, TokenParts) else result
    return [
        tuple(part.tolist() if isinstance(part, np.ndarray) else part for part in row)
        for row in rows
    ]


def same_content(name: str, expected: Any, actual: Any) -> None:
    """Raises AssertionError unless both hold the same tokens, logprobs and ranks."""
    rows = as_lists(expected)
    if name != OBJECTS:
        assert as_lists(actual) == rows
        return
    for (ids, _, tops, logprobs, ranks), positions in zip(rows, actual, strict=True):
        for id, top, row, rank, by_id in zip(ids, tops, logprobs, ranks, positions, strict=True):
            wanted = {**dict(zip(top, row[1:], strict=True)), id: row[0]}
            assert {candidate: entry.logprob for candidate, entry in by_id.items()} == wanted
            assert by_id[id].rank == rank


def messages(num_slots: int, k: int, tokens: str) -> list[bytearray]:
    """The messages of a stream, in turn."""
    number = 1 if tokens == ALIKE else STREAM
    return [bytearray(message_bytes(num_slots, k, tokens, seed=seed)) for seed in range(number)]


def contenders(num_slots: int, k: int, tokens: str = ALIKE) -> dict[str, Callable[[], Any]]:
    """The designs that do the whole work, from the same bytes, message after message."""

    def of_each(call: Callable[[bytearray], Any]) -> Callable[[], Any]:
        stream = cycle(messages(num_slots, k, tokens))
        return lambda: call(next(stream))

    ours, also_ours = columns(num_slots, k), columns(num_slots, k)
    return {
        RECORDS: of_each(lambda data: touched(ours(data))),
        COLUMNS: of_each(lambda data: by_columns(also_ours(data))),
        LISTS: of_each(lists(num_slots)),
        OBJECTS: of_each(objects(num_slots)),
    }


def transports(num_slots: int, k: int, tokens: str = ALIKE) -> dict[str, Callable[[], Any]]:
    """The finished lists in other encodings, which are decoded and nothing else."""
    rows = as_lists(lists(num_slots)(messages(num_slots, k, tokens)[0]))
    pickled, packed = pickle.dumps(rows, pickle.HIGHEST_PROTOCOL), msgpack.packb(rows)
    return {
        "pickle, decoding alone": lambda: pickle.loads(pickled),
        "msgpack, decoding alone": lambda: msgpack.unpackb(packed),
    }


def run(quick: bool) -> list[Comparison]:
    """Measure batches of 8 to 512 requests with K from 0 to 20; `quick` takes the extremes."""
    return [measure(*shape, quick=quick) for shape in (QUICK if quick else FULL)]


def measure(num_slots: int, k: int, tokens: str, *, quick: bool) -> Comparison:
    """Measure all contenders on the messages of a stream."""
    calls = contenders(num_slots, k, tokens) | transports(num_slots, k, tokens)
    comparison = compare(
        f"bytes to records: {num_slots} requests x {tokens} tokens, K = {k}",
        calls,
        check=same_content,
        rounds=5 if quick else 15,
        min_seconds=0.01 if quick else 0.02,
        settings={"requests": num_slots, "tokens": tokens, "k": k, "gc": gc.isenabled()},
        clock=time.process_time,
    )
    targets = []
    if num_slots <= FEW:
        name = "microseconds a message, record by record"
        targets.append(Target(name, FEW_MICROSECONDS, 1e6 * comparison[RECORDS].median, "us"))
    if num_slots >= MANY:
        targets += [
            Target(f"speed over lists, {name}", wanted, comparison.speedup(name, LISTS), "x", True)
            for name, wanted in ((RECORDS, 1.0), (COLUMNS, COLUMNS_OVER_LISTS))
        ]
    notes = {"message bytes": len(message_bytes(num_slots, k, tokens))}
    return replace(comparison, notes=notes, targets=tuple(targets))

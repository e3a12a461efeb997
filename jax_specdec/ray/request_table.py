"""The requests of a fleet: which wait, which replica has which, and what was delivered.

Nothing here knows Ray or threads: whoever holds it locks it.
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.engine.queued_request import QueuedRequest, ended
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.prompt_columns import START, prompt_span
from jax_specdec.export.step_rows import step_rows
from jax_specdec.ray.batch import ColumnBatch
from jax_specdec.ray.replica_types import Submission
from jax_specdec.ray.routes import Load, Routes
from jax_specdec.records.batch import FinishReason, RecordBatch
from jax_specdec.records.processor_state import Progress
from jax_specdec.requests import Request


class BatchError(RuntimeError):
    """A replica's batch contradicts what it delivered before; says which request, and where."""


@dataclass(eq=False)
class Entry:
    """An open request.

    Attributes:
      consumer: who gets its rows.
      priority: those with a lower one are sent out before it.
      due: seconds of the monotonic clock, when it ends; None: never.
      replica: that has it; None while it waits.
      key: its name there. Each stay has another one, so that nothing of an earlier stay counts.
      losses: numbers of the losses of replicas that had it.
      tokens: what was delivered, batch by batch; copies.
      count: how many they are.
      cumulative_logprob: over these.
      prompt_rows: rows of the prompt's logprobs that were delivered.
    """

    request: Request
    consumer: Any
    priority: int = 0
    due: float | None = None
    replica: int | None = None
    key: str = ""
    losses: tuple[int, ...] = ()
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    count: int = 0
    cumulative_logprob: float = 0.0
    prompt_rows: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.request.packed_prompt) // 4

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still emit."""
        return self.request.params.max_tokens - self.count

    @property
    def progress(self) -> Progress | None:
        """The delivered part; None where nothing was."""
        if not (self.count or self.prompt_rows):
            return None
        asks = self.request.params.num_columns
        return Progress(
            token_ids=tuple(token_id for part in self.tokens for token_id in part.tolist()),
            cumulative_logprob=self.cumulative_logprob if asks else None,
            num_prompt_rows=self.prompt_rows,
        )

    def submission(self, now: float) -> Submission:
        """The request for a replica."""
        request = copy.copy(self.request)
        object.__setattr__(request, "id", self.key)
        return Submission(
            request=request,
            progress=self.progress,
            deadline=None if self.due is None else max(self.due - now, 0.0),
            priority=self.priority,
        )


class RequestTable:
    """Open requests by id, those that wait in their order, and the replicas' loads."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.entries: dict[str, Entry] = {}
        self._by_key: dict[str, Entry] = {}
        self._keys = itertools.count()
        self._waiting: WaitingQueue[Entry] = WaitingQueue()

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has."""
        return len(self._waiting)

    def add(self, entry: Entry, *, first: bool = False) -> None:
        """Let a request wait, behind the others of its priority or before them."""
        entry.replica = None
        self._by_key.pop(entry.key, None)
        self.entries[entry.request.id] = entry
        (self._waiting.appendleft if first else self._waiting.append)(entry)

    def join(self, replica: int, load: Load) -> None:
        """Let a replica have requests."""
        self.routes.loads[replica] = load

    def assigned(self) -> dict[int, list[Entry]]:
        """Give what waits to the replicas that have room; who gets which."""
        by_replica: dict[int, list[Entry]] = {}
        while (entry := next(iter(self._waiting), None)) is not None:
            prompt = entry.request.packed_prompt
            replica = self.routes.choose(prompt)
            if replica is None:
                break
            self._waiting.popleft()
            entry.replica, entry.key = replica, str(next(self._keys))
            self._by_key[entry.key] = entry
            self.routes.add(replica, prompt, entry.prompt_length + entry.tokens_left)
            by_replica.setdefault(replica, []).append(entry)
        return by_replica

    def take(self, rows: Any, replica: int) -> tuple[ColumnBatch, list[Entry]]:
        """Note what a replica has delivered; the batch, and whose its rows are.

        Rows of requests that have ended here are dropped.

        Raises:
          BatchError: a row does not begin where the one before it ended.
        """
        keys = rows.column("request_id").to_pylist()
        batch = ColumnBatch(rows, (), replica)
        ids, offsets = batch.token_ids, batch.offsets.tolist()
        positions, reasons = batch.positions.tolist(), batch.finish_reasons.tolist()
        sums = rows.column("cumulative_logprob").to_numpy().tolist()
        prompts = rows.schema.get_field_index(START) >= 0
        requests: list[Request] = []
        entries: list[Entry] = []
        taken: list[int] = []
        for row, key in enumerate(keys):
            entry = self._by_key.get(key)
            if entry is None:
                continue
            begin, end = offsets[row], offsets[row + 1]
            if positions[row] != entry.prompt_length + entry.count:
                raise BatchError(
                    f"request {entry.request.id!r}: a row begins at position {positions[row]}, "
                    f"behind {entry.count} tokens of a prompt of {entry.prompt_length}"
                )
            if prompts:
                self._note_prompt(entry, rows, row)
            if end > begin:
                entry.tokens.append(ids[begin:end].copy())
                entry.count += end - begin
                self.routes.emitted(replica, end - begin)
            entry.cumulative_logprob = sums[row]
            if reasons[row]:
                self._end(entry)
            taken.append(row)
            requests.append(entry.request)
            entries.append(entry)
        pa = pyarrow()
        if len(taken) < len(keys):
            rows = rows.take(pa.array(taken, pa.int64()))
        names = pa.array([request.id for request in requests], pa.string())
        place = rows.schema.get_field_index("request_id")
        return ColumnBatch(rows.set_column(place, "request_id", names), requests, replica), entries

    def _note_prompt(self, entry: Entry, rows: Any, row: int) -> None:
        """Count the rows of a prompt's logprobs; BatchError where they do not go on."""
        begin, end = prompt_span(rows, row)
        start = rows.column(START)[row].as_py()
        first = entry.request.first_scored or 1
        if end > begin and start != entry.prompt_rows + first:
            raise BatchError(
                f"request {entry.request.id!r}: logprobs of its prompt begin at token {start}, "
                f"behind {entry.prompt_rows} rows from token {first} on"
            )
        entry.prompt_rows += end - begin

    def lose(
        self, replica: int, *, number: int, resume: bool, max_attempts: int
    ) -> list[tuple[Entry, FinishReason]]:
        """Take a lost replica's requests back; those that end, and why. The others wait.

        Args:
          number: of the loss.
        """
        self.routes.forget(replica)
        ends, again = [], []
        for entry in list(self.entries.values()):
            if entry.replica != replica:
                continue
            entry.losses += (number,)
            if not resume:
                ends.append((entry, FinishReason.WORKER_LOST))
            elif len(entry.losses) >= max_attempts:
                ends.append((entry, FinishReason.ATTEMPTS_EXHAUSTED))
            else:
                again.append(entry)
        for entry, _ in ends:
            self._end(entry)
        for entry in reversed(again):
            self.add(entry, first=True)
        return ends

    def blamed(self, replica: int, *, max_attempts: int) -> Entry | None:
        """The request that the loss of a replica is put down to: its only one, lost too often."""
        entries = [entry for entry in self.entries.values() if entry.replica == replica]
        if len(entries) == 1 and len(entries[0].losses) + 1 >= max_attempts:
            return entries[0]
        return None

    def drop(self, entry: Entry) -> None:
        """Forget a request that ends here."""
        if self.entries.get(entry.request.id) is entry:
            self._end(entry)

    def all(self) -> Iterator[Entry]:
        """Every open request."""
        return iter(list(self.entries.values()))

    def _end(self, entry: Entry) -> None:
        name = entry.request.id
        del self.entries[name]
        self._by_key.pop(entry.key, None)
        if entry.replica is not None:
            self.routes.end(entry.replica, entry.prompt_length + entry.tokens_left)
        else:
            self._waiting.take(name)


def end_rows(ends: Sequence[tuple[Entry, FinishReason]]) -> ColumnBatch:
    """The last rows of requests that no replica ends."""
    batches: list[RecordBatch] = []
    emitted: dict[str, int] = {}
    for entry, reason in ends:
        emitted[entry.request.id] = entry.count
        queued = QueuedRequest(request=entry.request, progress=entry.progress or Progress())
        batches += ended(queued, reason).batches
    return ColumnBatch(step_rows(batches, emitted), [entry.request for entry, _ in ends])

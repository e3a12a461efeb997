"""The engine's side of the end-to-end benchmark: a process of its own that never imports jax.

It receives the messages of one contender in one round at a time, and turns them into per-request
results in that contender's way: in columns (`decode` and `output_processor`), or as objects for
each token (`bench.host`).
"""

import gc
import multiprocessing
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench import host
from bench.loop.content import Step, content_of
from bench.ring.contenders import (
    QueueReceiver,
    QueueSender,
    Receiver,
    RingReceiver,
    RingSender,
    Sender,
)
from bench.ring.link import start_unattended
from bench.timing import BenchError
from ipc import wire
from ipc.wire import Kind
from jax_specdec.records import output_processor
from jax_specdec.records.decode import Message, decode
from jax_specdec.records.output_processor import ProcessorState
from jax_specdec.records.record import Records
from jax_specdec.requests import Request

PATIENCE_SECONDS = 60.0
GENERATION = 1  # of every slot: a slot keeps its request for the whole run
RING, QUEUE = "ring", "multiprocessing.Queue"  # transports

# The columns of a round's table, which has a row for each step.
PROCESSED, CPU, BYTES, TOKENS, ROWS = range(5)


@dataclass(frozen=True)
class Round:
    """One round in the consumer's eyes; times in ns of CLOCK_MONOTONIC."""

    table: np.ndarray  # [steps, 5] int64
    content: list[Step]  # empty unless `Consumer.begin` had `keep`


class Consumer:
    """The process, its transports, and its commands."""

    def __init__(self, num_slots: int) -> None:
        """Start it with a receiver for each transport."""
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        queue = QueueReceiver()  # which reaches a process only at its start
        self._process = context.Process(target=_main, args=(theirs, queue, num_slots), daemon=True)
        start_unattended(self._process)
        theirs.close()
        self.senders: dict[str, Sender] = {
            RING: RingSender(self._answer()), QUEUE: QueueSender(queue.address)
        }  # fmt: skip

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def begin(
        self,
        transport: str,
        design: str,
        requests: Sequence[Request],
        keep: bool = False,
    ) -> None:
        """Prepare a round of these requests, one for each slot.

        Args:
          transport: the name of the transport that brings the messages.
          design: a key of `DESIGNS`.
          requests: in the order of the slots.
          keep: whether the round's result has the messages' content.
        """
        self._control.send((transport, design, list(requests), keep))
        self._answer()

    def end(self) -> Round:
        """The round's result; call it after `end_of_round`."""
        result: Round = self._answer()
        return result

    def close(self) -> None:
        """End the process."""
        for sender in self.senders.values():
            sender.close()
        if self._process.is_alive():
            self._control.send(None)
            self._process.join(5)  # it is idle, unless an error ended a round early
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._control.close()

    def _answer(self) -> Any:
        try:
            if not self._control.poll(PATIENCE_SECONDS):
                raise BenchError("the benchmark's consumer process does not answer")
            answer = self._control.recv()
        except EOFError:
            raise BenchError("the benchmark's consumer process has ended") from None
        if isinstance(answer, BaseException):
            raise BenchError(f"the benchmark's consumer process failed: {answer!r}") from answer
        return answer


NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.float32))


def send(sender: Sender, words: np.ndarray) -> None:
    """Send one message through any transport; through the ring as `Worker` does."""
    if isinstance(sender, RingSender):
        sender.writer.send(words)
        return
    sender.send(time.monotonic_ns(), (*NOTHING, words))


def end_of_round(sender: Sender) -> None:
    """Send the empty message that ends a round."""
    send(sender, np.zeros(0, np.uint32))


def _main(control: Connection, queue: QueueReceiver, num_slots: int) -> None:
    ring = RingReceiver()
    receivers: dict[str, Receiver] = {RING: ring, QUEUE: queue}
    control.send(ring.address)
    try:
        for transport, design, requests, keep in iter(control.recv, None):
            take = DESIGNS[design](requests, num_slots)
            gc.collect()
            control.send("ready")
            control.send(_round(_receiver_of(receivers[transport]), take, keep))
    except EOFError:
        pass
    except Exception as error:  # the measuring process reports it and ends
        control.send(error)
    finally:
        for receiver in receivers.values():
            receiver.close()


Take = Callable[[Any], Any]  # a message's bytes to results

_NUM_WORDS = struct.Struct("<I")
_NUM_WORDS_AT = wire.HEADER["num_words"].word * wire.WORD_BYTES


def _round(receive: Callable[[], Any], take: Take, keep: bool) -> Round:
    """Process every message until an empty one; work for the table alone follows the last clock."""
    table: list[tuple[int, ...]] = []
    content: list[Step] = []
    clock, cpu = time.monotonic_ns, time.process_time_ns
    while num_bytes := memoryview(data := receive()).nbytes:
        message, size = data, _NUM_WORDS.unpack_from(data, _NUM_WORDS_AT)[0] * wire.WORD_BYTES
        if size != num_bytes:  # a message of fixed size is longer than its content
            message = memoryview(data).cast("B")[:size]
        results = take(message)
        processed, used = clock(), cpu()
        words = np.frombuffer(message, "<u4")
        is_target = int(wire.HEADER["kind"].get(words)) == Kind.TARGET
        if is_target:
            table.append((processed, used, num_bytes, *_counts(words)))
        else:  # a draft message belongs to the step before it
            last = table.pop()
            table.append((processed, used, last[BYTES] + num_bytes, *last[TOKENS:]))
        if keep and is_target:
            content.append(content_of(results))
        elif keep:  # records that waited for the logprobs of their drafts
            content[-1] = {**content[-1], **content_of(results)}
        del data, words, message, results
    return Round(np.array(table, np.int64).reshape(-1, 5), content)


def _receiver_of(receiver: Receiver) -> Callable[[], Any]:
    """A function for the next message's bytes; from the ring it receives as the engine does."""
    if isinstance(receiver, RingReceiver):
        reader = receiver.reader
        return lambda: reader.receive().data
    return lambda: receiver.receive()[3]


def _counts(words: np.ndarray) -> tuple[int, int]:
    """The numbers of tokens and of rows with logprobs in a target message."""
    begin = wire.HEADER_WORDS
    slots = words[begin : begin + int(words[3]) * wire.SLOT_WORDS].reshape(-1, wire.SLOT_WORDS)
    return int((slots[:, 1] & 0xFFFF).sum()), int((slots[:, 1] >> 16).sum())


class TokenColumns:
    """This project's way: the engine's decoder and output processor, and every array is read."""

    def __init__(self, requests: Sequence[Request], num_slots: int) -> None:
        # A round continues where the last one ended: its first step may have any number.
        self.state = ProcessorState.empty(num_slots, first_step=None)
        for slot, request in enumerate(requests):
            self.state = output_processor.admit(self.state, slot, GENERATION, request)

    def __call__(self, data: Any) -> tuple[Message, Records]:
        message = decode(data)
        self.state, records = output_processor.step(self.state, message)
        for record in records:  # views are made when they are read
            _ = record.token_ids, record.logprobs, record.topk_ids, record.token_ranks
        return message, records


DESIGNS: dict[str, Callable[[Sequence[Request], int], Take]] = {
    "columns": TokenColumns,
    "objects": lambda _, num_slots: host.objects(num_slots),
}

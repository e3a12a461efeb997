"""The process that compiles what strangers send: what it cannot do in its bounds ends nobody else.

    python -P -m jax_specdec.structured.gate_process TEXTS VOCAB_SIZE

It reads the model's tokens once, and makes a copy of itself (fork) for each structure, with limits
of CPU time and memory. What is asked comes as lines of JSON on its standard input, and answers go
out as such: see `gate.py`. It ends with that pipe, and its copies with it.
"""

import collections
import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from jax_specdec.child import die_with_parent, leave_signals_to_parent
from jax_specdec.requests import RequestError, Structured
from jax_specdec.structured.limits import GrammarLimits
from jax_specdec.structured.matcher import Matcher
from jax_specdec.structured.vocabulary import Vocabulary, read_vocabulary

STDIN, STDOUT = 0, 1
_LESS = 10  # priority: what is served comes first
MOST_WORDS = 4096  # bytes of an answer, which a pipe takes at once
CLOCK_LOOK_MS = 500  # between two looks at the clock


@dataclass
class Copy:
    """A copy at work.

    Attributes:
      number: of what was asked.
      pid: of its process.
      ended: readable once it has ended.
      answer: where it writes why the structure is refused, if it is.
      until: when it is ended, in seconds of a monotonic clock.
    """

    number: int
    pid: int
    ended: int
    answer: int
    until: float


class GateProcess:
    """A process that is asked about structures, runs copies of itself, and answers."""

    def __init__(self, vocabulary: Vocabulary | str, limits: GrammarLimits) -> None:
        """Begin with nothing.

        Args:
          vocabulary: of the model; or why there is none, which is every answer then.
          limits: of each copy, and of their number.
        """
        self._vocabulary, self._limits = vocabulary, limits
        self._waiting: collections.OrderedDict[int, list[Any]] = collections.OrderedDict()
        self._copies: dict[int, Copy] = {}  # by the descriptor that says that it has ended
        self._came = b""
        self._poll = select.poll()
        self._poll.register(STDIN, select.POLLIN)

    def serve(self) -> None:
        """Answer until the pipe ends."""
        while True:
            for descriptor, _ in self._poll.poll(CLOCK_LOOK_MS if self._copies else None):
                if descriptor == STDIN:
                    if not self._hear():
                        return
                elif descriptor in self._copies:
                    self._end(self._copies[descriptor])
            for copy in list(self._copies.values()):
                if time.monotonic() > copy.until:
                    os.kill(copy.pid, signal.SIGKILL)
            while self._waiting and len(self._copies) < self._limits.at_once:
                self._begin(*self._waiting.popitem(last=False))

    def _hear(self) -> bool:
        """Take what has come; whether more may come."""
        data = os.read(STDIN, 1 << 16)
        *lines, self._came = (self._came + data).split(b"\n")
        for line in lines:
            number, *job = json.loads(line)
            if job:
                self._waiting[number] = job
            else:  # nobody waits for it any more
                self._waiting.pop(number, None)
                for copy in self._copies.values():
                    if copy.number == number:
                        os.kill(copy.pid, signal.SIGKILL)
        return bool(data)

    def _begin(self, number: int, job: list[Any]) -> None:
        if isinstance(self._vocabulary, str):
            _say(number, self._vocabulary)
            return
        read_end, write_end = os.pipe()
        gate, pid = os.getpid(), os.fork()
        if not pid:
            os.close(read_end)
            self._compile(gate, self._vocabulary, write_end, *job)
        os.close(write_end)
        copy = Copy(
            number, pid, os.pidfd_open(pid), read_end, time.monotonic() + self._limits.seconds
        )
        self._copies[copy.ended] = copy
        self._poll.register(copy.ended, select.POLLIN)

    def _end(self, copy: Copy) -> None:
        """Answer what a copy has found out, or that it could not."""
        del self._copies[copy.ended]
        self._poll.unregister(copy.ended)
        _, status = os.waitpid(copy.pid, 0)
        why = os.read(copy.answer, MOST_WORDS).decode()
        if not why and status:
            why = self._limits.exceeded
        for descriptor in (copy.ended, copy.answer):
            os.close(descriptor)
        _say(copy.number, why)

    def _compile(
        self, gate: int, vocabulary: Vocabulary, answer: int, kind: str, text: str, stops: list[int]
    ) -> NoReturn:
        """In a copy: compile, and go some tokens on; the answer is why the structure is refused."""
        status = 1
        with contextlib.suppress(BaseException):  # the library may panic
            die_with_parent(gate)
            null_device = os.open(os.devnull, os.O_RDWR)
            for descriptor in (STDIN, STDOUT, 2):  # it prints when it panics
                os.dup2(null_device, descriptor)
            os.nice(_LESS)  # reading the tokens, which the first structure waits for, was not
            self._limits.take()
            try:
                Matcher(vocabulary, Structured(kind, text), stops).try_texts()
            except RequestError as error:
                os.write(answer, str(error).encode()[:MOST_WORDS])
            status = 0
        os._exit(status)


def _say(number: int, why: str) -> None:
    os.write(STDOUT, json.dumps([number, why]).encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Entry point; the arguments are those of `read_vocabulary`, and the limits."""
    texts, vocab_size, *numbers = arguments
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary: Vocabulary | str
    try:
        vocabulary = read_vocabulary(texts, int(vocab_size))
    except RequestError as error:
        vocabulary = str(error)
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
        GateProcess(vocabulary, GrammarLimits(*map(int, numbers))).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

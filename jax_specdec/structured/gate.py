"""Structures are compiled first in a process of its own, with limits; what passes is served.

The time and memory that a grammar takes cannot be told from its text, and llguidance cannot be
stopped. A matcher cannot be handed to another process: so this is a gate, and a worker compiles
again what has passed. The process is started with the first structure and kept.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from dataclasses import astuple

from jax_specdec.requests import Structured
from jax_specdec.structured.limits import GateFull, GrammarLimits

MOST_KEPT = 4096  # answers
MOST_WAITING = 64  # structures that are compiled or wait for that
# -P: a file in the current directory must not shadow a module of it.
PROGRAM = (sys.executable, "-P", "-m", "jax_specdec.structured.gate_process")


ProcessLines = queue.SimpleQueue[bytes | None]  # to the process; None ends it


class _Asked:
    """A structure that is compiled, and who waits for it."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.waiters: list[Future[str]] = []


class GrammarGate:
    """Asks the process; any thread may use it, and none waits for it in a call."""

    def __init__(self, texts: str, vocab_size: int, limits: GrammarLimits | None = None) -> None:
        """Start nothing yet; arguments as of `read_vocabulary`, and limits of each structure."""
        numbers = map(str, (vocab_size, *astuple(limits or GrammarLimits())))
        self._command = [*PROGRAM, texts, *numbers]
        self._lock = threading.RLock()  # a future that is cancelled calls back at once
        self._answers: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._asked: dict[int, _Asked] = {}  # by number
        self._numbers_of: dict[bytes, int] = {}
        self._numbers = itertools.count(1)
        self._lines: ProcessLines | None = None  # to the process; None: there is none
        self._end: weakref.finalize | None = None

    def past_answer(self, structured: Structured, stop_token_ids: tuple[int, ...]) -> str | None:
        """The answer of `ask` from before; None where there is none, or it is long ago."""
        key = _key(structured, stop_token_ids)
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)

    def ask(self, structured: Structured, stop_token_ids: tuple[int, ...]) -> "Future[str]":
        """Why a structure cannot be served; "" where it can.

        Whoever does not wait any more cancels the future: where nobody is left, the compilation
        ends.

        Raises:
          GateFull: too many wait.
        """
        key = _key(structured, stop_token_ids)
        question = [structured.kind, structured.text, [*stop_token_ids]]
        future: Future[str] = Future()
        with self._lock:
            if (answer := self._answers.get(key)) is not None:
                future.set_result(answer)
                return future
            number = self._numbers_of.get(key)
            if number is None:
                if len(self._asked) >= MOST_WAITING:
                    raise GateFull(
                        f"{MOST_WAITING} structures wait to be compiled, as many as may: try again "
                        "later"
                    )
                number = next(self._numbers)
                self._asked[number], self._numbers_of[key] = _Asked(key), number
                self._tell([number, *question])
            self._asked[number].waiters.append(future)
        future.add_done_callback(lambda done: self._leave(number, done))
        return future

    def close(self) -> None:
        """End the process; whoever waits is told so."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end()

    def _leave(self, number: int, future: "Future[str]") -> None:
        """Forget one who does not wait any more; the last one ends the compilation."""
        if not future.cancelled():
            return
        with self._lock:
            question = self._asked.get(number)
            if question is None or future not in question.waiters:
                return
            question.waiters.remove(future)
            if not question.waiters:
                del self._asked[number], self._numbers_of[question.key]
                self._tell([number])

    def _tell(self, line: list[object]) -> None:
        """Let a line be written to the process, which is started where there is none."""
        if self._lines is None:
            lines = self._lines = ProcessLines()
            self._end = weakref.finalize(self, lines.put, None)
            threading.Thread(
                target=_talk, args=(weakref.ref(self), self._command, lines), name="gate",
                daemon=True,
            ).start()  # fmt: skip
        self._lines.put(json.dumps(line).encode() + b"\n")

    def _answer(self, number: int, why: str) -> None:
        with self._lock:
            question = self._asked.pop(number, None)
            if question is None:  # nobody waits any more
                return
            del self._numbers_of[question.key]
            self._answers[question.key] = why
            if len(self._answers) > MOST_KEPT:
                self._answers.popitem(last=False)
        _tell_all(question.waiters, why)

    def _lost(self, lines: ProcessLines, why: str) -> None:
        """Tell those who wait that the process has ended; the next structure starts another one."""
        with self._lock:
            if self._lines is not lines:
                return
            self._lines, self._end = None, None
            waiting = [future for question in self._asked.values() for future in question.waiters]
            self._asked.clear()
            self._numbers_of.clear()
        _tell_all(waiting, f"structured: {why}: try again")


def _key(structured: Structured, stop_token_ids: tuple[int, ...]) -> bytes:
    """A key that tells structures apart, and keeps none of them."""
    question = [structured.kind, structured.text, [*stop_token_ids]]
    return hashlib.sha256(json.dumps(question).encode()).digest()


def _tell_all(futures: "list[Future[str]]", why: str) -> None:
    for future in futures:
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            future.set_result(why)


def _talk(gate: "weakref.ref[GrammarGate]", command: list[str], lines: ProcessLines) -> None:
    """Run the process, and write lines to it until None comes; does not keep the gate alive."""
    why = "the process that compiles structures has ended"
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What reads a tokenizer.json warns of copies, unless it has one thread.
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            process_group=0,  # a terminal's Ctrl-C reaches only the engine
        )
    except OSError as error:
        why = f"no process that compiles structures can be started ({error})"
    else:
        hears = threading.Thread(target=_hear, args=(gate, process, lines), daemon=True)
        hears.start()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            while (line := lines.get()) is not None:
                process.stdin.write(line)
                process.stdin.flush()
        process.kill()
        with contextlib.suppress(OSError):
            process.stdin.close()
        hears.join()
        process.wait()
    if (live_gate := gate()) is not None:
        live_gate._lost(lines, why)


def _hear(
    gate: "weakref.ref[GrammarGate]", process: subprocess.Popen[bytes], lines: ProcessLines
) -> None:
    """Take answers until the process ends."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            number, why = json.loads(line)
            if (live_gate := gate()) is not None:
                live_gate._answer(number, why)
            del live_gate
    lines.put(None)

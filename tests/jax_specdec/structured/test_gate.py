"""Structures are compiled in a process of its own: its limits, its ends, and who waits for it."""

import asyncio
import gc
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from jax_specdec.declaration import USUAL
from jax_specdec.requests import Request, RequestError, SamplingParams, Structured
from jax_specdec.structured import gate
from jax_specdec.structured.checks import StructureChecks
from jax_specdec.structured.gate import GrammarGate
from jax_specdec.structured.limits import GateFull, GrammarLimits
from jax_specdec.text import byte_tokens
from tests.support.processes import children_of, ended, is_alive, wait_for
from tests.support.scene import Scene

STOPS = (byte_tokens.EOS_ID,)
SMALL = Structured("regex", "[ab]{3}")
# What the last digits tell of is not bounded by its number: it takes seconds, and hundreds of MiB.
FACTORS = range(1, 13, 2)
LARGE = Structured(
    "json_schema",
    json.dumps({"type": "object", "required": [f"k{n}" for n in FACTORS],
                "properties": {f"k{n}": {"type": "integer", "multipleOf": n << 19}
                               for n in FACTORS}}),
)  # fmt: skip
PATIENT = GrammarLimits(cpu=60, mib=2048, seconds=60)


def gate_processes(parent=None):
    """Ids of the processes that compile for this one."""
    children = children_of(os.getpid() if parent is None else parent)
    name = b"jax_specdec.structured.gate_process"
    return [pid for pid in children if is_alive(pid) and name in command_line(pid)]


def command_line(pid):
    """That of a process; nothing where it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or read
        return b""


def copies():
    """Ids of those that compile now."""
    return [copy for pid in gate_processes() for copy in children_of(pid) if is_alive(copy)]


@pytest.fixture
def gates():
    """Makes gates, all of which are closed with the test."""
    made = []

    def make(limits=None):
        made.append(GrammarGate("", byte_tokens.VOCAB_SIZE, limits))
        return made[-1]

    yield make
    for one in made:
        one.close()
    wait_for(lambda: not gate_processes())


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (GrammarLimits(cpu=1, mib=2048), "takes more than 1 seconds of a processor or 2048 MiB"),
        (GrammarLimits(cpu=60, mib=16), "takes more than 60 seconds of a processor or 16 MiB"),
        (GrammarLimits(cpu=60, mib=2048, seconds=0), "make it smaller"),
    ],
)
def test_what_takes_too_much_is_refused(limits, said, gates):
    one = gates(limits)
    assert said in one.ask(LARGE, STOPS).result(60)
    assert one.ask(SMALL, STOPS).result(60) == (
        "" if limits.seconds else one.past_answer(SMALL, STOPS)
    )


def test_small_structures_pass_while_large_ones_compile(gates):
    one = gates(PATIENT)
    assert one.ask(SMALL, STOPS).result(60) == ""
    large = one.ask(LARGE, STOPS)
    wait_for(copies)
    assert one.ask(Structured("regex", "[cd]"), STOPS).result(60) == ""
    assert not large.done()
    large.cancel()


def test_the_last_one_who_leaves_ends_a_compilation(gates):
    one = gates(PATIENT)
    waiting = [one.ask(LARGE, STOPS) for _ in range(2)]
    wait_for(copies)
    (copy,) = copies()  # both wait for one
    waiting[0].cancel()
    assert one.ask(SMALL, STOPS).result(60) == ""  # the process has heard all that was said before
    assert copies() == [copy]
    waiting[1].cancel()
    wait_for(lambda: not copies())
    assert one.past_answer(LARGE, STOPS) is None  # it is not known to be refused


def test_a_cancelled_task_ends_a_compilation():
    checks = StructureChecks("", byte_tokens.VOCAB_SIZE, PATIENT)
    params = SamplingParams(structured=LARGE, stop_token_ids=STOPS)
    request = Request(id="r", prompt_token_ids=(1,), params=params)

    async def leave():
        task = asyncio.ensure_future(checks.check_async(request))
        while not copies():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    wait_for(lambda: not copies())
    checks.close()


def test_whoever_waits_learns_of_the_end_of_the_process(gates):
    """And the next structure starts another one; what was answered is known without it."""
    one = gates(PATIENT)
    assert one.ask(SMALL, STOPS).result(60) == ""
    large = one.ask(LARGE, STOPS)
    wait_for(copies)
    (pid,), (copy,) = gate_processes(), copies()
    os.kill(pid, signal.SIGKILL)
    assert (
        large.result(60) == "structured: the process that compiles structures has ended: try again"
    )
    wait_for(lambda: not is_alive(copy))
    assert one.ask(SMALL, STOPS).result(0) == ""
    assert gate_processes() == []
    assert one.ask(Structured("regex", "x"), STOPS).result(60) == ""


def test_a_process_that_cannot_be_started_is_said(gates, monkeypatch):
    monkeypatch.setattr(gate, "PROGRAM", ("/nowhere/python",))
    assert "can be started ([Errno 2]" in gates().ask(SMALL, STOPS).result(60)


def test_signals_of_a_service_do_not_end_it(gates):
    one = gates()
    assert one.ask(SMALL, STOPS).result(60) == ""
    (pid,) = gate_processes()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert one.ask(Structured("regex", "x"), STOPS).result(60) == ""
    assert gate_processes() == [pid]


def test_it_ends_with_who_asks():
    one = GrammarGate("", byte_tokens.VOCAB_SIZE)
    assert one.ask(SMALL, STOPS).result(60) == ""
    del one  # without close()
    gc.collect()
    wait_for(lambda: not gate_processes())
    code = (
        "import os\n"
        "from tests.jax_specdec.structured import test_gate as t\n"
        "one = t.GrammarGate('', t.byte_tokens.VOCAB_SIZE, t.PATIENT)\n"
        "one.ask(t.SMALL, t.STOPS).result(60); one.ask(t.LARGE, t.STOPS)\n"
        "t.wait_for(t.copies)\n"
        "print(*t.gate_processes(), *t.copies(), flush=True); os.kill(os.getpid(), 9)"
    )
    done = ended("-c", code)
    pids = [int(pid) for pid in done.stdout.split()]
    assert (len(pids), done.returncode) == (2, -9)
    wait_for(lambda: not any(map(is_alive, pids)))


def test_no_more_wait_than_may(gates, monkeypatch):
    monkeypatch.setattr(gate, "MOST_WAITING", 2)
    one = gates(PATIENT)
    waiting = [one.ask(Structured("json_schema", LARGE.text + " " * n), STOPS) for n in range(2)]
    with pytest.raises(GateFull, match="2 structures wait to be compiled, as many as may"):
        one.ask(SMALL, STOPS)
    waiting[0].cancel()
    assert one.ask(SMALL, STOPS).result(60) == ""
    waiting[1].cancel()


SERVED = [
    Structured("choice", json.dumps([f"word{n * 7919 % 100003}" for n in range(4000)])),
    Structured("json_schema", json.dumps({"type": "object",
               "properties": {f"k{n}": {"type": "string"} for n in range(1500)}})),
    Structured("choice", '["", "a"]'),
    Structured("choice", '[""]'),
    Structured("grammar", 'start: "a" start | "b"'),
    Structured("grammar", "start: A start\nA: /[a-z]/"),
]  # fmt: skip
DIE = [
    (Structured("regex", "(a?){5000}a{5000}"), "too many expressions"),
    (Structured("grammar", 'start: "a" start'), "Too many items"),
    (Structured("grammar", 'start: "ab" start'), "Too many items"),
]


def test_structures_that_always_die_are_refused_when_asked(gates):
    """A text that begins goes on: the first token of those that are refused ended it."""
    one = gates()
    for structured in SERVED:
        assert one.ask(structured, STOPS).result(60) == "", structured
    for structured, why in DIE:
        assert why in one.ask(structured, STOPS).result(60)


def test_checks_name_the_request():
    checks = StructureChecks("", byte_tokens.VOCAB_SIZE)
    params = SamplingParams(structured=DIE[0][0], stop_token_ids=STOPS)
    request = Request(id="mine", prompt_token_ids=(1,), params=params)
    for _ in range(2):  # the second answer is known
        with pytest.raises(RequestError, match=r"^request 'mine': structured: the regex cannot"):
            checks.check(request)
    checks.close()


def test_a_server_that_serves_structures_begins_with_the_gate():
    """What an engine's `serve` starts: the first structure then waits for no process."""
    wait_for(lambda: not gate_processes())  # of a test before this one
    checks = StructureChecks("", byte_tokens.VOCAB_SIZE)
    try:
        assert gate_processes() == []
        checks.begin()
        wait_for(gate_processes)
    finally:
        checks.close()
    wait_for(lambda: not gate_processes())
    for serves, begun in ((USUAL, True), (replace(USUAL, grammars=False), False)):
        engine = Scene(serves=serves).engine
        with mock.patch.object(StructureChecks, "begin") as begin:
            engine.serve()
        assert begin.called == begun

"""What admitting a long prompt costs the engine's thread: its tokens are copied, never touched.

Work is counted in lines of Python and in allocated bytes, which no machine changes. Its CPU time is
measured by `.ci/heavy engine`.
"""

import sys
import tracemalloc

import pytest

from jax_specdec.control import Pulse, to_bytes
from jax_specdec.engine.devices import Share
from tests.support.linked_session import LONG, admission, linked_session, request, session_of

PROMPT = 4 * LONG  # bytes of its ids as they travel


class MuteWorker:
    """Packs its commands, and sends them nowhere."""

    ring, pulse, share, pid = None, Pulse(), Share(), 0

    def tell(self, command):
        return len(to_bytes(command))


class TouchingWorker(MuteWorker):
    """Has a list of the ids while it packs them."""

    def tell(self, command):
        ids = list(command.request.prompt_token_ids)
        return super().tell(command) + len(ids)


def lines_of(call):
    lines, before = 0, sys.gettrace()

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def bytes_of(call):
    """The most that is allocated at one time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def grows_by(cost, worker, emitted):
    """How much more of `cost` the admission of a long prompt has than that of a short one."""
    session = session_of(worker)
    asked = [request(f"r{n}", length) for n, length in enumerate((1, 1, LONG))]
    _, short, long = (cost(admission(session, each, emitted)) for each in asked)
    return long - short


@pytest.mark.parametrize("emitted", [0, 50])
def test_a_long_prompt_takes_as_many_lines_as_a_short_one(emitted):
    assert grows_by(lines_of, MuteWorker(), emitted) <= 20
    # Negative control: who makes the request does touch them.
    assert lines_of(lambda: request("another", LONG)) > LONG


@pytest.mark.parametrize("emitted", [0, 50])
def test_a_long_prompt_is_copied_and_none_of_its_tokens_becomes_an_object(emitted):
    """Ids travel as one array of int32: a message of them, and what packs it, which grows."""
    copies = (3 if emitted else 2) + 0.6  # with the tokens so far the prompt is joined first
    assert grows_by(bytes_of, MuteWorker(), emitted) <= copies * PROMPT
    assert grows_by(bytes_of, TouchingWorker(), emitted) > copies * PROMPT  # the negative control


@pytest.mark.parametrize("emitted", [0, 50])
def test_a_long_prompt_reaches_the_worker(tmp_path, emitted):
    with linked_session(tmp_path) as (session, client):
        for number in range(3):
            admission(session, request(str(number), LONG), emitted)()
        commands = [client.commands.get(timeout=60) for _ in range(3)]
    lengths = {len(command.request.prompt_token_ids) for command in commands}
    assert lengths == {LONG + emitted}

"""Slots are given to groups in turn, and a share is kept for groups that have none."""

import collections
import random

import pytest

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.turns import Turns, kept_slots
from jax_specdec.requests import Request
from tests.support.http_server import WaitingWorker, serving, until


def one(name, group="", priority=0, **more):
    request = Request(id=name, prompt_token_ids=(1,))
    return QueuedRequest(request=request, priority=priority, group=group, **more)


def filled(names):
    """A queue of requests such as "a1", whose group is "a"; "-" has none."""
    queue = Turns()
    for name in names.split():
        queue.append(one(name, "" if name[0] == "-" else name[0]))
    return queue


def popped(queue, num_slots, running=()):
    """The order in which as many get a slot as there are, where none ends."""
    holding, found, free = {name[0] for name in running}, [], num_slots - len(running)
    while free:
        queued = queue.pop(holding, all_slots=free > kept_slots(num_slots))
        if queued is None:
            break
        holding |= {queued.group} - {""}
        found.append(queued.request.id)
        free -= 1
    return " ".join(found)


@pytest.mark.parametrize(
    ("waiting", "num_slots", "order"),
    [
        ("a1 a2 a3 a4", 4, "a1 a2 a3"),  # a slot is kept
        ("a1 a2 a3 -1", 4, "a1 -1 a2"),  # a new one comes before a group's second
        ("a1 a2 b1 b2 a3 -1 -2", 8, "a1 b1 -1 -2 a2 b2 a3"),
        ("-1 -2 -3 -4", 4, "-1 -2 -3 -4"),  # without groups: all slots, in their order
        ("a1 a2", 1, "a1"),
        ("a1 a2 a3", 2, "a1"),
        ("a1 a2 a3 a4 b1", 2, "a1 b1"),
        (" ".join(f"a{n}" for n in range(20)), 16, " ".join(f"a{n}" for n in range(14))),
    ],
)
def test_slots_go_to_groups_in_turn(waiting, num_slots, order):
    queue = filled(waiting)
    assert popped(queue, num_slots) == order
    assert len(queue) == len(waiting.split()) - len(order.split())


def test_a_group_that_has_no_slot_any_more_may_take_the_kept_one():
    queue = filled("a2 a3")
    assert popped(queue, 2, ["a1"]) == ""
    assert popped(queue, 2, ["-1"]) == "a2"
    assert popped(queue, 2, ["a2"]) == ""
    assert popped(queue, 2) == "a3"


def test_priorities_come_before_turns():
    queue = Turns()
    for queued in (one("a1", "a", 1), one("a2", "a", 1), one("b1", "b", 2), one("c", "", 3)):
        queue.append(queued)
    assert popped(queue, 8) == "a1 a2 b1 c"


def test_what_was_taken_out_of_a_slot_goes_before_all():
    queue = filled("a2 a3 -1")
    queue.appendleft(one("a1", "a", had_slot=True))
    assert popped(queue, 2, ["a0"]) == "a1"


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled(seed):
    """Random lives: every request leaves once, and the order within a group is that of arrival."""
    rng, queue, inside = random.Random(seed), Turns(), {}
    left, running = collections.defaultdict(list), []
    for number in range(400):
        match rng.choice(("append", "append", "pop", "pop", "take", "end", "left")):
            case "append":
                queued = one(f"r{number}", rng.choice(["", "a", "b", "c"]), rng.randint(0, 1))
                queue.append(queued)
                inside[queued.request.id] = queued
            case "left" if running:
                queued = running.pop()
                again = one(queued.request.id, queued.group, queued.priority, had_slot=True)
                queue.appendleft(again)
                inside[again.request.id] = again
            case "pop":
                holding = {each.group for each in running}
                queued = queue.pop(holding, all_slots=len(running) < 6)
                if queued is not None:
                    assert inside.pop(queued.request.id) is queued
                    running.append(queued)
                    if not queued.had_slot and queued.group:
                        left[queued.group, queued.priority].append(int(queued.request.id[1:]))
                else:
                    assert not inside or len(running) >= 6
            case "take":
                name = f"r{rng.randrange(number + 1)}"
                assert queue.take(name) is inside.pop(name, None)
            case "end" if running:
                running.pop(rng.randrange(len(running)))
        assert len(queue) == len(inside)
        assert {each.request.id for each in queue} == inside.keys()


@pytest.mark.parametrize("body", [{"n": 8}, {"prompt": ["a", "b", "c", "d", "e"]}])
def test_choices_of_one_request_leave_a_slot_to_the_next(body):
    """Through the server; a request with one choice takes the slot that is kept."""
    with serving(worker=WaitingWorker, num_slots=4) as server:
        many = server.ask_later(**{"prompt": "ab", "max_tokens": 5} | body)

        def running():
            return server.engine.status[0].request_ids

        until(lambda: len(running()) == 3)
        single = server.ask_later(prompt="c", max_tokens=3)
        until(lambda: len(running()) == 4)
        groups = collections.Counter(name.rpartition("-")[0] for name in running())
        assert sorted(groups.values()) == [1, 3]
        server.workers[0].allowed.release(1000)
        assert single.result().is_success
        assert len(many.result().json()["choices"]) == body.get("n", 5)

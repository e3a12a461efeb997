"""Requests that wait: their order, and that taking one costs the same however many there are.

Work is the number of lines of Python that run, and of comparisons of ids: no timing.
"""

import collections
import itertools
import random
import sys

import pytest

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Request, SamplingParams
from tests.support.scene import Scene

pytestmark = pytest.mark.fast


class Id(str):
    """An id that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Id.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def queued(name, priority=0):
    request = Request(id=Id(name), prompt_token_ids=(1,))
    return QueuedRequest(request=request, priority=priority)


def work(call):
    """What a call returns, and the lines and comparisons that it took."""
    lines, Id.compared, before = 0, 0, sys.gettrace()

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result, lines + Id.compared


@pytest.mark.parametrize("seed", range(20))
def test_priorities_come_first_and_arrivals_within_them(seed):
    """A sorted list gives the same order; `appendleft` goes before its own priority only."""
    rng, queue, model = random.Random(seed), WaitingQueue(), []
    for number in range(200):
        one = queued(f"r{number}", rng.randint(-2, 2))
        match rng.choice(("append", "append", "appendleft", "popleft", "take")):
            case "append":
                queue.append(one)
                model.append((one.priority, number, one))
            case "appendleft":
                queue.appendleft(one)
                model.append((one.priority, -number, one))
            case "popleft" if model:
                model.sort(key=lambda each: each[:2])
                assert queue.popleft() is model.pop(0)[2]
            case "take" if model:
                gone = model.pop(rng.randrange(len(model)))
                assert queue.take(gone[2].request.id) is gone[2]
        model.sort(key=lambda each: each[:2])
        assert list(queue) == [one for _, _, one in model]
        assert len(queue) == len(model)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_queue(seed):
    """The same operations on a deque give the same order."""
    rng, queue, model = random.Random(seed), WaitingQueue(), collections.deque()
    for number in range(200):
        one = queued(f"r{number}")
        match rng.choice(("append", "append", "appendleft", "popleft", "take", "extend", "clear")):
            case "popleft" if model:
                assert queue.popleft() is model.popleft()
            case "take":
                name = f"r{rng.randrange(number + 1)}"
                found = next((other for other in model if other.request.id == name), None)
                assert queue.take(name) is found
                model = collections.deque(other for other in model if other is not found)
            case "extend":
                for each in (queue, model):
                    each.extend([one])
            case "clear" if rng.random() < 0.1:
                queue.clear()
                model.clear()
            case "append" | "appendleft" as where:
                for each in (queue, model):
                    getattr(each, where)(one)
        assert list(queue) == list(model)
        assert (len(queue), bool(queue)) == (len(model), bool(model))


def waiting_engine(count):
    """An engine with two slots, and `count` requests behind them; its updates."""
    params = SamplingParams(max_tokens=40)
    requests = [
        Request(id=Id(f"r{n}"), prompt_token_ids=(n % 7,), params=params) for n in range(count)
    ]
    scene = Scene(num_slots=2)
    updates = scene.generate(requests)
    next(updates)
    return scene.engine, updates


def work_of_aborts(count):
    """The most that aborting one of `count` requests took: the first, the last, and in between."""
    engine, updates = waiting_engine(count)
    names = [Id(f"r{n}") for n in (count - 1, count // 2, 2, count - 2, 3)]
    costs = []
    for name in names:
        done, cost = work(lambda name=name: engine._scheduler.abort(name))
        assert done
        costs.append(cost)
    assert not engine._scheduler.abort("nobody")
    assert not engine._scheduler.abort(names[0])  # it has ended
    ended = [record for update in itertools.islice(updates, 6) for record in update.records]
    assert {r.request_id for r in ended if r.finish_reason is FinishReason.ABORT} == set(names)
    updates.close()
    engine.close()
    return max(costs)


def test_aborting_a_request_costs_the_same_however_many_wait():
    assert work_of_aborts(1000) <= 1.1 * work_of_aborts(50)


def test_that_check_can_fail(monkeypatch):
    """A queue that looks for the id, as it once was."""
    take = WaitingQueue.take

    def search(queue, request_id):
        for one in list(queue):
            if one.request.id == request_id:
                return take(queue, request_id)
        return None

    monkeypatch.setattr(WaitingQueue, "take", search)
    assert work_of_aborts(1000) > 10 * work_of_aborts(50)


def work_of_admissions(count):
    """The most that admitting one request took, and giving its slot back, with `count` waiting."""
    engine, updates = waiting_engine(count)
    (session,) = engine.sessions
    costs = []
    for _ in range(5):
        name = session.request_ids[0]
        costs.append(work(lambda name=name: engine._scheduler.abort(name))[1])  # releases its slot
        costs.append(work(engine._scheduler._admit)[1])
        assert len(session.request_ids) == 2
    updates.close()
    engine.close()
    return max(costs)


def test_admitting_and_releasing_cost_the_same_however_many_wait():
    assert work_of_admissions(1000) <= 1.1 * work_of_admissions(50)

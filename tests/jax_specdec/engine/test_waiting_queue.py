"""Requests that wait: their order."""

import random

import pytest

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.requests import Request

OPERATIONS = ("append", "append", "appendleft", "extend", "popleft", "take", "take", "clear")


@pytest.mark.parametrize("seed", range(20))
def test_priorities_come_first_and_arrivals_within_them(seed):
    """A sorted list gives the same order; `appendleft` goes before its own priority only."""
    rng, queue, model = random.Random(seed), WaitingQueue(), []
    for number in range(300):
        request = Request(id=f"r{number}", prompt_token_ids=(1,))
        one = QueuedRequest(request=request, priority=rng.randint(-2, 2))
        match rng.choice(OPERATIONS):
            case "append" | "extend" as how:
                getattr(queue, how)(one if how == "append" else [one])
                model.append((one.priority, number, one))
            case "appendleft":
                queue.appendleft(one)
                model.append((one.priority, -number, one))
            case "popleft" if model:
                assert queue.popleft() is model.pop(0)[2]
            case "take":
                name = f"r{rng.randrange(number + 1)}"
                found = [each for each in model if each[2].request.id == name]
                assert queue.take(name) is (found[0][2] if found else None)
                model = [each for each in model if each not in found]
            case "clear" if rng.random() < 0.05:
                queue.clear()
                model.clear()
        model.sort(key=lambda each: each[:2])
        assert list(queue) == [one for _, _, one in model]
        assert (len(queue), bool(queue)) == (len(model), bool(model))

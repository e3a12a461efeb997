"""What the engine's thread pays: the same however many requests wait.

Work is counted in lines of Python and comparisons of ids, which no machine changes.
"""

from jax_specdec.records.batch import FinishReason
from tests.support.decoding_cost import lines_of
from tests.support.requests import request
from tests.support.scene import Scene


class Id(str):
    """An id that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Id.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def work(call):
    """The lines and comparisons that a call took."""
    Id.compared = 0
    return lines_of(call)[0] + Id.compared


def work_with(count):
    """The most that each action took with two slots and `count` requests behind them."""
    scene = Scene(num_slots=2)
    scheduler, (session,) = scene.scheduler, scene.engine.sessions
    requests = [request(Id(f"r{n}"), (n % 7,), max_tokens=40) for n in range(count)]
    updates = scene.generate(requests)
    next(updates)
    names = [Id(f"r{n}") for n in (count - 1, count // 2, 2, count - 2, 3)]
    aborts = [work(lambda name=name: scheduler.abort(name)) for name in names]
    scheduler.abort("nobody")
    scheduler.abort(names[0])  # it has ended
    assert len(scheduler.fresh_updates) == len(names)
    ended = [record for _ in names for record in next(updates).records]
    assert {r.request_id for r in ended if r.finish_reason is FinishReason.ABORT} == {*names}
    releases, admissions = [], []
    for _ in range(5):
        releases.append(work(lambda: scheduler.abort(session.request_ids[0])))
        admissions.append(work(scheduler.admit))
        assert len(session.request_ids) == 2
    updates.close()
    scene.engine.close()
    return max(aborts), max(releases), max(admissions)


def test_aborting_and_admitting_cost_the_same_however_many_wait():
    for many, few in zip(work_with(1000), work_with(50), strict=True):
        assert 10 < many <= 1.1 * few

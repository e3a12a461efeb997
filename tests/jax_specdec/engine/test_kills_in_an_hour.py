"""An hour of the simulated clock in which workers are killed: no request is lost, and each death
has one line of the log."""

import logging
import random
from dataclasses import replace

import pytest

from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.records.batch import FinishReason
from tests.support.scene import long_requests
from tests.support.scripted_worker import ScriptedWorker
from tests.support.streaming import StreamingScene

pytestmark = pytest.mark.fast

HOUR, KILLS = 3600, 12


class Plain(ScriptedWorker):
    """Emits a token a step."""

    def propose(self, slot):
        return []


def hour(*, num_ranks, seed, **config):
    """A request every 20 seconds, some of which last for minutes, and a kill every 300."""
    rng = random.Random(seed)
    scene = StreamingScene(
        worker=Plain, num_slots=4, num_ranks=num_ranks, on_worker_loss="restart",
        resume_lost=True, **config,
    )  # fmt: skip
    requests = iter(long_requests(HOUR // 20))
    kills = [n * HOUR // KILLS + rng.randrange(60) for n in range(KILLS)]
    for second in range(HOUR):
        scene.clock.time = max(scene.clock.time, float(second))
        if second % 20 == 0:
            request = next(requests)
            params = replace(request.params, max_tokens=rng.choice((1, 5, 20, 60)))
            scene.submit(replace(request, params=params))
        if second in kills:
            worker = rng.choice(scene.engine.sessions).worker
            worker.dies_after = worker.sent
        scene.round()
        for name in scene.streams:
            scene.take(name)
    scene.finish()
    return scene


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_kills_lose_no_request_and_each_death_has_one_line(num_ranks, seed, caplog):
    with caplog.at_level(logging.INFO, logger="jax_specdec.engine"):
        scene = hour(num_ranks=num_ranks, seed=seed)
    reasons = {stream.finish_reason for stream in scene.streams.values()}
    assert reasons == {FinishReason.LENGTH}
    assert sum(one.restarts for one in scene.engine.sessions) == KILLS
    said = [record.getMessage() for record in caplog.records]
    deaths = [line for line in said if line.startswith("a worker is lost")]
    assert len(deaths) == KILLS
    assert not any("\n" in line for line in said)
    assert len([line for line in said if "a new worker was started" in line]) == KILLS
    assert len([line for line in said if "takes requests" in line]) == KILLS + num_ranks
    scene.engine.close()


def test_more_kills_than_the_window_allows_stop_the_engine():
    """The negative control: the same hour where all of it is the window."""
    with pytest.raises(WorkerFailed):
        hour(num_ranks=1, seed=0, restart_window=HOUR)


def test_losses_count_until_they_are_as_old_as_the_window():
    scene = StreamingScene(num_slots=1, on_worker_loss="restart", resume_lost=True,
                           max_restarts=2, restart_window=100.0, restart_delay=0.5)  # fmt: skip
    workers = scene.workers

    def kill():
        count = len(workers)
        workers[-1].dies_after = workers[-1].sent
        while len(workers) == count:
            scene.round()

    kill()
    kill()
    scene.clock.time += 95
    with pytest.raises(WorkerFailed):
        kill()
    scene = StreamingScene(num_slots=1, on_worker_loss="restart", resume_lost=True,
                           max_restarts=2, restart_window=100.0, restart_delay=0.5)  # fmt: skip
    workers = scene.workers
    for _ in range(9):
        kill()
        scene.clock.time += 60
    assert len(workers) == 10


def test_a_worker_that_never_takes_requests_is_not_started_for_ever():
    """However long each takes to fail."""

    class Broken(ScriptedWorker):
        pulse = property(lambda self: replace(super().pulse, ready=False))

        def try_receive(self):
            scene.clock.time += 1000
            self.dies_after = self.sent
            return super().try_receive()

    scene = StreamingScene(worker=Broken, num_slots=1, on_worker_loss="restart")
    request = long_requests(1)[0]
    scene.submit(request)
    with pytest.raises(WorkerFailed):
        scene.finish()
    assert len(scene.workers) == 4

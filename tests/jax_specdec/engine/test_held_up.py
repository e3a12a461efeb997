"""A worker whose heartbeats are held up is no lost one while it works; a stopped one is."""

import functools
import os
import signal
import time

from jax_specdec.control import Release
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerProcess
from tests.support import held_up_process
from tests.support.processes import wait_for

LIMIT = 2.0


def test_a_worker_that_cannot_send_heartbeats_is_lost_once_it_is_stopped():
    config = EngineConfig(vocab_size=9, heartbeat_timeout=LIMIT)
    start = functools.partial(WorkerProcess, program=held_up_process.WORKER)
    with Engine(config, start_worker=start) as engine:
        (session,) = engine.sessions

        def look():
            engine._workers._next_look = 0.0
            engine._workers.look()
            time.sleep(0.02)
            return session

        wait_for(lambda: look().status.phase == ("loading 1 of 3",))
        session.worker.tell(Release(slot=0, generation=0))
        wait_for(lambda: look().worker.pulse.taken == 1)
        begun = session.worker.pulse.beats
        wait_for(lambda: look()._heart._beats.seconds > 1.5 * LIMIT)
        assert session.worker.pulse.beats <= begun + 1  # the one that was under way
        assert session.alive
        os.kill(session.worker.pid, signal.SIGSTOP)
        wait_for(lambda: not look().alive)
        assert "no heartbeat came for 2 seconds" in str(session.ending)
        assert session.worker.pulse.beats <= begun + 1

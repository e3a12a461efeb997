"""A worker's process that starts ahead of its configuration: taken over where it fits, or ended."""

import os
import signal
import sys
import tempfile
from contextlib import suppress

import pytest

from jax_specdec.engine import leftovers
from jax_specdec.engine import worker_ahead as module
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.worker_ahead import worker_ahead
from jax_specdec.records.batch import FinishReason
from tests.support import scripted_process
from tests.support.processes import children_of, is_alive, wait_for
from tests.support.scene import long_requests
from tests.support.scripted_process import settings


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path):
    """No process and no directory, however a test has ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = children_of(os.getpid())
    yield
    assert children_of(os.getpid()) == before
    # The output of a worker that an engine has lost is kept.
    assert all(directory.losses for directory in leftovers.find_leftovers(tmp_path))


def ahead(program=scripted_process.WORKER, num_devices=1):
    return worker_ahead(num_devices, program)


def started():
    """The process that was started last by this one."""
    return children_of(os.getpid())[-1]


def run(engine):
    """Run two requests; why they ended."""
    updates = list(engine.generate(long_requests(2)))
    return [one.finish_reason for update in updates for one in update.records if one.finish_reason]


def test_engine_takes_over_the_process_that_waits(tmp_path):
    with ahead() as start_worker:
        pid = started()
        with Engine(settings(), start_worker=start_worker) as engine:
            assert engine.status[0].pid == pid
            (folder,) = tmp_path.glob("jax-specdec-*")  # that of the process itself is gone
            assert (folder / "worker-0-1.log").exists()
            assert run(engine) == [FinishReason.LENGTH] * 2
    assert not is_alive(pid)


def test_further_workers_start_as_usual():
    config = settings(num_ranks=2, on_worker_loss="restart", resume_lost=True)
    with ahead() as start_worker:
        pid = started()
        with Engine(config, start_worker=start_worker) as engine:
            first, second = (session.worker.pid for session in engine.sessions)
            assert first == pid != second
            engine.serve()
            wait_for(lambda: engine.health().ready)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: engine.sessions[0].worker.pid != pid)
            assert run(engine) == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("why", ["ended", "environment", "output folder"])
def test_a_process_that_does_not_fit_is_ended_and_replaced(why, monkeypatch, tmp_path):
    with ahead() as start_worker:
        pid, options = started(), {}
        if why == "ended":
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not is_alive(pid))
        elif why == "environment":
            monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
        else:  # as where it lies on another file system
            monkeypatch.setattr("pathlib.Path.rename", refuse)
            options["output_folder"] = str(tmp_path / "output")
        with Engine(settings(**options), start_worker=start_worker) as engine:
            assert engine.status[0].pid != pid
            assert not is_alive(pid)
            assert run(engine) == [FinishReason.LENGTH] * 2


def refuse(self, target):
    raise OSError(18, "Invalid cross-device link")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_process_that_nobody_took_over_ends_with_the_block(error):
    with suppress(KeyboardInterrupt, ValueError), ahead():
        pid = started()
        assert is_alive(pid)
        if error is not None:
            raise error
    assert not is_alive(pid)


def test_a_death_after_the_takeover_has_its_last_words(tmp_path):
    program = (sys.executable, "-c", "print('half a word', flush=True); input(); exit(7)")
    with ahead(program) as start_worker:
        (folder,) = tmp_path.glob("jax-specdec-*")
        wait_for(lambda: (folder / "worker-0-1.log").read_text())
        with (
            pytest.raises(WorkerFailed, match=r"status 7(.|\n)*half a word"),
            Engine(settings(), start_worker=start_worker) as engine,
        ):
            run(engine)


@pytest.mark.parametrize("trouble", ["devices", "program"])
def test_a_start_that_fails_is_left_to_the_engine(trouble, monkeypatch, tmp_path):
    if trouble == "devices":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setenv("JAX_PLATFORMS", "")
    program = scripted_process.WORKER if trouble == "devices" else ("/nowhere",)
    before = children_of(os.getpid())
    with ahead(program, num_devices=2) as start_worker:
        assert children_of(os.getpid()) == before
        assert not list(tmp_path.glob("jax-specdec-*"))
        if trouble == "program":
            with pytest.raises(FileNotFoundError, match="nowhere"):
                Engine(settings(), start_worker=start_worker)


def test_the_process_computes_on_the_devices_of_the_engine_s(monkeypatch):
    """On accelerators a worker is told which by its environment."""
    environments = []

    def noted(program, *, output, env):
        environments.append(env)
        raise OSError("no process")

    monkeypatch.setattr(module, "ChildProcess", noted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    with ahead(num_devices=2):
        pass
    assert environments[0]["CUDA_VISIBLE_DEVICES"] == "3,4"

"""Weights that change, from the engine's side: all workers or none, over scripted workers."""

import asyncio
import concurrent.futures
import contextlib
import random

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_specdec.control import Commit, Discard, Prepare
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.errors import EngineClosed, WeightsError
from jax_specdec.requests import Request, SamplingParams
from tests.support.scene import Scene, make_requests, parts_of
from tests.support.scripted_process import scripted_engine
from tests.support.scripted_worker import VOCAB, ScriptedWorker
from tests.support.streaming import StreamingScene


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "new.safetensors"
    path.write_bytes(b"weights")
    return path


def updating(path, at, results):
    """Updates after the deliveries numbered `at`; `results` gets what comes of each."""

    def meddle(scene, n):
        if n in at:
            try:
                results.append(scene.engine.update_weights(path))
            except WeightsError as error:
                results.append(error)

    return meddle


def versions(scene, name):
    return [r.weights_version for r in scene.records[name] if r.weights_version is not None]


def test_all_workers_get_them_while_requests_run(file):
    requests, results = make_requests(12, 1), []
    scene = Scene(num_ranks=2, num_prefill_ranks=1)
    scene.run(requests, updating(file, (5, 11), results))
    assert results == [1, 2]
    assert scene.engine.weights_version == 2
    assert file.exists()  # as it is the caller's
    for worker in scene.workers:
        assert worker.told(Prepare) == [Prepare(number=n, path=str(file)) for n in (1, 2)]
        assert worker.told(Commit) == [Commit(number=n, version=n) for n in (1, 2)]
        assert worker.told(Discard) == []
    assert [status.weights_version for status in scene.engine.status] == [2, 2, 2]
    seen = [versions(scene, request.id) for request in requests]
    assert {version for each in seen for version in each} == {0, 1, 2}


class Stubborn(ScriptedWorker):
    """It never answers an update."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.refusal = None


def test_a_worker_that_is_too_slow_is_named(file):
    scene = Scene(num_ranks=2, worker=Stubborn)
    scene.workers[0].refusal = ""
    late = r"process ranks 1 had not loaded .* in time"
    with scene.engine, pytest.raises(WeightsError, match=late):
        scene.engine.update_weights(file, timeout=3.0)
    assert [len(worker.told(Discard)) for worker in scene.workers] == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_deaths_at_any_moment_leave_one_version_of_weights(seed, file):
    """Random faults, refusals and moments; a model of what the engine must say afterwards."""
    rng = random.Random(seed)
    requests, results = make_requests(10, seed), []
    ranks = rng.randint(1, 3)
    faults = {rank: [rng.randint(0, 12), rng.randint(0, 12)] for rank in range(ranks)
              if rng.random() < 0.6}  # fmt: skip
    scene = Scene(seed=seed, num_ranks=ranks, faults=faults, on_worker_loss="restart",
                  resume_lost=True, max_restarts=5)  # fmt: skip
    moments = sorted(rng.sample(range(40), 5))

    def meddle(scene, n):
        if n in moments:
            scene.workers[-1].refusal = "no" if rng.random() < 0.3 else ""
            before = scene.engine.weights_version
            updating(file, (n,), results)(scene, n)
            done = results[-1] == before + 1
            assert done or isinstance(results[-1], WeightsError)
            assert scene.engine.weights_version == before + done
            for session in scene.engine.sessions:
                if session.alive:
                    assert session.worker.weights_version == scene.engine.weights_version

    scene.run(requests, meddle)
    assert scene.engine.weights_version == sum(isinstance(result, int) for result in results)
    for request in requests:  # a preempted or lost one may meet a worker that was told later
        assert versions(scene, request.id) == sorted(versions(scene, request.id))


def test_a_successor_starts_with_the_weights_in_use(file):
    requests, results = make_requests(8, 5), []
    scene = Scene(num_ranks=2, faults={0: [9]}, on_worker_loss="restart", resume_lost=True)
    scene.run(requests, updating(file, (2,), results))
    assert results == [1]
    scene.engine_workers.start(0)  # what its restart is, once its delay is over
    assert [config.weights for config in scene.configs] == ["", "", str(file)]
    assert [config.weights_version for config in scene.configs] == [0, 0, 1]
    file.write_bytes(b"other weights")
    with pytest.raises(OSError, match="has changed since its weights were loaded"):
        scene.engine_workers.start(0)


def test_files_that_change_while_they_are_read_are_refused(file):
    class Slow(ScriptedWorker):
        def tell(self, command):
            if isinstance(command, Prepare) and self.process_rank == 0:
                file.write_bytes(b"other weights")
            return super().tell(command)

    scene = Scene(num_ranks=2, worker=Slow)
    with scene.engine, pytest.raises(WeightsError, match="has changed"):
        scene.engine.update_weights(file)


ARRAYS = {
    "embedding": np.ones((2, 3), np.float32),
    "layers.gate": np.ones((2, 2), ml_dtypes.bfloat16)[:, ::-1],
    "scalar": np.float32(2.0),
}


def leftovers(engine):
    return [
        path
        for path in parts_of(engine).workers.directory.folder.iterdir()
        if "weights" in path.name
    ]


@pytest.mark.parametrize("outcome", ["taken", "refused", "kept for successors"])
def test_arrays_travel_by_a_file_that_is_removed(outcome):
    kept = outcome == "kept for successors"
    seen = []

    class Reading(ScriptedWorker):
        def tell(self, command):
            if isinstance(command, Prepare):
                seen.append((command.path, load_file(command.path)))
            return super().tell(command)

    scene = Scene(worker=Reading, on_worker_loss="restart" if kept else "stop")
    with scene.engine as engine:
        scene.workers[0].refusal = "no" if outcome == "refused" else ""
        refused = pytest.raises(WeightsError, match="process rank 0: no")
        with refused if outcome == "refused" else contextlib.nullcontext():
            assert engine.update_weights(ARRAYS) == 1
        ((path, tensors),) = seen
        assert tensors.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(tensors[name], array, strict=True)
        left = leftovers(engine)
        assert [str(one) for one in left] == ([path] if kept else [])
        if kept:
            assert engine.update_weights(ARRAYS) == 2
            assert [one.name for one in leftovers(engine)] == ["weights-2.safetensors"]
        folder = parts_of(engine).workers.directory.folder
    assert not folder.exists()


def test_what_cannot_be_read_or_written_leaves_nothing(tmp_path):
    with Scene().engine as engine:
        for weights, said in (
            (tmp_path / "nowhere", "the weights cannot be read"),
            ({"text": np.array("a")}, "text is an array of <U1: numbers are needed"),
        ):
            with pytest.raises(WeightsError, match=said):
                engine.update_weights(weights)
        assert leftovers(engine) == []


def test_other_weights_in_an_asyncio_program(file):
    async def program(engine):
        item = Request(id="r", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=5))
        first = [record.weights_version async for record in engine.stream(item)]
        version = await engine.update_weights_async(file)
        return first, version, [r.weights_version async for r in engine.stream(item)]

    config = EngineConfig(vocab_size=VOCAB, num_slots=2, max_length=64, num_ranks=2)
    with scripted_engine()(config) as engine:
        first, version, then = asyncio.run(program(engine))
    assert (set(first), version, set(then)) == ({0}, 1, {1})


def test_an_engine_that_ends_says_so_to_who_waits(file):
    scene = StreamingScene(worker=Stubborn)
    engine, said = scene.engine, "the engine ended before all workers had loaded"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        update = pool.submit(engine.update_weights, file)
        while not scene.workers[0].told(Prepare):
            scene.round()
        engine.close()
        with pytest.raises(WeightsError, match=said):
            update.result(30)
    with pytest.raises(EngineClosed):
        engine.update_weights(file)

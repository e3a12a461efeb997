"""Which devices each worker gets, with lists of devices that are made up."""

import functools
import re
import sys

import jax
import pytest

from jax_specdec.control import Start, WorkerConfig
from jax_specdec.device.worker.worker_process import own_devices
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.devices import Share, shares
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.worker_client import WorkerProcess
from tests.support.scene import Scene, long_requests
from tests.support.scripted_worker import VOCAB


@pytest.fixture
def machine(tmp_path):
    """A machine with devices of the given names."""

    def make(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return tmp_path

    return make


GPUS = ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm")
RENDERERS = ("dri/renderD128", "dri/renderD129")


def seen(name, *values):
    return tuple(Share({name: value}) for value in values)


CUDA, FLAGS = "CUDA_VISIBLE_DEVICES", "--xla_force_host_platform_device_count=4 --other"
NONE, PAIRS = (Share(),), (Share(local_devices=(0, 1)), Share(local_devices=(2, 3)))


@pytest.mark.parametrize(
    ("devices", "workers", "each", "environment", "expected"),
    [
        (GPUS, 2, 2, {}, seen(CUDA, "0,1", "2,3")),
        (GPUS, 3, 1, {}, seen(CUDA, "0", "1", "2")),
        (GPUS, 2, 1, {CUDA: "3, GPU-8932f937"}, seen(CUDA, "3", "GPU-8932f937")),  # its own
        (GPUS, 2, 1, {"JAX_PLATFORMS": "cpu"}, NONE * 2),
        (GPUS, 2, 1, {CUDA: ""}, NONE * 2),
        (GPUS, 2, 1, {CUDA: "-1"}, NONE * 2),
        (RENDERERS, 2, 1, {}, NONE * 2),  # a screen's: nothing computes on them
        ((*RENDERERS, "kfd"), 2, 1, {}, seen("HIP_VISIBLE_DEVICES", "0", "1")),
        (("accel0", "accel1"), 1, 2, {}, seen("TPU_VISIBLE_CHIPS", "0,1")),
        ((), 2, 2, {"XLA_FLAGS": FLAGS}, PAIRS),
        ((), 3, 2, {"XLA_FLAGS": FLAGS}, NONE * 3),  # each has them all
        ((), 2, 2, {}, NONE * 2),
    ],
)
def test_each_worker_gets_its_own(machine, devices, workers, each, environment, expected):
    assert shares(workers, each, environment, files=machine(*devices)) == expected


def test_shares_of_named_devices_and_of_processes(machine):
    assert shares(2, 1, {}, named=("7", "7"), files=machine()) == seen(CUDA, "7", "7")
    assert shares(2, 2, {"XLA_FLAGS": FLAGS}, processes=True, files=machine()) == NONE * 2
    assert str(PAIRS[1]) == "local devices 2, 3"


def test_too_few_are_refused_with_the_numbers_and_the_ways_out(machine):
    said = r"3 workers of 2 device\(s\) each need 6, and there are 4 \(CUDA_VISIBLE_DEVICES: 0, 1, "
    with pytest.raises(ValueError, match=said + r".*lower num_ranks.*EngineConfig.devices.*cpu"):
        shares(3, 2, {}, files=machine(*GPUS))


def test_a_worker_takes_the_places_that_it_is_given():
    start = Start(config=WorkerConfig(vocab_size=9), ring="", local_devices=(2, 5))
    assert own_devices(start) == [jax.local_devices()[place] for place in (2, 5)]
    assert own_devices(Start(config=start.config, ring="")) == jax.local_devices()


def test_a_process_gets_its_share_and_the_status_says_so(tmp_path):
    code = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); os._exit(3)"
    start = functools.partial(WorkerProcess, program=(sys.executable, "-c", code))
    settings = EngineConfig(
        vocab_size=VOCAB, max_length=96, num_ranks=2, tensor_parallel=2, devices=tuple("abcd"),
        on_worker_loss="continue", output_folder=str(tmp_path),
    )  # fmt: skip
    with Engine(settings, start_worker=start) as engine:
        given = [status.given for status in engine.status]
        assert given == ["CUDA_VISIBLE_DEVICES=a,b", "CUDA_VISIBLE_DEVICES=c,d"]
        with pytest.raises(WorkerFailed, match=r"sees (a,b|c,d)"):
            list(engine.generate(long_requests(1)))
        for session in engine.sessions:
            session.worker.stop(drain=False)
    # The error names one of the two; what each has printed is in its file.
    printed = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert {*re.findall(r"sees \S+", printed)} == {"sees a,b", "sees c,d"}


def test_an_engine_without_enough_devices_does_not_start():
    with pytest.raises(ValueError, match=r"2 workers of 1 device.* there are 1 "):
        Scene(num_ranks=2, devices=("0",))

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
from jax_specdec.engine.worker_client import WorkerFailed, WorkerProcess
from tests.support.scene import Scene, long_requests
from tests.support.scripted_worker import VOCAB

pytestmark = pytest.mark.fast


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


def given(*arguments, **options):
    return [dict(share.environment) for share in shares(*arguments, **options)]


def test_each_worker_gets_its_own(machine):
    found = given(2, 2, {}, files=machine(*GPUS))
    assert found == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert given(3, 1, {}, files=machine()) == [{"CUDA_VISIBLE_DEVICES": f"{n}"} for n in range(3)]


def test_of_the_devices_that_the_engine_sees_itself(machine):
    seen = {"CUDA_VISIBLE_DEVICES": "3, GPU-8932f937"}
    found = given(2, 1, seen, files=machine(*GPUS))
    assert found == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}]


@pytest.mark.parametrize(
    "environment",
    [{"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}],
)
def test_an_engine_that_shall_see_none_shares_none(environment, machine):
    assert shares(2, 1, environment, files=machine(*GPUS)) == (Share(), Share())


def test_other_makers_have_other_names(machine):
    screen = machine("dri/renderD128", "dri/renderD129")
    assert given(2, 1, {}, files=screen) == [{}, {}]  # a screen's: nothing computes on them
    compute = machine("kfd")
    assert given(2, 1, {}, files=compute) == [
        {"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"},
    ]  # fmt: skip


def test_chips(machine):
    chips = machine("accel0", "accel1", "accel2", "accel3")
    assert given(1, 4, {}, files=chips) == [{"TPU_VISIBLE_CHIPS": "0,1,2,3"}]


def test_too_few_are_refused_with_the_numbers_and_the_ways_out(machine):
    said = r"3 workers of 2 device\(s\) each need 6, and there are 4 \(CUDA_VISIBLE_DEVICES: 0, 1, "
    with pytest.raises(ValueError, match=said + r".*lower num_ranks.*EngineConfig.devices.*cpu"):
        shares(3, 2, {}, files=machine(*GPUS))


def test_one_that_is_named_twice_is_shared(machine):
    found = given(2, 1, {}, named=("7", "7"), files=machine())
    assert found == [{"CUDA_VISIBLE_DEVICES": "7"}] * 2


def test_cpu_devices_are_shared_by_their_places(machine):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4 --other"}
    found = shares(2, 2, flags, files=machine())
    assert [share.local_devices for share in found] == [(0, 1), (2, 3)]
    assert str(found[1]) == "local devices 2, 3"
    assert shares(3, 2, flags, files=machine()) == (Share(),) * 3  # each has them all
    assert shares(2, 2, {}, files=machine()) == (Share(),) * 2
    assert shares(2, 2, flags, processes=True, files=machine()) == (Share(),) * 2


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
        assert [status.given for status in engine.status] == [
            "CUDA_VISIBLE_DEVICES=a,b", "CUDA_VISIBLE_DEVICES=c,d",
        ]  # fmt: skip
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

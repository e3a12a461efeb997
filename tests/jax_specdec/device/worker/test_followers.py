"""A follower on another node, as its lead sees it: a line goes out, an exit status comes back."""

import threading
from multiprocessing.connection import Listener

import pytest

from jax_specdec.control import WorkerConfig
from jax_specdec.device.worker.process_group import PlacedFollower

pytestmark = pytest.mark.fast


@pytest.fixture
def launcher(tmp_path):
    """A function that makes a follower whose launcher answers its line, or ends without."""

    def made(answer):
        path = str(tmp_path / "launcher")
        heard = []
        listener = Listener(path, "AF_UNIX")

        def serve():
            with listener, listener.accept() as connection:
                heard.append(connection.recv_bytes())
                if answer is not None:
                    connection.send_bytes(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        follower = PlacedFollower(path)
        assert follower.wait(0.0) is None  # it runs
        follower.tell("born\n")
        thread.join()
        return follower, heard

    return made


def test_its_end_and_where_it_was_come_back(launcher):
    follower, heard = launcher(b"-9 pid 7 at 10.0.0.2")
    assert follower.wait() == -9
    assert follower.wait() == -9
    assert follower.why == "pid 7 at 10.0.0.2"
    assert heard == [b"born\n"]


def test_it_is_lost_with_who_started_it(launcher):
    follower, _ = launcher(None)
    assert follower.wait() == 1
    assert follower.why == "who started it has ended"


def test_the_devices_of_a_node_are_its_part_of_all():
    one = WorkerConfig(vocab_size=32, tensor_parallel=8, processes=True)
    assert (one.devices_here, one.num_processes) == (8, 8)
    four = WorkerConfig(vocab_size=32, tensor_parallel=8, processes=True, group_nodes=4)
    assert (four.devices_here, four.num_processes) == (2, 8)

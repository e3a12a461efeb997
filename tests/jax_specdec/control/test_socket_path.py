"""Sockets in directories whose paths are longer than a socket's may be."""

import contextlib
import os
import threading
from multiprocessing.connection import Client, Listener

import pytest

from jax_specdec.control import ControlClient, ControlServer, ProcessStats, SocketPath
from jax_specdec.control.socket_path import MAX_BYTES, SocketAddress
from tests.support.processes import wait_for


def long_folder(parent, size):
    """A new directory of mode 0700 whose path has `size` bytes."""
    missing = size - len(os.fsencode(str(parent)))
    names = []
    while missing > 0:
        names.append("d" * min(missing - 1, 200))
        missing -= len(names[-1]) + 1
    folder = parent.joinpath(*names)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("size", [98, 99, 100, 120, 400])
def test_control_plane_works_in_folders_of_any_length(size, tmp_path):
    """Of 99 bytes and more, the socket's path is too long for the system."""
    folder = long_folder(tmp_path, size)
    with contextlib.closing(ControlServer(folder=folder)) as listening:
        link = listening.link()
        path = link.connection.address.removeprefix("ipc://")
        assert os.path.dirname(path) == str(folder)
        assert os.listdir(folder) == [os.path.basename(path)]
        ControlClient(link.connection, ProcessStats()).start()
        wait_for(lambda: (listening.pump(), link.heartbeat.beats)[1])


@pytest.mark.parametrize("size", [90, 120, 400])
def test_listeners_of_multiprocessing_are_reached(size, tmp_path):
    path = str(long_folder(tmp_path, size) / "listener")
    with SocketPath(path) as bound, Listener(bound.text, "AF_UNIX") as listener:
        heard = []
        thread = threading.Thread(target=lambda: heard.append(listener.accept().recv()))
        thread.start()
        with SocketPath(path) as way, Client(way.text, "AF_UNIX") as client:
            client.send("here")
        thread.join()
        assert heard == ["here"]
    assert not os.path.exists(path)


def test_only_long_paths_of_files_are_rewritten(tmp_path):
    before = os.listdir("/proc/self/fd")
    fits = "/" + "n" * (MAX_BYTES - 1)
    same = [f"ipc://{fits}", "ipc://@" + "a" * 200, "ipc://*", "tcp://127.0.0.1:*"]
    for address in same:
        with SocketAddress(address) as made:
            assert made.text == address
    folder = long_folder(tmp_path, 200)
    with SocketAddress(f"ipc://{folder}/name") as made:
        assert made.text.startswith("ipc:///proc/self/fd/")
        assert made.text.endswith("/name")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_names_too_long_for_any_folder_are_refused(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"path has \d+ bytes and .*takes 107: give the socket"):
        SocketPath(str(tmp_path / ("n" * 120)))
    with pytest.raises(OSError, match=r"cannot listen at 'ipc://.*nnn.*takes 107"):
        ControlServer(f"ipc://{tmp_path}/{'n' * 120}").link()
    assert len(os.listdir("/proc/self/fd")) == len(before)

"""Telling a live process from a dead one, and from another that has its pid."""

import errno
import os
import subprocess
import threading
from dataclasses import replace
from unittest import mock

import pytest

from ipc.peers import PeerWatch, current_process, is_alive, process_start_time


def test_a_recycled_or_impossible_pid_is_not_alive():
    me = current_process()
    assert is_alive(me)
    assert not is_alive(replace(me, start_time=me.start_time + 1))
    for pid in (0, 2**31, 2**64 - 1, 2**22 + 1):
        assert not is_alive(replace(me, pid=pid))


def test_a_pid_that_is_a_threads_by_now_is_not_alive():
    over, me = threading.Event(), current_process()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert not is_alive(replace(me, pid=thread.native_id))
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOENT])
def test_so_say_older_and_newer_kernels(monkeypatch, number):
    refused = OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=refused))
    assert not is_alive(current_process())


def test_a_zombie_is_not_alive():
    child = subprocess.Popen(["sleep", "100"])
    identity = replace(current_process(), pid=child.pid, start_time=process_start_time(child.pid))
    watch = PeerWatch(identity)
    try:
        assert watch.alive()
        child.kill()
        while watch.alive():  # the process ends a moment after the signal
            pass
        assert process_start_time(child.pid) == identity.start_time  # a zombie: not reaped yet
        assert not is_alive(identity)
    finally:
        watch.close()
        child.wait(30)
    assert process_start_time(child.pid) is None

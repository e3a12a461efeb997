"""Telling a live process from a dead one, and from another that has its pid."""

import subprocess

import pytest

from ipc.peers import PeerWatch, ProcessIdentity, current_process, is_alive, process_start_time

pytestmark = pytest.mark.fast


def test_a_recycled_or_impossible_pid_is_not_alive():
    me = current_process()
    assert is_alive(me)
    assert not is_alive(ProcessIdentity(me.pid, me.start_time + 1, me.pid_namespace))
    for pid in (0, 2**31, 2**64 - 1, 2**22 + 1):
        assert not is_alive(ProcessIdentity(pid, me.start_time, me.pid_namespace))


def test_a_zombie_is_not_alive():
    child = subprocess.Popen(["sleep", "100"])
    me = current_process()
    identity = ProcessIdentity(child.pid, process_start_time(child.pid), me.pid_namespace)
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

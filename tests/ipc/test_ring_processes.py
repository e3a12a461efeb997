"""Two processes: a peer that never attaches, and a fork.

`test_ring_soak` has the deaths of either side in every wait mode.
"""

import subprocess
import sys

import pytest

from ipc import RingReader, errors


def test_a_peer_that_dies_before_attaching_is_noticed_when_named():
    with RingReader.create(2, 64) as reader:
        peer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.05)"])
        reader.expect_peer(peer.pid)
        for wait in (reader.wait_attached, reader.receive):
            with pytest.raises(errors.PeerDied, match="no message") as died:
                wait(30)
            assert (died.value.pid, died.value.last_sequence) == (peer.pid, -1)
        peer.wait()
        reader.expect_peer(peer.pid)  # reaped: no such process exists any more
        with pytest.raises(errors.PeerDied):
            reader.receive(30)
    with (  # unnamed: only the caller's timeout can tell
        RingReader.create(2, 64) as reader,
        pytest.raises(errors.RingTimeout, match="no producer attached"),
    ):
        reader.wait_attached(0.05)


FORK = """
import os, sys, gc
from ipc import RingReader, RingWriter, errors

reader = RingReader.create(4, 64, doorbell=True)
writer = RingWriter.attach(reader.name)
reader.fileno()
waiting = RingReader.create(4, 64)   # its names still exist
writer.send(b"before")
if os.fork() == 0:
    refused = 0
    for call in (lambda: writer.send(b"child"), reader.receive, reader.try_receive,
                 waiting.wait_attached, lambda: waiting.expect_peer(1)):
        try:
            call()
        except errors.ForeignProcess:
            refused += 1
    for ring in (reader, writer, waiting):
        ring.close()
    del reader, writer, waiting, ring, call
    gc.collect()
    os._exit(0 if refused == 5 else 1)
assert os.wait()[1] == 0, "the child was not refused everywhere"
writer.send(b"after")
assert [reader.receive(1).data for _ in range(2)] == [b"before", b"after"]
assert reader.try_receive() is None, "the child's close() ended the stream"
with RingWriter.attach(waiting.name) as late:
    late.send(b"names survived")
    assert waiting.receive(1).data == b"names survived"
if os.fork() == 0:
    sys.exit(0)   # a child that ends normally, with every finalizer
os.wait()
writer.send(b"still")
assert reader.receive(1).data == b"still"
writer.close()
try:
    reader.receive(1)
except errors.EndOfStream:
    print("fine")
"""


def test_a_forked_child_cannot_disturb_the_ring():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)

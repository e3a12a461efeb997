"""A reader that attaches to the ring of a dead writer gets what that had committed."""

import asyncio
import os

import pytest

from ipc import PeerDied, RingNotFound, RingReader, RingWriter, doctor, wait_readable
from tests.support.processes import output_of

WRITER = """
import os, sys
from ipc import RingWriter
ring = RingWriter.create(64, 64, doorbell=True)
for number in range(int(sys.argv[1])):
    ring.send(number.to_bytes(8, "little"))
print(ring.name, flush=True)
if os.fork() == 0:
    os.kill(os.getppid(), 9)
    os._exit(0)
import time; time.sleep(99)
"""


def name_of_dead(count):
    """The ring of a writer that was killed behind so many messages."""
    script = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-c", {WRITER!r}, "{count}"], stdout=-1, text=True)
assert done.returncode == -9
print(done.stdout, end="")
"""
    return output_of(script).strip()


def one_by_one(reader):
    while True:
        yield reader.receive(5)


def by_looking(reader):
    while True:
        if (message := reader.try_receive()) is not None:
            yield message


def by_waiting(reader):
    while True:
        for ready in wait_readable([reader], 5):
            yield ready.try_receive()


def by_awaiting(reader):
    while True:
        yield asyncio.run(reader.receive_async())


@pytest.mark.parametrize("read", [one_by_one, iter, by_looking, by_waiting, by_awaiting])
def test_committed_messages_of_a_dead_creator_arrive(read):
    name, received = name_of_dead(50), []
    with RingReader.attach(name) as reader:
        assert reader.counters().depth == 50
        said = "message 49 was the last to cross it"
        with pytest.raises(PeerDied, match=said) as died:  # noqa: PT012
            for message in read(reader):
                received.append((message.sequence, int.from_bytes(message.data, "little")))
        assert received == [(number, number) for number in range(50)]
        assert (died.value.side, died.value.last_sequence) == ("producer", 49)
    with pytest.raises(RingNotFound):  # once, as of a living one
        RingReader.attach(name)
    assert not [file for file in doctor.find_ring_files() if name[1:] in file.path.name]


def test_a_full_ring_of_a_dead_creator_is_read():
    with RingReader.attach(name_of_dead(64)) as reader:
        assert [reader.receive(5).sequence for _ in range(64)] == list(range(64))


def test_a_dead_creator_without_messages_is_named():
    name = name_of_dead(0)
    with pytest.raises(PeerDied, match="no message crossed it"):
        RingReader.attach(name)
    assert not [file for file in doctor.find_ring_files() if name[1:] in file.path.name]


def test_a_ring_of_a_dead_creator_has_one_reader():
    name = name_of_dead(3)
    with pytest.raises(Exception, match="has its producer already"):
        RingWriter.attach(name)
    with RingReader.attach(name) as reader:
        assert reader.receive(5).data == bytes(8)
        assert reader._segment.header.creator.pid != os.getpid()

"""Kills at random moments, many messages, and proofs that these checks can fail.

`.ci/heavy ring` runs the slow ones, with far more of each.
"""

import itertools
import os
import random
import time
from pathlib import Path

import pytest

from ipc import RingReader, RingWriter, errors
from ipc.doctor import find_ring_files, remove_leftovers
from tests.support.ring_peer import Killer, is_intact, payload, record, start_peer

MODES = ("predict", "block", "spin")
LEAST_MESSAGES = 17  # that have crossed when a process is killed under load
MAX_NOTICE_SECONDS = 0.1  # of half of all deaths, where a core is free


def nothing_left(pid):
    """Check that neither this process nor process `pid` left a name in /dev/shm."""
    assert not [file for file in find_ring_files() if file.creator.pid in (os.getpid(), pid)]


def start_under_load(rng, side, wait, slots, max_bytes, progress):
    """Start the peer that is the `side`; either of the two may create the ring."""
    job = "produce" if side == "producer" else "consume"
    here = RingReader if side == "producer" else RingWriter
    options = {"wait": rng.choice(MODES), "max_bytes": max_bytes, "slots": slots}
    if rng.random() < 0.5:
        peer = start_peer(job, "create", progress, **options)
        with peer.stdout:
            return here.attach(peer.stdout.readline().decode().strip(), wait=wait), peer
    ring = here.create(slots, max_bytes, wait=wait)
    peer = start_peer(job, ring.name, progress, **options)
    assert ring.wait_attached(60).pid == peer.pid
    return ring, peer


def kill_under_load(rng, side, wait, progress):
    """Kill a peer under load; how many messages crossed, and the seconds to notice it.

    It is not reaped before: a zombie counts as dead.
    """
    slots, max_bytes = rng.choice([1, 2, 16]), rng.choice([100, 3000, 200_000])
    ring, peer = start_under_load(rng, side, wait, slots, max_bytes, progress)
    delay, messages = rng.random() * 0.03, rng.randrange(LEAST_MESSAGES, 100)
    killer, crossed = Killer(peer.pid, delay, lambda: record(progress)[0] >= messages), 0
    with ring:
        said = f"the {side} .pid {peer.pid}"
        with pytest.raises(errors.PeerDied, match=said) as raised:  # noqa: PT012
            while True:
                if side == "producer":
                    message = ring.receive(10)
                    assert message.sequence == crossed
                    assert is_intact(message.data, crossed, max_bytes)
                    crossed += 1
                else:
                    ring.send(*payload(ring.counters().messages, max_bytes), timeout=10)
        noticed = time.monotonic()
        if side == "producer":
            with pytest.raises(errors.PeerDied):  # and it stays so
                ring.receive()
    killer.join()
    peer.wait()
    died, (done, damaged, _) = raised.value, record(progress)
    crossed = died.last_sequence + 1 if side == "consumer" else crossed
    assert (died.side, died.pid, died.last_sequence) == (side, peer.pid, crossed - 1)
    # The peer notes a message after it has crossed: the kill can fall between the two.
    assert done <= crossed <= done + 1
    assert damaged == 0
    nothing_left(peer.pid)
    return crossed, noticed - killer.killed_at


def kill_a_creator(rng, progress):
    """Kill a peer while it starts and creates; the doctor cleans up after it."""
    peer = start_peer("produce", "create", progress)
    Killer(peer.pid, rng.random() * 0.25).join()
    peer.communicate()
    files = [file for file in find_ring_files() if file.creator.pid == peer.pid]
    assert {file.state for file in files} <= {"dead"}
    remove_leftovers(files)
    nothing_left(peer.pid)


def kill_an_attacher(rng, progress):
    """Kill a peer while it starts and attaches."""
    with RingReader.create(2, 1000, wait=rng.choice(MODES)) as reader:
        peer = start_peer("produce", reader.name, progress)
        reader.expect_peer(peer.pid)
        killer = Killer(peer.pid, rng.random() * 0.25)
        with pytest.raises(errors.PeerDied) as died:
            list(reader)
        killer.join()
    assert died.value.pid == peer.pid
    peer.wait()
    nothing_left(peer.pid)


slowly = pytest.mark.timeout(3600), pytest.mark.slow


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=slowly)])
def test_random_kills_under_load(tmp_path, rounds):
    rng, kinds = random.Random(1), itertools.product(("producer", "consumer"), MODES)
    numbered = zip(range(rounds), itertools.cycle(kinds), strict=False)
    found = [kill_under_load(rng, *kind, tmp_path / str(n)) for n, kind in numbered]
    crossed, delays = zip(*found, strict=True)
    assert sum(crossed) > 100
    assert min(crossed) >= LEAST_MESSAGES
    assert rounds < 100 or sorted(delays)[rounds // 2] < MAX_NOTICE_SECONDS


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=slowly)])
def test_random_kills_while_attaching(tmp_path, rounds):
    rng = random.Random(2)
    for number in range(rounds):
        rng.choice([kill_a_creator, kill_an_attacher])(rng, tmp_path / str(number))


def own_bytes():
    """This process's own memory, exactly and without the pages of files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize(
    ("wait", "count", "max_bytes"),
    [
        ("predict", 5000, 3000), ("block", 5000, 3000),
        *(pytest.param(wait, count, 200, marks=slowly)
          for wait, count in (("predict", 10**7), ("block", 500_000), ("spin", 500_000))),
    ],
)  # fmt: skip
def test_many_messages(tmp_path, wait, count, max_bytes):
    """A reader that kept them all would grow by 7 MB, which the check notices."""
    with RingReader.create(64, max_bytes, wait=wait) as reader:
        peer = start_peer(
            "produce", reader.name, tmp_path / "p", count=count, max_bytes=max_bytes, wait=wait
        )
        reader.wait_attached(60)
        memory, number = own_bytes(), 0
        for message in reader:
            assert message.sequence == number
            assert is_intact(message.data, number, max_bytes)
            number += 1
        assert own_bytes() - memory < 4 << 20
    assert (number, peer.wait(60)) == (count, 0)

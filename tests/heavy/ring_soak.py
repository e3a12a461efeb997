"""The ring's long checks: `python -m tests.heavy.ring_soak [--kills N] [--messages N] ...`.

Each prints RUN with its figures, or NOT RUN and why. Exit status 1 when one failed.
CI runs the same functions with smaller numbers (tests/ipc/test_ring_soak.py).
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ipc import errors
from ipc.doctor import find_ring_files, remove_leftovers
from ipc.ring import RingReader, RingWriter
from tests.ipc.test_ring_hostile import outcome, used_ranges
from tests.support.ring_peer import Progress, is_intact, payload, start_peer

MODES = ("predict", "block", "spin")


@dataclass(frozen=True)
class KillResult:
    """One SIGKILL. `problem` is empty when every promise held."""

    side: str
    problem: str
    messages: int
    noticed_ms: float


class Killer(threading.Thread):
    """Kills a process after a delay, and remembers when."""

    def __init__(self, pid: int, delay: float) -> None:
        super().__init__(daemon=True)
        self.pid, self.delay, self.killed_at = pid, delay, 0.0
        self.start()

    def run(self) -> None:
        time.sleep(self.delay)
        self.killed_at = time.monotonic()
        os.kill(self.pid, 9)


def kill_round(rng: random.Random, directory: Path, number: int) -> KillResult:
    """Starts a peer under load, kills it at a random moment, and checks every promise."""
    side = rng.choice(["producer", "consumer"])
    job = "produce" if side == "producer" else "consume"
    here = RingReader if side == "producer" else RingWriter
    slots, max_bytes = rng.choice([1, 2, 16]), rng.choice([100, 3000, 200_000])
    wait, peer_wait = rng.choice(MODES), rng.choice(MODES)
    progress = directory / f"kill-{number}"
    options = {"wait": peer_wait, "max_bytes": max_bytes, "slots": slots}
    if rng.random() < 0.5:
        peer = start_peer(job, "create", progress, **options)
        assert peer.stdout is not None
        with peer.stdout:
            ring = here.attach(peer.stdout.readline().decode().strip(), wait=wait)
    else:
        ring = here.create(slots, max_bytes, wait=wait)
        peer = start_peer(job, ring.name, progress, **options)
        ring.wait_attached(60)
    killer = Killer(peer.pid, rng.random() * 0.03)
    problem, crossed = "", 0
    with ring:
        try:
            while True:
                if isinstance(ring, RingReader):
                    message = ring.receive(10)
                    if message.sequence != crossed or not is_intact(
                        message.data, crossed, max_bytes
                    ):
                        problem = f"message {crossed} is damaged or out of order"
                    crossed += 1
                else:
                    ring.send(*payload(ring.counters().messages, max_bytes), timeout=10)
        except errors.PeerDied as died:
            noticed = time.monotonic()
            crossed = died.last_sequence + 1 if side == "consumer" else crossed
            if (died.side, died.pid, died.last_sequence) != (side, peer.pid, crossed - 1):
                problem = f"the report is wrong: {died}"
        except errors.RingError as error:
            noticed = time.monotonic()
            problem = f"{type(error).__name__}: {error}"
    killer.join()
    peer.wait()
    record = Progress.at(progress)
    # The peer notes a message after it has crossed: the kill can fall between the two.
    if not problem and not record.done <= crossed <= record.done + 1:
        problem = f"the peer had {record.done} messages across, this side saw {crossed}"
    if not problem and record.damaged:
        problem = f"the consumer found {record.damaged} damaged messages"
    left = [file for file in find_ring_files() if file.creator.pid in (os.getpid(), peer.pid)]
    if not problem and left:
        problem = f"left behind: {left}"
    return KillResult(side, problem, crossed, (noticed - killer.killed_at) * 1e3)


def early_kill_round(rng: random.Random, directory: Path, number: int) -> KillResult:
    """Kills a peer while it starts, attaches or creates; doctor must clean up after creators."""
    creates = rng.random() < 0.5
    progress = directory / f"early-{number}"
    problem = ""
    if creates:
        peer = start_peer("produce", "create", progress)
        Killer(peer.pid, rng.random() * 0.25).join()
        noticed = killed = time.monotonic()
        peer.communicate()
        mine = [file for file in find_ring_files() if file.creator.pid == peer.pid]
        if any(file.state != "dead" for file in mine):
            problem = "doctor takes a dead creator for a living one"
        remove_leftovers(mine)
    else:
        with RingReader.create(2, 1000, wait=rng.choice(MODES)) as reader:
            peer = start_peer("produce", reader.name, progress)
            reader.expect_peer(peer.pid)
            killer = Killer(peer.pid, rng.random() * 0.25)
            try:
                for _ in reader:
                    pass
                problem = "the stream ended as if the producer had closed it"
            except errors.PeerDied as died:
                if died.pid != peer.pid:
                    problem = f"the report is wrong: {died}"
            except errors.RingError as error:
                problem = f"{type(error).__name__}: {error}"
            noticed = time.monotonic()
            killer.join()
            killed = killer.killed_at
        peer.wait()
    left = [file for file in find_ring_files() if file.creator.pid in (os.getpid(), peer.pid)]
    if not problem and left:
        problem = f"left behind: {left}"
    return KillResult("early", problem, 0, (noticed - killed) * 1e3)


def check_kills(rounds: int, seed: int, early: bool = False) -> dict[str, object]:
    """Runs many kill rounds and sums them up; "failed" lists every broken promise."""
    rng = random.Random(seed)
    one = early_kill_round if early else kill_round
    with tempfile.TemporaryDirectory() as directory:
        results = [one(rng, Path(directory), number) for number in range(rounds)]
    delays = sorted(result.noticed_ms for result in results)
    return {
        "rounds": rounds,
        "messages": sum(result.messages for result in results),
        "noticed_ms_median": round(delays[rounds // 2], 3),
        "noticed_ms_max": round(delays[-1], 3),
        "failed": [asdict(result) for result in results if result.problem],
    }


def check_transfer(messages: int, wait: str, max_bytes: int = 200) -> dict[str, object]:
    """Sends many messages from a second process and checks each one."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        progress = Path(directory) / "p"
        with RingReader.create(64, max_bytes, wait=wait) as reader:
            peer = start_peer(
                "produce", reader.name, progress, count=messages, max_bytes=max_bytes, wait=wait
            )
            reader.wait_attached(60)
            start, memory, number = time.monotonic(), _own_bytes(), 0
            for message in reader:
                if message.sequence != number or not is_intact(message.data, number, max_bytes):
                    failed.append(f"message {number}")
                    break
                number += 1
            seconds, growth = time.monotonic() - start, _own_bytes() - memory
        if number != messages:
            failed.append(f"{number} of {messages} messages arrived")
        if growth > 4 << 20:
            failed.append(f"the reader grew by {growth} bytes")
        if peer.wait() != 0:
            failed.append(f"the producer ended with status {peer.returncode}")
    return {
        "messages": number,
        "seconds": round(seconds, 1),
        "growth_bytes": growth,
        "failed": failed,
    }


def check_mutations(rounds: int, seed: int) -> dict[str, object]:
    """Damages live segments at random: delivered whole or refused, never anything else."""
    ranges, seen = used_ranges(), {"delivered": 0, "CorruptMessage": 0}
    failed: list[str] = []
    memory = _own_bytes()
    for number in range(rounds):
        try:
            seen[outcome(seed + number, *ranges[number % len(ranges)], True)] += 1
        except (Exception, AssertionError) as error:
            failed.append(f"seed {seed + number}: {type(error).__name__}: {error}")
    growth = _own_bytes() - memory
    if growth > 8 << 20:
        failed.append(f"the process grew by {growth} bytes")
    return {"rounds": rounds, "growth_bytes": growth, **seen, "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--early-kills", type=int, default=100)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--mutations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        print("NOT RUN ring_soak: the ring needs Linux (POSIX semaphores, pidfd)")
        return 0
    checks = {
        "kills": (options.kills, lambda n: check_kills(n, options.seed)),
        "early_kills": (options.early_kills, lambda n: check_kills(n, options.seed, early=True)),
        "messages": (options.messages, lambda n: check_transfer(n, "predict")),
        "mutations": (options.mutations, lambda n: check_mutations(n, options.seed)),
    }
    ok = True
    for name, (amount, check) in checks.items():
        if amount == 0:
            print(f"NOT RUN {name}: asked for 0")
            continue
        result = check(amount)
        ok = ok and not result["failed"]
        print(
            f"RUN {name} {'failed' if result['failed'] else 'passed'} {json.dumps(result)}",
            flush=True,
        )
    return int(not ok)


def _own_bytes() -> int:
    """This process's own memory: exact, and without the pages of files, which come and go."""
    (line,) = (
        line
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Anonymous:")
    )
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())

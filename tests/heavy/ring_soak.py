"""The ring's long checks: `python -m tests.heavy.ring_soak [--kills N] [--messages N] ...`.

Each prints RUN with its figures, or NOT RUN and why. Exit status 1 when one failed. CI runs the
same functions with smaller numbers (tests/ipc), except those that depend on time.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from ipc import RingReader, RingWriter, errors
from ipc.doctor import find_ring_files, remove_leftovers
from tests.support import ring_storm
from tests.support.ring_damage import outcome, used_ranges
from tests.support.ring_machine import RingMachine
from tests.support.ring_peer import Killer, Progress, is_intact, payload, start_peer

MODES = ("predict", "block", "spin")
MAX_NOTICE_MS = 100


@dataclass(frozen=True)
class KillResult:
    """One SIGKILL. `problem` is empty when every promise held."""

    side: str
    problem: str
    messages: int
    noticed_ms: float


def kill_round(rng: random.Random, directory: Path, number: int) -> KillResult:
    """Starts a peer under load, kills it at a random moment, and checks every promise."""
    side = rng.choice(["producer", "consumer"])
    slots, max_bytes = rng.choice([1, 2, 16]), rng.choice([100, 3000, 200_000])
    progress = directory / f"kill-{number}"
    ring, pid, reap = start_under_load(rng, side, slots, max_bytes, progress)
    killer = Killer(pid, rng.random() * 0.03)
    with ring:
        crossed, problem = transfer_until_death(ring, side, pid, max_bytes)
        noticed = time.monotonic()
    killer.join()
    reap()
    record = Progress.at(progress)
    # The peer notes a message after it has crossed: the kill can fall between the two.
    if not problem and not record.done <= crossed <= record.done + 1:
        problem = f"the peer had {record.done} messages across, this side saw {crossed}"
    if not problem and record.damaged:
        problem = f"damaged messages at the consumer: {record.damaged}"
    problem = problem or left_behind(pid)
    return KillResult(side, problem, crossed, (noticed - killer.killed_at) * 1e3)


def start_under_load(
    rng: random.Random, side: str, slots: int, max_bytes: int, progress: Path
) -> tuple[RingReader | RingWriter, int, Callable[[], int]]:
    """Starts the peer that is the `side`; either of the two may create the ring.

    Returns this end of the ring, the peer's process id and what reaps it.
    """
    job = "produce" if side == "producer" else "consume"
    here = RingReader if side == "producer" else RingWriter
    wait, peer_wait = rng.choice(MODES), rng.choice(MODES)
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
    return ring, peer.pid, peer.wait


def transfer_until_death(
    ring: RingReader | RingWriter, side: str, pid: int, max_bytes: int
) -> tuple[int, str]:
    """Moves messages until the peer is dead. Returns how many crossed, and a problem."""
    crossed, problem = 0, ""
    try:
        while True:
            if isinstance(ring, RingReader):
                message = ring.receive(10)
                if message.sequence != crossed or not is_intact(message.data, crossed, max_bytes):
                    problem = f"message {crossed} is damaged or out of order"
                crossed += 1
            else:
                ring.send(*payload(ring.counters().messages, max_bytes), timeout=10)
    except errors.PeerDied as died:
        crossed = died.last_sequence + 1 if side == "consumer" else crossed
        if (died.side, died.pid, died.last_sequence) != (side, pid, crossed - 1):
            problem = f"the report is wrong: {died}"
    except errors.RingError as error:
        problem = f"{type(error).__name__}: {error}"
    return crossed, problem


def left_behind(pid: int) -> str:
    """Says which names this process and process `pid` left in /dev/shm; "" if they left none."""
    left = [file for file in find_ring_files() if file.creator.pid in (os.getpid(), pid)]
    return f"left behind: {left}" if left else ""


def early_kill_round(rng: random.Random, directory: Path, number: int) -> KillResult:
    """Kills a peer while it starts, attaches or creates; doctor must clean up after creators."""
    kill = killed_creator if rng.random() < 0.5 else killed_attacher
    pid, problem, late = kill(rng, directory / f"early-{number}")
    return KillResult("early", problem or left_behind(pid), 0, late * 1e3)


def killed_creator(rng: random.Random, progress: Path) -> tuple[int, str, float]:
    """Kills a creator. Returns its process id, a problem, and 0.0: nothing waits for it."""
    peer = start_peer("produce", "create", progress)
    Killer(peer.pid, rng.random() * 0.25).join()
    peer.communicate()
    files = [file for file in find_ring_files() if file.creator.pid == peer.pid]
    remove_leftovers(files)
    living = any(file.state != "dead" for file in files)
    return peer.pid, "doctor takes a dead creator for a living one" if living else "", 0.0


def killed_attacher(rng: random.Random, progress: Path) -> tuple[int, str, float]:
    """Kills an attacher. Returns its process id, a problem, and the seconds to notice it."""
    problem = ""
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
    peer.wait()
    return peer.pid, problem, noticed - killer.killed_at


def check_kills(rounds: int, seed: int, early: bool = False) -> dict[str, Any]:
    """Runs `rounds` kill rounds and sums them up; "failed" lists every broken promise."""
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


def check_notice(result: dict[str, Any]) -> dict[str, Any]:
    """Adds what an idle machine promises: half of all deaths are noticed within `MAX_NOTICE_MS`."""
    if result["noticed_ms_median"] >= MAX_NOTICE_MS:
        result["failed"].append(f"half of the deaths were noticed after {MAX_NOTICE_MS} ms")
    return result


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
    """Damages live segments at random: messages are delivered whole or refused."""
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


def check_storms(messages: int) -> dict[str, object]:
    """Moves messages while signal handlers raise in one process; `failed` says what went wrong."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as directory, ring_storm.storm_of_signals() as storm:
        for wait in MODES:
            for move in (ring_storm.read, ring_storm.write):
                try:
                    move(storm, wait, Path(directory) / f"{move.__name__}-{wait}", messages)
                except (Exception, AssertionError) as error:
                    failed.append(f"{move.__name__}, {wait}: {type(error).__name__}: {error}")
    return {"messages": messages, "failed": failed}


def check_model(examples: int) -> dict[str, object]:
    """Compares the ring with its model in random examples."""
    long = settings(max_examples=examples, stateful_step_count=40, derandomize=False, database=None)
    failed: list[str] = []
    try:
        run_state_machine_as_test(RingMachine, settings=long)
    except (Exception, AssertionError) as error:
        failed.append(f"{type(error).__name__}: {error}")
    return {"examples": examples, "failed": failed}


def main() -> int:
    """Runs the checks with the numbers of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--early-kills", type=int, default=100)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--slower-messages", type=int, default=500_000)
    parser.add_argument("--mutations", type=int, default=200_000)
    parser.add_argument("--storms", type=int, default=10_000)
    parser.add_argument("--model", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        print("NOT RUN ring_soak: the ring needs Linux (POSIX semaphores, pidfd)")
        return 0
    seed = options.seed
    checks: dict[str, tuple[int, Callable[[int], dict[str, object]]]] = {
        "kills": (options.kills, lambda n: check_notice(check_kills(n, seed))),
        "early_kills": (options.early_kills, lambda n: check_kills(n, seed, early=True)),
        "messages": (options.messages, lambda n: check_transfer(n, "predict")),
        "block": (options.slower_messages, lambda n: check_transfer(n, "block")),
        "spin": (options.slower_messages, lambda n: check_transfer(n, "spin")),
        "mutations": (options.mutations, lambda n: check_mutations(n, seed)),
        "storms": (options.storms, check_storms),
        "model": (options.model, check_model),
    }
    ok = True
    for name, (amount, check) in checks.items():
        if amount == 0:
            print(f"NOT RUN {name}: asked for 0")
            continue
        result = check(amount)
        ok = ok and not result["failed"]
        passed = "failed" if result["failed"] else "passed"
        print(f"RUN {name} {passed} {json.dumps(result)}", flush=True)
    return int(not ok)


def _own_bytes() -> int:
    """Returns this process's own memory in bytes, exactly and without the pages of files."""
    (line,) = (
        line
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Anonymous:")
    )
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())

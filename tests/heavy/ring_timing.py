"""What the ring promises in seconds: a death noticed within 100 ms, little CPU time on one core.

Both are promises for an idle machine, which keeps them at the first attempt. A busy machine gets
several attempts. `tests.heavy.ring_soak` runs these; no test of CI depends on time.
"""

import os
import tempfile
import time
from pathlib import Path

from ipc import RingReader, RingWriter, errors
from tests.support.ring_peer import Killer, Progress, payload, start_peer

MODES = ("predict", "block", "spin")
MAX_NOTICE_S = 0.1
# CPU seconds a message, by the producer's pause between two. Yielding costs 7 to 140 us; a spinning
# side that keeps the core takes a whole time slice (2.5 ms) for a few messages.
MAX_CPU_S = {50: 0.5e-3, 0: 0.1e-3}


def check_deaths(attempts: int) -> dict[str, object]:
    """Kills an idle peer: `failed` names the ways of waiting that never noticed it in time."""
    least = {}
    for wait in MODES:
        for side in ("producer", "consumer"):
            delays: list[float] = []
            while len(delays) < attempts and (not delays or delays[-1] >= MAX_NOTICE_S):
                delays.append(seconds_to_notice(wait, side))
            least[f"{side}, {wait}"] = min(delays)
    return {
        "noticed_ms": {name: round(1e3 * delay, 3) for name, delay in least.items()},
        "failed": [name for name, delay in least.items() if delay >= MAX_NOTICE_S],
    }


def seconds_to_notice(wait: str, side: str) -> float:
    """Returns the time from the kill of the `side` until the other side, waiting, has noticed."""
    here, job = (RingReader, "produce") if side == "producer" else (RingWriter, "consume")
    with tempfile.TemporaryDirectory() as directory, here.create(2, 64, wait=wait) as ring:
        progress = Path(directory) / "p"
        peer = start_peer(job, ring.name, progress, count=3, max_bytes=64, then="sleep")
        if isinstance(ring, RingReader):
            for _ in range(3):
                ring.receive(30)
        else:
            for number in range(5):  # three are received, two fill the ring
                ring.send(*payload(number, 64), timeout=30)
            while Progress.at(progress).done < 3:
                time.sleep(0.001)
        killer = Killer(peer.pid, 0.05)
        try:
            if isinstance(ring, RingReader):
                ring.receive(30)
            else:
                ring.send(timeout=30)
        except errors.PeerDied:
            noticed = time.monotonic()
        killer.join()
        peer.wait(30)
    return noticed - killer.killed_at


def check_one_core(attempts: int) -> dict[str, object]:
    """Pins both sides to one core: `failed` names the ways of waiting that cost too much there."""
    least = {}
    for wait in MODES:
        for gap_us, limit in MAX_CPU_S.items():
            used: list[float] = []
            while len(used) < attempts and (not used or used[-1] >= limit):
                used.append(cpu_seconds_per_message(wait, gap_us))
            least[f"{wait}, gap {gap_us} us"] = (min(used), limit)
    return {
        "cpu_us": {name: round(1e6 * used, 1) for name, (used, _) in least.items()},
        "failed": [name for name, (used, limit) in least.items() if used >= limit],
    }


def cpu_seconds_per_message(wait: str, gap_us: int, count: int = 1000) -> float:
    """Returns the CPU time of both sides a message, on one core that other programs may share."""
    before = os.sched_getaffinity(0)
    core = min(before)
    with (
        tempfile.TemporaryDirectory() as directory,
        RingReader.create(4, 3000, wait=wait) as reader,
    ):
        progress = Path(directory) / "p"
        peer = start_peer(
            "produce", reader.name, progress,
            wait=wait, count=count, max_bytes=3000, core=core, gap_us=gap_us,
        )  # fmt: skip
        os.sched_setaffinity(0, {core})
        try:
            first = reader.receive(30)
            begun = time.thread_time()
            rest = [message.sequence for message in reader]
            used = time.thread_time() - begun
        finally:
            os.sched_setaffinity(0, before)
        assert [first.sequence, *rest] == list(range(count))
        assert peer.wait(30) == 0
        return (used + Progress.at(progress).cpu_seconds) / count

"""One step from process to process: the ring against other transports, and against a bound in C.

Latency is the time from just before the sender encodes until the receiver has NumPy arrays.
Producer and consumer are pinned to two different cores, as wake-ups on one core flatter semaphores.
Every contender has a producer process. Each round measures all of them in turn, in another order.
Each first delivers a random step, which must arrive equal.

hot: a message 100-200 us after the last one arrived. idle: 5 ms after, as between decode steps. So
no message waits behind another. throughput: back to back, as fast as the consumer takes them.

Some cases run beside two busy loops, one on each of the two cores, as on a machine whose cores have
other work. The settings say how many loops there were, and the load average before each start: that
of other programs, which nobody here controls.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bench.ring.contenders import BOUND, CONTENDERS, NotAvailable
from bench.ring.link import Link, check_equal, link, measure
from bench.timing import BenchError, Comparison, Target, from_samples, rotated, rounds_of

HOT, IDLE = 100e-6, 5e-3
CASES = {
    # title: bytes, seconds between messages, messages a round, whether the bound is measured too
    "a step at K = 0 (64 requests x 4 tokens, 4,160 bytes), hot": (4_160, HOT, 600, True),
    "16 KB, hot": (16_384, HOT, 600, True),
    "530 KB, hot": (530_000, HOT, 300, True),
    "2 KB, 5 ms between messages": (2_048, IDLE, 80, False),
    "16 KB, 5 ms between messages": (16_384, IDLE, 80, False),
    "530 KB, 5 ms between messages": (530_000, IDLE, 80, False),
    "530 KB, throughput": (530_000, 0.0, 400, True),
    "16 KB, hot, beside two busy loops": (16_384, HOT, 200, False),
    "16 KB, 5 ms between messages, beside two busy loops": (16_384, IDLE, 80, False),
}
BESIDE = ", beside two busy loops"
# They look at their parent now and then, and end with it.
BUSY_LOOP = """
import os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
SPINNERS = ("ring, spin", "iceoryx2, spin")  # beside busy loops, a message takes them time slices


# What the ring is expected to keep on any machine, a busy one too: on a quiet one it is far better.
PROMISES = (
    # in the case of this title, than which other, how many times as fast at least
    ("a step at K = 0", "SysV fixed struct", 3.0),
    ("16 KB, hot", "ZeroMQ msgpack", 1.2),
    ("16 KB, hot", "SysV fixed struct", 3.0),
    ("530 KB, hot", "ZeroMQ copy=False", 2.0),
    ("530 KB, hot", BOUND, 1 / 2.5),
    ("530 KB, 5 ms between messages", "ZeroMQ copy=False", 1.2),
    (f"16 KB, hot{BESIDE}", "ZeroMQ msgpack", 1.0),
)
SLOWEST_LIMIT = 2.0  # the slowest hundredth beside busy loops, over that of a side that sleeps
CPU_LIMIT = 0.15  # of a core, for the consumer between messages 5 ms apart


@dataclass
class Samples:
    """The measurements by case and contender, and why contenders could not run."""

    # Of each round, what `link.measure` returns.
    rounds: dict[str, dict[str, list[tuple[float, float, list[float]]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    missing: dict[str, str] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)  # of the last minute, before each start


@contextmanager
def busy_loops(cores: Sequence[int]) -> Iterator[None]:
    """Keep each of `cores` busy with a process that computes and never waits."""
    loops = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY_LOOP, str(core), str(os.getpid())],
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for this process, which ends them
        )
        for core in cores
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def bound_program() -> Iterator[Path | None]:
    """The compiled ring_bound.c; None where no C compiler can compile it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "ring_bound")
        source = Path(__file__).with_name("ring_bound.c")
        command = [compiler, "-O2", "-o", str(program), str(source)]
        done = subprocess.run(command, check=False, capture_output=True)
        yield program if done.returncode == 0 else None  # a compiler may lack its C library


def measure_bound(program: Path, cores: Sequence[int], size: int, gap: float, count: int) -> float:
    """Seconds a message in C: the bound of any transport that copies twice."""
    command = [program, *cores, size, count, int(gap * 1e9)]
    output = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
    return float(output.stdout.split()[0]) * 1e-9


def run(quick: bool = False) -> list[Comparison]:
    """Measure every case; the first contender, the ring, is the baseline of the ratios.

    A process may get memory that makes its copies between cores up to twice as slow for as long as
    it lives. So all processes are started several times, and the median is over the starts.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise BenchError("this benchmark needs two cores, one for each side")
    before = os.sched_getaffinity(0)
    starts, rounds, share = (1, 3, 4) if quick else (9, 1, 1)
    taken = Samples()
    try:
        os.sched_setaffinity(0, {cores[0]})
        with bound_program() as program:
            if program is None:
                taken.missing[BOUND] = "no C compiler that works"
            for start in rounds_of("messages from process to process", starts):
                taken.loads.append(os.getloadavg()[0])
                with ExitStack() as stack:
                    links = _start_all(stack, cores[1], taken)
                    for index in range(start, start + rounds):
                        names = rotated(list(links), index)
                        _round(links, program, cores, names, share, taken)
    finally:
        os.sched_setaffinity(0, before)
    return [_comparison(title, taken, starts * rounds) for title in CASES]


def _start_all(stack: ExitStack, core: int, taken: Samples) -> dict[str, Link]:
    links = {}
    for name in CONTENDERS:
        if name in taken.missing:
            continue
        try:
            links[name] = stack.enter_context(link(name, core))
            check_equal(links[name], [size for size, *_ in CASES.values()])
        except NotAvailable as reason:
            taken.missing[name] = str(reason)
    return links


def _round(
    links: dict[str, Link],
    program: Path | None,
    cores: Sequence[int],
    names: Sequence[str],
    share: int,
    taken: Samples,
) -> None:
    for title, (size, gap, count, with_bound) in CASES.items():
        messages = max(count // share, 20)
        with busy_loops(cores) if title.endswith(BESIDE) else nullcontext():
            for name in names:
                if not (name in SPINNERS and title.endswith(BESIDE)):
                    found = measure(links[name], size, gap, messages)
                    taken.rounds[title][name].append(found)
        if program is not None and with_bound:
            seconds = measure_bound(program, cores, size, gap, messages)
            taken.rounds[title][BOUND].append((seconds, 0.0, []))


def _comparison(title: str, taken: Samples, rounds: int) -> Comparison:
    size, gap, count, _ = CASES[title]
    notes: dict[str, Any] = {f"NOT RUN {name}": why for name, why in taken.missing.items()}
    settings = {
        "bytes": size,
        "gap_s": gap,
        "messages": count,
        "rounds": rounds,
        "busy loops": 2 if title.endswith(BESIDE) else 0,
        "load": statistics.median(taken.loads),
    }
    # By contender: the seconds, the shares of a core and the latencies, each of all rounds.
    of = {name: list(zip(*all_of, strict=True)) for name, all_of in taken.rounds[title].items()}
    plain = from_samples(
        title,
        {name: seconds for name, (seconds, _, _) in of.items()},
        settings=settings,
        notes=notes,
        events={name: list(chain(*latencies)) for name, (_, _, latencies) in of.items()},
    )
    figures: dict[str, dict[str, float]] = {}
    if gap == IDLE:
        for name, (_, cpu, _) in of.items():
            figures[name] = {"consumer's cores": statistics.median(cpu)}
    if gap == 0:
        for timing in plain.timings:
            figures[timing.name] = {"MB/s": size / timing.median / 1e6}
    found = replace(plain, figures=figures)
    return replace(found, targets=tuple(targets_of(found)))


def targets_of(one: Comparison) -> Iterator[Target]:
    """The limits of a case, and what was measured of them."""
    beside = one.title.endswith(BESIDE)
    for case, other, least in PROMISES:
        if one.title.startswith(case) and beside == case.endswith(BESIDE):
            factor = one.speedup("ring", other) if other in one.names else None
            yield Target(f"speed over {other}", least, factor, "x", at_least=True)
    if beside:
        ours, asleep = (one[name].percentiles["p99"] for name in ("ring", "ring, block"))
        yield Target("p99 over that of block", SLOWEST_LIMIT, ours / asleep, "x")
    if "consumer's cores" in one.figures.get("ring", {}):
        share = one.figures["ring"]["consumer's cores"]
        yield Target("the consumer's share of a core", CPU_LIMIT, share, "cores")

"""What the model of the time says of a compiled call, and the limits that it is held to.

`limits.json` holds the microseconds of every shape, as they were when they were last accepted, with
the oldest jax; `limits-0.12.json` those with jax 0.12 and later, which makes other code of the same
kernels. A change that makes them slower by the model breaks them. `bench.aot --accept` writes those
of the jax at hand.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.gpu import events, model, trips
from bench.gpu.sass import Kernel
from pallas_kernels.backends.mosaic_gpu.schedule import (
    GROUP,
    GROUPS_PER_BLOCK,
    WARPGROUP,
    Schedule,
)
from pallas_kernels.testing.shapes import Shape

FOLDER = Path(__file__).parent
SLACK = 1.03  # other versions of ptxas differ by so much without being slower
LARGE = 131_072  # shares of pass 1's time are promised from this vocabulary on
# Instructions of a thread in pass 2 for each of the top K, from K = 20 on, by jax's minor version;
# and for each group that it weighs for the row's sum.
TAKE = {(0, 10): 62, (0, 12): 69}
WEIGH = 60
LATENCY = 12e-6  # of pass 2 at 64 rows and K = 20
# A call's kernel by events, of 64 rows with K = 20, in microseconds.
BY_EVENTS = {(131_072, "bfloat16"): 11.3, (151_936, "bfloat16"): 11.7, (131_072, "float32"): 16.8}
# Pass 2's share of pass 1's time at 1536 rows.
SHARES = {20: 0.11, 128: 0.60}
# Rows and largest K -> the share of the chip's bandwidth that a call reaches, by dtype. Pass 1
# writes a float32 sum a group of 256 logits, 0.8 % of the bytes of 16-bit ones.
SPEEDS = {
    (1536, 20): {"bfloat16": 0.84, "float32": 0.85},
    (1536, 64): {"bfloat16": 0.82},
    (1536, 128): {"bfloat16": 0.80, "float32": 0.81},
    (256, 20): {"bfloat16": 0.67, "float32": 0.77},
}


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call by the model."""

    pass1: model.Time
    pass2: model.Time
    launches: float  # until the kernels start
    by_events: float = 0.0  # with starts and tails, without launches (`bench.gpu.events`); 0: none
    besides: float = 0.0  # of another kernel, its launch included

    @property
    def total(self) -> float:
        """From the end of what was before to the end of the call."""
        passes = self.by_events or self.pass1.total + self.pass2.total
        return self.launches + passes + self.besides


def estimate(
    shape: Shape,
    schedule: Schedule,
    kernels: Sequence[Kernel],
    chip: model.Chip,
    more: int = 0,
    biases: int = 0,
) -> Estimate:
    """The model's time of a call without extra ids.

    Args:
      shape: of the call, all of whose rows are wanted.
      schedule: as compiled.
      kernels: pass 1 and pass 2.
      chip: what it runs on.
      more: bytes that pass 1 reads or writes of a row besides: of a mask, of group sums.
      biases: of a row, each in a group of its own, which the programs of its cluster read again.
    """
    size = jnp.dtype(shape.dtype).itemsize
    # A sum of each group, and a maximum of each part.
    groups = schedule.num_groups * 4 + schedule.num_parts * size
    again = min(shape.k, schedule.num_parts) * schedule.part_width * size
    results = 12 * schedule.programs
    edges = schedule.programs - schedule.splits
    one, two = (kernels[0], kernels[-1])
    first, second = one.code, two.code
    clustered, lost = len(kernels) == 1, 0.0
    if clustered:
        first, second = one.code.around_cluster_barrier()
        # What was read lately is in the second-level cache still, if it holds all rows under way.
        places = chip.multiprocessors * model.places(one.registers, chip)
        under_way = places / schedule.programs * shape.vocabulary * size
        lost = max(0.0, 1 - chip.cache / under_way)
    pass1 = model.Launched(
        first,
        one.registers,
        shape.rows * schedule.programs,
        shape.rows
        * (shape.vocabulary * size + groups + results + more + biases * (lost * GROUP * size + 8)),
        trips.of_pass1(schedule, again=biases > 0),
    )
    pass2 = model.Launched(
        second.until_exit(),  # rows without an answer come behind
        two.registers,
        shape.rows,
        shape.rows * (again + groups + results + 8 * shape.k + 24),
        trips.of_pass2(schedule, shape.k),
    )
    times = model.time(pass1, chip), model.time(pass2, chip)
    if not clustered:
        reading = events.seconds(pass1, edges, shape.rows, chip)
        return Estimate(*times, 2 * chip.launch, reading + times[1].total)
    then = events.Then(
        times[1].latency * chip.clock,
        times[1].busiest * chip.clock,
        again * lost + 8 * shape.k + 24,
    )
    reading = events.seconds(pass1, edges, shape.rows, chip, then)
    return Estimate(*times, chip.launch, reading)


def with_biased(found: Estimate, shape: Shape, kernel: Kernel, chip: model.Chip) -> Estimate:
    """With the kernel that sums the groups of `trips.BIASES` tokens of each row again."""
    size = jnp.dtype(shape.dtype).itemsize
    launched = model.Launched(
        kernel.code,
        kernel.registers,
        shape.rows * trips.BIASES // GROUPS_PER_BLOCK,
        shape.rows * trips.BIASES * (GROUP * size + 8),
        trips.of_biased(),
    )
    return replace(found, besides=model.time(launched, chip).total + chip.launch)


def speed(shape: Shape, found: Estimate, chip: model.Chip) -> float:
    """The logits' bytes over the time, as a share of the chip's bandwidth."""
    size = shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize
    return size / chip.bandwidth / found.total


def missed(shape: Shape, found: Estimate, chip: model.Chip) -> list[str]:
    """A sentence for each promise of the model that a call with all options does not keep."""
    out = []
    take = found.pass2.per_thread / max(shape.k, 1)
    of_jax = TAKE[max(version for version in TAKE if version <= jax.__version_info__)]
    most_taken = of_jax + WEIGH * -(-shape.vocabulary // (GROUP * WARPGROUP)) / max(shape.k, 1)
    if shape.k >= 20 and take > most_taken:
        out.append(f"pass 2 issues {take:.0f} instructions a token and thread > {most_taken:.0f}")
    if (shape.rows, shape.k) == (64, 20) and found.pass2.latency > LATENCY:
        out.append(f"pass 2 takes {found.pass2.latency * 1e6:.1f} us > {LATENCY * 1e6:.0f}")
    most = BY_EVENTS.get((shape.vocabulary, shape.dtype), 0.0)
    if (shape.rows, shape.k) == (64, 20) and most and found.by_events * 1e6 > most:
        out.append(f"it takes {found.by_events * 1e6:.1f} us by events > {most}")
    if shape.rows == 1536 and shape.vocabulary >= LARGE:
        limit = min((share for k, share in SHARES.items() if shape.k <= k), default=None)
        share = found.pass2.instructions / found.pass1.total
        if limit is not None and share > limit:
            out.append(f"pass 2's instructions take {share:.0%} of pass 1's time > {limit:.0%}")
    if shape.vocabulary < LARGE:
        return out
    for (rows, most), by_dtype in SPEEDS.items():
        wanted = by_dtype.get(shape.dtype, 0)
        if shape.rows != rows or shape.k > most:
            continue
        reached = speed(shape, found, chip)
        if reached < wanted:
            out.append(f"{reached:.0%} of the bandwidth < {wanted:.0%}")
        break
    return out


def limits_file(version: tuple[int, ...] = jax.__version_info__) -> Path:
    """The limits of what this version of jax makes: the newest ones that are not of a later one."""
    minor = {
        tuple(map(int, file.stem.removeprefix("limits-").split("."))): file
        for file in FOLDER.glob("limits-*.json")
    }
    known = [number for number in minor if number <= version]
    return minor[max(known)] if known else FOLDER / "limits.json"


def slower(name: str, found: Estimate) -> list[str]:
    """A sentence if a call is slower than its limit, or has none."""
    limit = _limits().get(name)
    if limit is None:
        return ["it has no limit: run `python -m bench.aot --accept`"]
    microseconds = found.total * 1e6
    if microseconds <= limit * SLACK:
        return []
    return [f"{microseconds:.1f} us by the model > {limit} us, the limit"]


def accept(found: dict[str, Estimate]) -> None:
    """Write the limits of these calls; those of others stay."""
    limits = _limits() | {name: round(x.total * 1e6, 1) for name, x in found.items()}
    limits_file().write_text(json.dumps(limits, indent=1, sort_keys=True) + "\n")


def _limits() -> dict[str, float]:
    file = limits_file()
    found: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return found

"""How often the kernels' loops turn, for the model of the time: from the schedule, and from logits.

What depends on logits is counted on one row of normally distributed ones, rounded to their dtype:
how often the range of group maxima is halved, how many candidates there are, and how many of them a
warp meets in one word of marks. Loops are told apart by their instructions.
"""

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from bench.gpu.machine_code import Code, Loop
from bench.gpu.model import Trips
from pallas_kernels.backends.mosaic_gpu.schedule import GROUPS_PER_BLOCK, WARPGROUP, Schedule
from pallas_kernels.backends.mosaic_gpu.selection import FREE_BITS, capacity
from pallas_kernels.backends.mosaic_gpu.selection_threads import AT_ONCE, OWN

BIASES = 64  # of a row, in the calls that have any
SPREAD = 4.0  # the logits' standard deviation; no count depends on it, except by rounding
MARKS = 32
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Selection:
    """What pass 2 does for one row."""

    halvings: int  # of the range of group maxima
    again: int  # looks at the groups, where more candidates are found than there is room for
    candidates: int
    marks: float  # of the lane that has most, a word of a warp; over all words


def _keys(bits: np.ndarray) -> np.ndarray:
    """The ordered keys of float32's bits, as int64."""
    return np.where(bits < 0, -(2**31) - bits, bits)


@functools.cache
def selection(vocabulary: int, dtype: str, width: int, k: int) -> Selection:
    """Count on one row of normally distributed logits, cut into groups of `width`."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=vocabulary) * SPREAD).astype(DTYPES[dtype]).astype(np.float32)
    groups = -(-vocabulary // width)
    padded = np.pad(x, (0, groups * width - vocabulary), constant_values=-np.inf)
    rows = padded.reshape(groups, width)
    bits = rows.max(axis=1).view(np.int32).astype(np.int64)
    keys = _keys(bits) >> FREE_BITS[dtype]
    low, high, above, halvings = int(keys.min()), int(keys.max()) + 1, 0, 0
    while high - low > 1 and above != k and 1 < k < groups:
        middle = (low + high) // 2
        cuts = (low, (low + middle) // 2, (middle + high) // 2, high)
        counts = [int((keys >= cut).sum()) for cut in cuts]
        i = max(i for i in range(3) if counts[i] >= k)
        low, high, above = cuts[i], cuts[i + 1], counts[i] if i else 0
        halvings += 1
    if k == 1:
        low = int(keys.max())
    chosen = np.argsort(-keys, kind="stable")[:k]
    bits = rows[chosen].view(np.int32).astype(np.int64)
    found = _keys(bits) >> FREE_BITS[dtype]
    if k >= groups:
        low = int(found[rows[chosen] > -np.inf].min())
    high, again = int(keys.max()) + 1, 0
    count = int((found >= low).sum())
    while k and (count > capacity(k) or (again and count < k)):
        middle = (low + high) // 2
        if middle == low:
            break  # ties: their ids are halved from here on
        count = int((found >= middle).sum())
        low, high = (low, middle) if count < k else (middle, high)
        again += 1
    marked = found >= low
    vector = 16 // np.dtype(DTYPES[dtype]).itemsize
    size = WARPGROUP * MARKS
    lanes = np.pad(marked.reshape(-1), (0, -marked.size % size))
    # A word of a thread: its vectors, 128 threads apart.
    words = lanes.reshape(-1, MARKS // vector, WARPGROUP // 32, 32, vector).sum(axis=(1, 4))
    return Selection(
        halvings, again, int(marked.sum()), float(words.max(axis=2).mean()) if k else 0.0
    )


def of_pass1(schedule: Schedule, *, again: bool = False) -> Trips:
    """A loop with exponentials is the steps of a program; of two, the longer one turns.

    One that loads, and has none, adds a bias: to as many tokens of a block as a warp has of them.

    Args:
      schedule: as compiled.
      again: whether another loop with exponentials sums the groups of biased tokens again: the one
        around a loop that adds biases.
    """
    steps = -(-schedule.num_steps // max(schedule.splits, 1))

    def trips(code: Code, loop: Loop) -> float:
        names = code.names(loop)
        if again:
            return _with_biased(code, loop, steps, schedule)
        if "MUFU.EX2" not in names:
            biased = BIASES * schedule.block / (4 * schedule.vocabulary)
            return biased if has(names, "LDG") else 1
        loops = [other for other in code.loops if "MUFU.EX2" in code.names(other)]
        return steps if loop == max(loops, key=lambda other: len(code.names(other))) else 0

    return trips


def _with_biased(code: Code, loop: Loop, steps: int, schedule: Schedule) -> float:
    """A loop around others sums blocks of biased groups; a row's programs share these."""
    if "MUFU.EX2" not in code.names(loop):
        return of_biased()(code, loop)
    if any(_inside(other, loop) for other in code.loops):
        return -(-BIASES // (GROUPS_PER_BLOCK * schedule.programs))
    return steps


def of_biased() -> Trips:
    """A loop adds the biases of a run, of which it has one; that in it finds biases further off."""

    def trips(code: Code, loop: Loop) -> float:
        return 1 if any(_inside(other, loop) for other in code.loops) else 0

    return trips


def of_pass2(schedule: Schedule, k: int) -> Trips:
    """The loops of the selection; the scan of invalid rows does not turn."""
    found = selection(schedule.vocabulary, schedule.dtype, schedule.part_width, k)
    vectors = min(k, schedule.num_parts) * schedule.part_width // (schedule.vector * WARPGROUP)
    chunks = max(1, -(-vectors // 12))

    def trips(code: Code, loop: Loop) -> float:
        names = code.names(loop)
        if has(names, "ATOM"):
            if has(names, "BAR"):
                return found.again
            inner = any(_inside(x, loop) and has(code.names(x), "ATOM") for x in code.loops)
            return chunks if inner else found.marks
        if has(names, "BAR"):
            return found.halvings
        if has(names, "LDG") or has(names, "LD."):
            return 0
        if has(names, "LDS"):
            return turns_of_order(code, loop, found.candidates)
        return 1

    return trips


def turns_of_order(code: Code, loop: Loop, candidates: int) -> float:
    """The turns of a loop that compares candidates; a load of 16 bytes holds two of them.

    A loop that is unrolled is followed by a smaller one for what is left. Such a set of loops
    serves `OWN` candidates of each thread; sets without any do not turn.
    """
    served, before = 0, 0
    left = 0
    for other in code.loops:
        names = code.names(other)
        if not has(names, "LDS") or any(has(names, x) for x in ("BAR", "ATOM")):
            continue
        each = max(2 * names.count("LDS.128") + names.count("LDS.64"), 1)
        if not before or each >= before:  # another set
            used = served == 0 or candidates > served
            left = -(-candidates // AT_ONCE) * AT_ONCE if used else 0
            served += OWN * WARPGROUP
        before, turns = each, left // each
        if other == loop:
            return turns
        left -= turns * each
    return 0


def has(names: tuple[str, ...], start: str) -> bool:
    """Whether an operation starts so."""
    return any(name.startswith(start) for name in names)


def _inside(a: Loop, b: Loop) -> bool:
    return a != b and b.begin <= a.begin and a.end <= b.end

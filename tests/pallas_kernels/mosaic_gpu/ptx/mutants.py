"""Spoiled PTX: one instruction at a time is changed, and a run must notice it.

Noticed is an error of the machine (a race, an address, an undefined value, a missing lane), another
result than the oracle's, or other bits than before. What is not noticed is either without effect on
any result, or a hole in the cases; the report names them.
"""

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from tests.pallas_kernels.mosaic_gpu.ptx import kernels
from tests.pallas_kernels.mosaic_gpu.ptx.cases import Case
from tests.ptx_machine.parser import PtxError, parse

FLIPS = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class Mutant:
    kind: str
    line: int
    text: str  # the whole module


def mutants(ptx: str) -> list[Mutant]:
    """Every mutant of a module."""
    lines = ptx.splitlines()
    out = []
    for i, line in enumerate(lines):
        for kind, change in CHANGES.items():
            changed = change(line)
            if changed is not None and changed != line:
                text = "\n".join([*lines[:i], changed, *lines[i + 1 :]])
                out.append(Mutant(kind, i + 1, text))
    return out


def _barrier(line: str) -> str | None:
    return "" if line.strip().startswith("bar.sync") else None


def _shuffle(line: str) -> str | None:
    """Shuffle by the distance of the one before, so that a lane misses half of its warp."""

    def other(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) // 2 or 2}{found[3]}"

    if "shfl.sync.bfly" not in line:
        return None
    return re.sub(r"(, )(\d+)(, 31, -1;)", other, line)


def _address(line: str) -> str | None:
    """Access memory four bytes further on."""
    if re.match(r"\s*(@!?%p\d+\s+)?(ld|st)\.(?!param)", line) is None:
        return None

    def further(found: re.Match[str]) -> str:
        return f"[{found[1]}+{int(found[2] or 0) + 4}]"

    return re.sub(r"\[([%\w]+)(?:\+(\d+))?\]", further, line)


def _comparison(line: str) -> str | None:
    return re.sub(
        r"setp\.(lt|le|gt|ge|eq|ne)\.", lambda found: f"setp.{FLIPS[found[1]]}.", line, count=1
    )


def _branch(line: str) -> str | None:
    """Branch the other way."""
    if "bra" not in line or "@" not in line:
        return None
    return line.replace("@!", "@~").replace("@%", "@!%").replace("@~", "@")


def _operation(line: str) -> str | None:
    for a, b in (("add.f32", "sub.f32"), ("min.s32", "max.s32"), ("or.b32", "and.b32")):
        for old, new in ((a, b), (b, a)):
            if re.match(rf"\s*{re.escape(old)}\s", line):
                return line.replace(old, new)
    return None


CHANGES: dict[str, Callable[[str], str | None]] = {
    "barrier removed": _barrier,
    "shuffle by another distance": _shuffle,
    "address 4 bytes on": _address,
    "comparison flipped": _comparison,
    "branch flipped": _branch,
    "operation changed": _operation,
}


def noticed(
    case: Case, originals: dict[str, Any], mutated: Any, conditions: kernels.Conditions, bits: list
) -> str | None:
    """How a mutated kernel was found out; None if it was not."""
    kernel_set = originals | {mutated.name: mutated}
    stand = kernels.Stand(
        conditions, lambda body, options, args: kernel_set[options["kernel_name"]]
    )
    try:
        with kernels.executed(stand, case.modules):
            result = case.call()
        case.check(result)
    except PtxError as error:
        return "race" if "data race" in str(error) else "machine"
    except AssertionError:
        return "result"
    same = [np.asarray(x).tobytes() for x in jax.tree.leaves(result)] == bits
    return None if same else "bits"


def report(
    case: Case,
    compiler: kernels.Compiler,
    conditions: kernels.Conditions,
    number: int,
    seed: int,
    console: Console,
) -> list[str]:
    """Try some mutants of each kind and say what found them; errors for a kind that none found."""
    stand = kernels.Stand(conditions, compiler)
    with kernels.executed(stand, case.modules):
        result = case.call()
    bits = [np.asarray(x).tobytes() for x in jax.tree.leaves(result)]
    originals = {run.kernel.name: run.kernel for run in stand.runs}
    usual = max(run.counts.instructions for run in stand.runs)
    limited = replace(
        conditions, hardware=replace(conditions.hardware, max_instructions=10 * usual)
    )
    pool = [(kernel, m) for kernel in originals.values() for m in mutants(kernel.ptx)]
    random.Random(seed).shuffle(pool)
    # The rare kinds first and whole: barriers above all.
    kinds = Counter(mutant.kind for _, mutant in pool)
    share = max(1, number // len(kinds))
    chosen = [pair for kind in kinds for pair in [p for p in pool if p[1].kind == kind][:share]]
    found: Counter[tuple[str, str]] = Counter()
    missed = []
    for kernel, mutant in track(chosen, "mutants", console=console, transient=True):
        changed = replace(kernel, ptx=mutant.text, program=parse(mutant.text))
        how = noticed(case, originals, changed, limited, bits)
        found[mutant.kind, how or "missed"] += 1
        if how is None:
            line = kernel.ptx.splitlines()[mutant.line - 1].strip()
            missed.append(f"{kernel.name} line {mutant.line}: {mutant.kind}: {line}")
    out = []
    for kind in sorted(kinds):
        hows = {how: n for (k, how), n in sorted(found.items()) if k == kind}
        numbers = ", ".join(f"{n} by {how}" for how, n in hows.items())
        print(f"mutants of {case.name}: {kind}: {numbers}")
        if set(hows) == {"missed"}:
            out.append(f"{case.name}: no mutant of kind {kind} was noticed")
    for text in missed:
        print(f"  missed: {text}")
    for text in out:
        print(f"WRONG {text}")
    return out

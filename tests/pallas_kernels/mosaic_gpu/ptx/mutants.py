"""Spoiled PTX: one instruction at a time is changed, and a run must notice it.

Noticed is an error of the machine (a race, an address, an undefined value, a missing lane), another
result than the oracle's, or other bits than before. What is not noticed is either without effect on
any result, or a hole in the cases; the report names them.
"""

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.pallas_kernels.mosaic_gpu.ptx import kernels
from tests.pallas_kernels.mosaic_gpu.ptx.cases import Case
from tests.ptx_machine.parser import PtxError, parse

FLIPS = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
PAIRS = {"add.f32": "sub.f32", "min.s32": "max.s32", "or.b32": "and.b32"}
OTHERS = PAIRS | {new: old for old, new in PAIRS.items()}
CHANGES: dict[str, tuple[str, Callable[[re.Match[str]], str]]] = {
    "barrier removed": (r"^\s*bar\.sync.*", lambda _: ""),
    # By the distance of the one before, so that a lane misses half of its warp.
    "shuffle by another distance": (
        r"(shfl\.sync\.bfly.*, )(\d+)(, 31, -1;)", lambda x: f"{x[1]}{int(x[2]) // 2 or 2}{x[3]}",
    ),
    "address 4 bytes on": (
        r"^(\s*(?:@!?%p\d+\s+)?(?:ld|st)\.(?!param).*\[[%\w]+)(?:\+(\d+))?\]",
        lambda x: f"{x[1]}+{int(x[2] or 0) + 4}]",
    ),
    "comparison flipped": (
        r"setp\.(lt|le|gt|ge|eq|ne)\.", lambda x: f"setp.{FLIPS[x[1]]}.",
    ),
    "branch flipped": (
        r"@(!?)(%p\d+\s+bra)", lambda x: f"@{'' if x[1] else '!'}{x[2]}",
    ),
    "operation changed": (
        rf"^\s*({'|'.join(map(re.escape, OTHERS))})(?=\s)", lambda x: OTHERS[x[1]],
    ),
}  # fmt: skip


def mutants(ptx: str, kind: str) -> list[tuple[int, str]]:
    """Every mutant of a module of this kind: its line, and the whole module."""
    lines, (pattern, change) = ptx.splitlines(), CHANGES[kind]
    out = []
    for i, line in enumerate(lines):
        changed = re.sub(pattern, change, line, count=1)
        if changed != line:
            out.append((i + 1, "\n".join([*lines[:i], changed, *lines[i + 1 :]])))
    return out


def noticed(
    case: Case, originals: dict[str, Any], mutated: Any, conditions: kernels.Conditions, bits: list
) -> str | None:
    """How a mutated kernel was found out; None if it was not."""
    known = originals | {mutated.name: mutated}
    stand = kernels.Stand(conditions, lambda body, options, args: known[options["kernel_name"]])
    try:
        return None if kernels.bits_of(case, stand) == bits else "bits"
    except PtxError as error:
        return "race" if "data race" in str(error) else "machine"
    except AssertionError:
        return "result"


def report(
    case: Case, compiler: kernels.Compiler, conditions: kernels.Conditions, number: int, seed: int
) -> int:
    """Try some mutants of each kind, say what found them; of how many kinds none was noticed."""
    stand = kernels.Stand(conditions, compiler)
    bits = kernels.bits_of(case, stand)
    originals = {run.kernel.name: run.kernel for run in stand.runs}
    usual = max(run.counts.instructions for run in stand.runs)
    hardware = conditions.hardware._replace(max_instructions=10 * usual)
    limited = conditions._replace(hardware=hardware)
    wrong = 0
    for kind in CHANGES:
        pool = [(kernel, *m) for kernel in originals.values() for m in mutants(kernel.ptx, kind)]
        some = min(len(pool), max(1, number // len(CHANGES)))
        hows: Counter[str] = Counter()
        for kernel, line, text in random.Random(seed).sample(pool, some):
            changed = kernel._replace(ptx=text, program=parse(text))
            how = noticed(case, originals, changed, limited, bits) or "missed"
            hows[how] += 1
            if how == "missed":
                print(f"  missed: {kernel.name}: {kernel.ptx.splitlines()[line - 1].strip()}")
        unnoticed = set(hows) == {"missed"}
        print(f"mutants of {case.name}: {kind}: {dict(hows)}{' WRONG' if unnoticed else ''}")
        wrong += unnoticed
    return wrong

"""The reports of ptxas and nvdisasm on a kernel: registers, spills, loops. Needs no GPU, no jax."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^/\*[0-9a-f]{4,}\*/\s+(.*?);")
BRANCH = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")


@dataclass(frozen=True)
class Loop:
    """A backward branch, and the instructions between it and its target."""

    instructions: int
    exponentials: int
    global_loads: int


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel."""

    name: str
    registers: int
    spills: int  # bytes
    loops: tuple[Loop, ...]


def read(ptx: Path, keep: Path | None = None) -> Kernel:
    """Assemble one PTX file for sm_90a; the folder `keep` gets the PTX and the machine code."""
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        command = [tool("ptxas"), "-arch=sm_90a", "-O3", "-v", str(ptx), "-o", str(cubin)]
        notes = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        listing = subprocess.run(
            [tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(ptx, keep)
        (keep / ptx.with_suffix(".sass").name).write_text(listing)
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", notes))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", notes))
    return Kernel(ptx.stem, registers, spills, loops(listing))


def loops(listing: str) -> tuple[Loop, ...]:
    """The loops of a disassembly, inner ones and outer ones."""
    labels: dict[str, int] = {}
    code: list[str] = []
    found = []
    for line in map(str.strip, listing.splitlines()):
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := INSTRUCTION.match(line):
            code.append(instruction[1])
            target = BRANCH.search(instruction[1])
            # A branch to itself is padding behind the last instruction.
            if target and labels.get(target[1], len(code)) < len(code) - 1:
                body = code[labels[target[1]] :]
                found.append(
                    Loop(
                        len(body),
                        sum("MUFU.EX2" in text for text in body),
                        sum(text.startswith("LD.") or "LDG" in text for text in body),
                    )
                )
    return tuple(found)


def tool(name: str) -> str:
    """The path of a CUDA tool: in its wheel, or else on the PATH."""
    base = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    for found in sorted(base.glob(f"*/bin/{name}")):
        return str(found)
    on_path = shutil.which(name)
    if on_path is None:
        sys.exit(f"{name} is not installed; install this project's `aot` extra")
    return on_path

"""The reports of ptxas and nvdisasm on a kernel: registers, spills, code. Needs no GPU, no jax."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.gpu import machine_code

TARGET = re.compile(r"^\.target (sm_\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel."""

    name: str
    registers: int
    spills: int  # bytes
    code: machine_code.Code


def read(ptx: Path) -> Kernel:
    """Assemble one PTX file for its target."""
    target = TARGET.search(ptx.read_text())
    if target is None:
        raise ValueError(f"{ptx} names no target")
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        command = [tool("ptxas"), f"-arch={target[1]}", "-O3", "-v", str(ptx), "-o", str(cubin)]
        notes = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [tool("nvdisasm"), "-c", "-hex", str(cubin)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", notes))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", notes))
    return Kernel(ptx.stem, registers, spills, machine_code.parse(listing))


def tool(name: str) -> str:
    """The path of a CUDA tool: in its wheel, or else on the PATH."""
    base = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = min(base.glob(f"*/bin/{name}"), default=None) or shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed; install this project's `aot` extra")
    return str(found)

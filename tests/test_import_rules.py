"""Imports run one way; the engine side never loads jax; each check is shown to be able to fail."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent
PACKAGES = ("ipc", "pallas_kernels", "jax_specdec")

# The device side of jax_specdec; every other module of it runs in a process without jax.
DEVICE_SIDE = {
    "adaptive", "callable_drafter", "checkpoint", "compiled", "cutoff", "drafter_choice",
    "drafters", "draws", "fixed_point", "follower_process", "hf_weights", "loop", "loop_state",
    "memory", "messages", "model", "model_params", "modes", "mtp", "outgoing", "pack", "prefill",
    "process_group", "reorder", "sampling", "scoring", "sharding", "slots", "suffix", "verify",
    "worker", "worker_process",
}  # fmt: skip
ENTRY_POINTS = {"jax_specdec.cli.main"}
ACCELERATED = {"jax", "jaxlib", "flax", "optax", "chex", "torch"}


def modules():
    """Dotted name to path of every module that is shipped."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def is_engine_side(name):
    package, _, rest = name.partition(".")
    return package == "ipc" or (package == "jax_specdec" and rest not in DEVICE_SIDE)


def imports(source):
    """Every module that `source` imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(name, source):
    """What `name` imports against the rules."""
    package, used = name.partition(".")[0], imports(source)
    tops = {module.partition(".")[0] for module in used}
    wrong = tops & {"bench", "tests", "examples"}
    wrong |= {module for module in used if module in ENTRY_POINTS and name != module}
    if package == "ipc":
        allowed = {"ipc", "numpy", "posix_ipc", "xxhash"} | sys.stdlib_module_names
        wrong |= {module for module in tops if module not in allowed}
    if package == "pallas_kernels":
        allowed = {"pallas_kernels", "jax", "numpy"} | sys.stdlib_module_names
        wrong |= {module for module in tops if module not in allowed}
    if is_engine_side(name):
        wrong |= tops & ACCELERATED
        wrong |= {m for m in used if m.startswith("pallas_kernels")}
        known = modules()
        wrong |= {m for m in used if m in known and not is_engine_side(m)}
    return sorted(wrong)


def test_imports_run_one_way():
    found = modules()
    assert {"ipc.wire", "jax_specdec.engine.engine", "pallas_kernels.xla"} <= found.keys()
    assert {f"jax_specdec.{name}" for name in DEVICE_SIDE} <= found.keys()
    broken = {name: violations(name, path.read_text()) for name, path in found.items()}
    assert {name: wrong for name, wrong in broken.items() if wrong} == {}


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("ipc.ring", "import jax.numpy as jnp", "jax"),
        ("ipc.ring", "import rich", "rich"),
        ("jax_specdec.records.decode", "def f():\n    from jax import numpy", "jax"),
        (
            "jax_specdec.engine.engine",
            "from jax_specdec import loop",
            "jax_specdec.device.loop.step",
        ),
        (
            "jax_specdec.export.openai",
            "from jax_specdec.device.model.llama import ModelConfig",
            "jax_specdec.device.model.llama",
        ),
        ("jax_specdec.records.record", "from pallas_kernels import greedy", "pallas_kernels"),
        ("pallas_kernels.xla", "from ipc import wire", "ipc"),
        ("pallas_kernels.xla", "import numpy, torch", "torch"),
        (
            "jax_specdec.cli.demo_requests",
            "from jax_specdec.cli.main import main",
            "jax_specdec.cli.main",
        ),
        ("jax_specdec.device.messages.pack", "import bench.timing", "bench"),
    ],
)
def test_a_violation_is_found(name, source, wrong):
    assert wrong in violations(name, source)


def loads_jax(module):
    """Whether importing `module` in a fresh process loads jax."""
    code = f"import sys, {module}; print('jax' in sys.modules or 'jaxlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip() == "True"


def test_a_consumer_process_never_starts_an_accelerator_runtime():
    names = [name for name in modules() if is_engine_side(name)]
    everything = ", ".join(names)
    code = f"import sys, {everything}; sys.exit(any(m in sys.modules for m in {ACCELERATED}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_that_check_can_fail():
    assert loads_jax("jax_specdec.device.loop.step")
    assert not loads_jax("jax_specdec.engine.engine")

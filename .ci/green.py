"""Runs a lane of checks unless its input files are those of its last green run.

    python .ci/green.py run LANE COMMAND ...   run it if a file changed, keep its hash if green
    python .ci/green.py changed [LANE ...]     the lanes (of these) that changed, one a line
    python .ci/green.py turn LANE              LANE or LANE-newest: which of them is to run now

`.ci/green.json` holds a hash of each lane's input files at its last green run. Commit it: a later
run on the same files has nothing to find. `run` keeps no hash of a command that says NOT RUN.

Some lanes take long and depend on what jax emits: they are for the oldest jax, and LANE-newest for
that of `.venv-newest`, whose version stands beside the hash. Where both changed they take turns:
`.ci/green.json` has whose turn is next, and the other one runs the time after.
"""

import fcntl
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
HASHES, WITH = ".ci/green.json", " with jax "
KERNELS, CASES = "pallas_kernels/backends/mosaic_gpu", "tests/pallas_kernels/mosaic_gpu/ptx"
PRODUCT = ["pyproject.toml", "pallas_kernels/**/*", "ipc/**/*", "jax_specdec/**/*"]
GPU, TPU = (f"pallas_kernels/backends/mosaic_{chip}/**/*" for chip in ("gpu", "tpu"))
ON_A_CPU = [*PRODUCT, f"!{GPU}", f"!{TPU}"]  # no kernel of a chip runs there
SUPPORT = ["tests/conftest.py", "tests/support/*"]
COMPILED = ["pyproject.toml", ".ci/heavy", "pallas_kernels/**/*", "bench/aot*", "bench/gpu/*"]
PTX = [
    *(f"{KERNELS}/{name}.py" for name in ("cluster_kernel", "compat", "limits", "reading")),
    f"{KERNELS}/thread.py", f"{KERNELS}/schedule.py", f"{KERNELS}/groups_kernel.py",
    f"{KERNELS}/changes/row_changes.py", f"{CASES}/kernels.py",
    "pallas_kernels/numbers/*", "pallas_kernels/testing/chips.py",
    "pallas_kernels/testing/compile_target.py", "tests/ptx_machine/*.py",
]  # fmt: skip
FINISH = [
    *(f"{KERNELS}/{name}.py" for name in ("finish_kernel", "row_sum", "selection", "rows")),
    f"{KERNELS}/selection_threads.py",
    f"{KERNELS}/chosen_groups.py",
    f"{KERNELS}/changes/biased_groups.py",
    "pallas_kernels/backends/exact_sums.py",
    "pallas_kernels/backends/row_totals.py",
]
REHEARSED = [
    "pallas_kernels/**/*", "jax_specdec/cli/check_device*", "jax_specdec/cli/device_*",
    "tests/rehearsal/*",
]  # fmt: skip
LANES = {
    "hf-often": [*ON_A_CPU, *SUPPORT, "tests/hf/*"],
    "lm-eval": [*ON_A_CPU, *SUPPORT, "tests/hf/*"],
    "real-often": [*ON_A_CPU, *SUPPORT, "tests/real/*"],
    "ray-often": [*ON_A_CPU, *SUPPORT, "tests/ray/*"],
    "nnx": [*ON_A_CPU, *SUPPORT, "examples/*", "docs/linear.md", "tests/docs/*"],
    "site": [*PRODUCT, "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*", "tests/docs/*"],
    "browser": [
        "jax_specdec/export/**/*", "jax_specdec/records/**/*", "jax_specdec/text/**/*",
        *SUPPORT, "tests/browser/*",
    ],
    "chips": [
        "pyproject.toml", ".ci/heavy", "pallas_kernels/**/*",
        *SUPPORT, "tests/pallas_kernels/**/*",
    ],
    "long": [
        "pyproject.toml", ".ci/heavy", "pallas_kernels/**/*", f"!{GPU}", f"!{TPU}",
        *SUPPORT, "tests/pallas_kernels/**/*",
    ],
    "long-loop": [*ON_A_CPU, ".ci/heavy", *SUPPORT, "tests/jax_specdec/**/*"],
    "chips-loop": [
        "pyproject.toml", ".ci/heavy", "pallas_kernels/**/*", "jax_specdec/device/**/*", *SUPPORT,
        "tests/jax_specdec/device/test_as_on_cuda.py",
        "tests/jax_specdec/device/model/test_tensor_parallel.py",
    ],
    "aot": [*COMPILED, f"!{TPU}"],
    "aot-programs": [*COMPILED, f"!{TPU}", "bench/comparison.py", "bench/tpu/loops.py"],
    "newest-kernels": [*COMPILED, f"!{TPU}"],
    "tpu-quick": [*COMPILED, f"!{GPU}", "bench/tpu/*"],
    "rehearsal": PRODUCT,
    "rehearsal-tpu": [*REHEARSED, *SUPPORT],
    "rehearsal-ptx": [*REHEARSED, f"!{TPU}", *SUPPORT, f"{CASES}/*", "tests/ptx_machine/**/*"],
    "ptx-rows": [*PTX, *FINISH, "pallas_kernels/backends/answers.py", f"{CASES}/cases.py"],
    "ptx-bits": [
        *PTX, *FINISH, f"{KERNELS}/groups.py", f"{CASES}/cases.py", f"{CASES}/bits_cases.py",
        "pallas_kernels/backends/*.py", "pallas_kernels/sampling/row_read.py",
    ],
    "ptx-groups": [
        *PTX, *FINISH, f"{KERNELS}/groups.py", f"{CASES}/sampled_cases.py",
        "pallas_kernels/backends/groups.py",
        "pallas_kernels/backends/xla/groups.py", "pallas_kernels/backends/xla/group_sums.py",
    ],
    "ptx-draw": [
        *PTX, f"{KERNELS}/draw.py", f"{KERNELS}/count_larger.py", f"{KERNELS}/chosen_groups.py",
        f"{CASES}/draw_cases.py",
    ],
}  # fmt: skip
IN_TURN = (
    "aot", "rehearsal", "rehearsal-ptx", "rehearsal-tpu", "ptx-rows", "ptx-groups", "ptx-draw",
    "ptx-bits",
)  # fmt: skip
NEWEST = "-newest"
LANES |= {f"{lane}{NEWEST}": LANES[lane] for lane in IN_TURN}
ON_NEWEST = ("newest-kernels", *(f"{lane}{NEWEST}" for lane in IN_TURN))


def main(root: Path, arguments: list[str]) -> int:
    """Exit status 0 if the lane is green, or that of its command; 2 if there is no such lane."""
    what, *names = arguments
    lanes = names[:1] if what == "run" else names or list(LANES)
    if unknown := [lane for lane in lanes if lane not in LANES]:
        print(f"there is no lane {unknown[0]}: one of {', '.join(LANES)}", file=sys.stderr)
        return 2
    if what == "turn":
        print(turn_of(root, names[0]))
        return 0
    changed = [lane for lane in lanes if is_changed(root, lane)]
    if what == "changed":
        print("\n".join(changed))
        return 0
    if not changed:
        print(f"{lanes[0]}: no file changed since its last green run")
        return 0
    return _run(root, lanes[0], names[1:])


def is_changed(root: Path, lane: str) -> bool:
    """Whether a lane has something to find: other files, or another newest jax, than when green."""
    hashed, _, version = _green(root).get(lane, "").partition(WITH)
    here = newest_jax(root) if lane in ON_NEWEST else None
    return hashed != hash_of(root, lane) or here not in (None, version)


def turn_of(root: Path, lane: str) -> str:
    """Which lane of a pair runs now: the one that changed; of two, the one whose turn it is."""
    changed = [name for name in (lane, lane + NEWEST) if is_changed(root, name)]
    if len(changed) == 1:
        return changed[0]
    return _green(root).get(f"{lane}: next", lane)


def newest_jax(root: Path) -> str | None:
    """The version of jax in `.venv-newest`; None if that is not there."""
    packages = root.glob(".venv-newest/lib/python*/site-packages/jax-*.dist-info")
    found = sorted(path.name.split("-")[1].removesuffix(".dist") for path in packages)
    return found[-1] if found else None


def hash_of(root: Path, lane: str) -> str:
    """The names and contents of the lane's input files."""
    found = hashlib.sha256()
    for file in sorted(_files(root, LANES[lane])):
        found.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()


def _files(root: Path, patterns: Iterable[str]) -> set[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        files = {file for file in root.glob(pattern.lstrip("!")) if file.is_file()}
        assert files, f"{pattern} names no file"
        found = found - files if pattern[0] == "!" else found | files
    return {file for file in found if "__pycache__" not in file.parts}


def _green(root: Path) -> dict[str, str]:
    path = root / HASHES
    return json.loads(path.read_text()) if path.exists() else {}


def _run(root: Path, lane: str, command: list[str]) -> int:
    before, ran = hash_of(root, lane), True
    if lane in ON_NEWEST:
        before += f"{WITH}{newest_jax(root)}"
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            ran = ran and not line.startswith("NOT RUN")
    if ran and process.returncode == 0:
        with (root / ".ci/green.py").open() as lock:  # other lanes end at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            green = _green(root) | {lane: before} | _next_turn(lane)
            (root / HASHES).write_text(json.dumps(green, indent=2, sort_keys=True) + "\n")
    return process.returncode


def _next_turn(lane: str) -> dict[str, str]:
    """Whose turn is next once a lane was green."""
    first = lane.removesuffix(NEWEST)
    if first not in IN_TURN:
        return {}
    return {f"{first}: next": first if lane == first + NEWEST else first + NEWEST}


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))

"""Which lanes' files changed since their last green run; `.ci/green.json` holds a hash a lane.

    python .ci/green.py                    the lanes that changed, one a line
    python .ci/green.py --write LANE ...   these ran green

A lane here is the PTX cases of some kernels: `run_kernels --of LANE`.
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS, CASES = "pallas_kernels/backends/mosaic_gpu", "tests/pallas_kernels/mosaic_gpu/ptx"
COMMON = "compat", "reading", "rows_kernel", "thread", "schedule"
SHARED = [f"{KERNELS}/{name}.py" for name in COMMON]
LANES = {
    "rows": [
        *SHARED, f"{KERNELS}/rows.py", f"{KERNELS}/finish_kernel.py",
        f"{CASES}/cases.py", f"{CASES}/option_cases.py",
    ],
    "groups": [
        *SHARED, f"{KERNELS}/groups.py", f"{KERNELS}/groups_kernel.py",
        f"{KERNELS}/finish_kernel.py", f"{CASES}/sampled_cases.py",
    ],
    "draw": [
        *SHARED, f"{KERNELS}/draw.py", f"{KERNELS}/count_larger.py", f"{KERNELS}/chosen_groups.py",
        f"{KERNELS}/groups_kernel.py", f"{CASES}/draw_cases.py",
    ],
}  # fmt: skip


def hashes(root: Path) -> dict[str, str]:
    """A hash of each lane's files."""
    return {
        lane: hashlib.sha256(b"\0".join((root / file).read_bytes() for file in files)).hexdigest()
        for lane, files in LANES.items()
    }


def main(root: Path, arguments: list[str]) -> None:
    """Print the lanes that changed, or write the hashes of those that ran green."""
    path, now = root / ".ci/green.json", hashes(root)
    green = json.loads(path.read_text()) if path.exists() else {}
    if arguments:
        green |= {lane: now[lane] for lane in arguments[1:]}
        path.write_text(json.dumps(green, indent=2) + "\n")
    else:
        print("\n".join(lane for lane in LANES if green.get(lane) != now[lane]))


if __name__ == "__main__":
    main(ROOT, sys.argv[1:])

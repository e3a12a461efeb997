"""The commands of docs/check_device.md for a machine without a network, in an environment like it.

    python -m tests.heavy.offline_check

An environment has jax with its CUDA plugin and NumPy alone; a copy of the files that git knows is
the checkout; where the system allows it, there is no network. There is no GPU either: as they stand
the commands must say so, and with `--rehearse` the first run must end in time with what is right
checked first, and the second one go on to the end. Exits with 3 where there is no package index.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.pages import DOCS, blocks
from tests.support.paths import ROOT

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "numpy")
OPTION = "check-device --keep"
NOT_ALONE = {"pip", "setuptools", "ml_dtypes", "ml-dtypes", "opt_einsum", "opt-einsum", "scipy"}
# As `unshare` makes a process without a network; not every container may.
WITHOUT_NETWORK = ("unshare", "--user", "--map-root-user", "--net")


def commands() -> tuple[str, str]:
    """What the page says to run with a network, and without one."""
    page = (DOCS / "check_device.md").read_text(encoding="utf-8")
    section = page.split("## On a machine without a network\n", 1)[1].split("\n## ", 1)[0]
    with_network, without = blocks(section, "bash")
    assert OPTION in without
    return with_network, without


def environment(folder: Path, python: str) -> Path:
    """A folder of programs whose python3 has `PACKAGES` alone."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", *PACKAGES], check=True)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True)
    names = {one["name"] for one in json.loads(listed.stdout)}
    assert names - NOT_ALONE == set(PACKAGES), names
    return folder / "bin"


def checkout(folder: Path) -> Path:
    """A copy of the files that git knows."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(
    script: str, folder: Path, programs: Path, *before: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in the checkout, with no packages but those of the programs' python3."""
    here = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    settings = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder.parent), **here}
    done = subprocess.run(
        [*before, "bash", "-ec", script], cwd=folder, env=settings, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    print(done.stdout[-2000:], flush=True)
    return done


def main() -> int:
    """See the module's docstring."""
    newest = ROOT / ".venv-newest/bin/python"
    python = str(newest if newest.exists() else sys.executable)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        try:
            programs, folder = environment(root / "python", python), checkout(root / "checkout")
        except subprocess.CalledProcessError:
            print("NOT RUN: no package index, or no Python that makes environments")
            return 3
        with_network, without = commands()
        subprocess.run(["bash", "-ec", with_network], cwd=folder, check=True)
        offline = WITHOUT_NETWORK
        if subprocess.run([*offline, "true"], check=False, capture_output=True).returncode:
            print("the network stays: this system lets nobody leave it")
            offline = ()
        done = run(without, folder, programs, *offline)
        assert done.returncode == 2, done.returncode
        assert "no GPU" in done.stdout, "the command does not say that there is no GPU"
        rehearsed = without.replace(OPTION, "check-device --rehearse --minutes {minutes}")
        cut = run(rehearsed.format(minutes="0.5"), folder, programs, *offline)
        assert cut.returncode == 3, cut.returncode
        report = folder / "device-check" / "device-check.json"
        first = list(json.loads(report.read_text())["pieces"])
        assert first, "nothing was checked in half a minute"
        assert not any(re.match("times|peers", name) for name in first), first
        whole = run(rehearsed.format(minutes="9"), folder, programs, *offline)
        assert whole.returncode == 0, whole.returncode
        pieces = json.loads(report.read_text())["pieces"]
        assert list(pieces)[: len(first)] == first, "the second run began anew"
        assert all(piece["ok"] for piece in pieces.values())
        again = [name for name in first if f"{name} ..." in whole.stdout]
        assert not again, f"checked twice: {again}"
    print(f"{len(first)} pieces in the first run, {len(pieces)} after the second: as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""See the package's docstring. Exits with 1 where a report says what it should not."""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from jax_specdec.cli import check_device_command
from jax_specdec.cli.device_report import JSON, Report
from jax_specdec.cli.main import main as command_line
from tests.rehearsal.faults import FAULTS
from tests.support import quick_compile

ROOT = Path(__file__).parents[2]
BACKENDS = ("mosaic_gpu", "mosaic_tpu")


def report_of(backend: str, fault: str, folder: Path) -> tuple[int, set[str], set[str]]:
    """The command's exit status, the parts that fail, and those that pass."""
    environment = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": quick_compile.FLAGS}
    command = ["check-device", "--rehearse", "--minutes", "30", "--output", str(folder)]
    with (
        mock.patch.dict(os.environ, environment, REHEARSED=backend, FAULT=fault),
        mock.patch.object(check_device_command, "MODULE", "tests.rehearsal."),
    ):
        status = command_line(command)
    written = json.loads((folder / JSON).read_text())
    report = Report(folder, written["ground"], [], written["pieces"])
    named = {kernel: part for part, kernel in written["ground"]["kernels"].items()}
    verdicts = {named[kernel]: verdict for kernel, verdict, _, _ in report.verdicts()}
    failed = {part for part, verdict in verdicts.items() if verdict == "FAIL"}
    return status, failed, {part for part, verdict in verdicts.items() if verdict == "PASS"}


def main(arguments: list[str] | None = None) -> int:
    """Rehearse with backends as they are, and with each fault that is named; all by default."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", allow_abbrev=False)
    parser.add_argument("what", nargs="*", help=f"of {BACKENDS} and {tuple(FAULTS)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.what) - {*BACKENDS, *FAULTS}:
        parser.error(f"{unknown} are no backends and no faults")
    wrong = []
    for name in options.what or (*BACKENDS, *FAULTS):
        fault = FAULTS.get(name)
        expected = fault.found_by if fault else frozenset()
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            backend = fault.backend if fault else name
            status, failed, passed = report_of(backend, name if fault else "", Path(folder))
        if failed != expected or not passed or status != bool(expected):
            wrong.append(f"{name}: {failed or 'nothing'} failed, not {set(expected) or 'nothing'}")
        print(f"== {name}: {time.monotonic() - begin:.0f} s; failed: {failed or 'nothing'}\n")
    for line in wrong:
        print(f"WRONG {line}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

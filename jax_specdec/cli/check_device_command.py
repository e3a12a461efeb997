"""`jax-specdec check-device`: are the kernels right on this device, and how fast are they?

jax runs in processes of their own: what hangs or dies there is named here, and the rest goes on in
another one.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from jax_specdec.cli import proved_kernels, toolchain
from jax_specdec.cli.device_report import JSON, LOG, PAGE, Report

HELP = """\
Check every kernel of this package on this GPU or TPU at real sizes, against float64; then time them
beside XLA, and beside those of PyTorch, vLLM, FlashInfer and tokamax that are installed. It takes
nine minutes at most, compiling included, and writes device-check.json after every piece, and
device-check.md for you. Run it again to go on. Exit status: 0 all pieces passed; 1 one failed; 2
there is no such device, or the files cannot be written; 3 time ran out before the last piece.
"""
LEAST_DISK = 256 << 20  # bytes, for the files and what compilers write
MODULE = "pallas_kernels.testing."


class Seconds(NamedTuple):
    """How long one thing may take."""

    piece: float = 150.0  # beyond it, a piece hangs
    ground: float = 180.0  # to import jax and find its devices
    end: float = 5.0  # for a process to end when it is killed


SECONDS = Seconds()


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--full", action="store_true", help="every shape; takes an hour")
    parser.add_argument("--minutes", type=float, metavar="N",
        help="begin and finish no piece after N minutes (default: 9; with --full no limit)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("device-check"), metavar="FOLDER",
        help="where the report goes (default: %(default)s)")  # fmt: skip
    parser.add_argument("--keep", action="store_true",
        help="take the kernels that pass by default from then on, on devices of this kind",
    )  # fmt: skip
    parser.add_argument("--afresh", action="store_true", help="forget an earlier run's results")
    parser.add_argument("--rehearse", action="store_true",
        help="anywhere: one small piece of every part, by XLA on the CPU; measures nothing",
    )  # fmt: skip


def run(
    options: argparse.Namespace,
    tools: toolchain.Toolchain | None = None,
    least_disk: int = LEAST_DISK,
) -> int:
    """Run the command; returns the exit status that `HELP` names.

    Args:
      options: of the command line.
      tools: what compiles kernels; None: what is found.
      least_disk: bytes, without which nothing begins.

    Raises:
      ValueError: a rehearsal is to be kept.
      OSError: the report cannot be written, or the disk is full.
    """
    if options.keep and options.rehearse:
        raise ValueError("--keep and --rehearse: a rehearsal proves nothing; give one of them")
    begin = time.monotonic()
    minutes = options.minutes
    if minutes is None:
        minutes = float("inf") if options.full else 9.0
    output = options.output.absolute()
    parent = next(folder for folder in (output, *output.parents) if folder.exists())
    for folder in (parent, Path(tempfile.gettempdir())):
        if (free := shutil.disk_usage(folder).free) < least_disk:
            raise OSError(
                f"{folder} has {free >> 20} MiB left, and a check needs {least_disk >> 20}: free "
                "some, or name another folder with --output, or in TMPDIR"
            )
    tools = toolchain.find_toolchain() if tools is None else tools
    command = [sys.executable, "-P", "-m"]
    chosen = ["--full"] * options.full + ["--rehearse"] * options.rehearse
    ground = read_ground([*command, MODULE + "ground", *chosen], options.rehearse)
    if isinstance(ground, str):
        hints = " ".join(f"({note})" for note in tools.notes()) if tools.gpus else ""
        print(f"NOT RUN: {ground} {hints}".rstrip())
        return 2
    notes = list(tools.notes()) if ground["backend"] == "mosaic_gpu" else []
    for line in [*tools.lines(), *(f"NOTE: {note}" for note in notes)]:
        print(line)
    output.mkdir(parents=True, exist_ok=True)
    report = Report(output, ground, [*tools.lines(), *notes], rehearsed=options.rehearse)
    if not options.afresh:
        report.resume()
    report.save()
    rehearse = ["--rehearse"] * options.rehearse
    program = [*command, MODULE + "pieces", ground["backend"], *rehearse]
    for names in list(report.todo()):
        run_pieces(program, names, report, begin + 60 * minutes)
    report.save()
    status = conclude(report)
    keep(report, options.keep, proved_kernels.file())
    return status


def keep(report: Report, keep_passed: bool, path: Path) -> None:
    """Write down the kernels that passed, if that is wanted; those that failed lose their entry."""
    passed, failed = report.jobs()
    proved_kernels.update(
        path, report.ground.get("proofs", []), passed if keep_passed else set(), failed
    )
    if report.rehearsed or not passed:
        return
    names = ", ".join(sorted(passed))
    where = f"{report.ground['device']} with this jax"
    if keep_passed:
        print(f"KEPT: calls on {where} take these kernels by default: {names} ({path})")
    else:
        print(f"NOT KEPT: {names} passed; with --keep calls on {where} take them by default")


def conclude(report: Report) -> int:
    """Print what a person reads first, and return the exit status."""
    for kernel, verdict, ran, number in report.verdicts():
        print(f"{verdict:8} {kernel} ({ran} of {number} pieces)")
    for name in report.failed:
        print(f"FAILED {name}: {report.pieces[name]['error']}")
    if report.skipped:
        print(f"OUT OF TIME: {len(report.skipped)} pieces are left; run the same command again")
    print(f"{report.folder / PAGE}, {report.folder / JSON}")
    print(report.line())
    return 1 if report.failed else 3 if report.skipped else 0


def run_pieces(
    program: Sequence[str],
    names: Sequence[str],
    report: Report,
    until: float,
    seconds: Seconds = SECONDS,
) -> None:
    """Run pieces in a process, and in another one what is left when that ends.

    A piece that hangs or takes its process along is a failure, and the others of its part come
    last: they would do the same.

    Args:
      program: takes the names of the pieces as its further arguments.
      names: of the pieces.
      report: gets what each finds.
      until: of `time.monotonic`; a piece that runs then is skipped.
      seconds: that it and its process may take.
    """
    pending = list(names)
    while pending and time.monotonic() < until:
        number = len(pending)
        with (report.folder / LOG).open("ab") as log:
            begun, end = _run_once([*program, *pending], log, report, pending, until, seconds)
        if not pending:
            return
        if time.monotonic() >= until:
            print("out of time", flush=True)
            return
        if begun is None and len(pending) < number:
            continue  # it ended between two pieces
        name = begun or pending[0]
        pending.remove(name)
        part = name.partition(":")[0]
        pending.sort(key=lambda other: other.partition(":")[0] == part)
        report.add(name, {"ok": False, "seconds": None, "error": f"{end}; see {LOG}"})
        print(end, flush=True)


def _run_once(
    program: Sequence[str],
    log: IO[bytes],
    report: Report,
    pending: list[str],
    until: float,
    seconds: Seconds,
) -> tuple[str | None, str]:
    """Run one process to its end; what it finishes is taken from `pending`.

    Returns:
      The piece that it left unfinished, if any, and how the process ended.
    """
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL,
        start_new_session=True, env=_environment(report.rehearsed),
    )  # fmt: skip
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    assert process.stdout is not None
    stdout = process.stdout

    def read() -> None:
        with stdout:
            for line in stdout:
                lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    begun, since = None, time.monotonic()
    try:
        while True:
            # Before a piece begins, jax is imported.
            limit = min(since + (seconds.piece if begun else seconds.ground), until)
            try:
                line = lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                return begun, f"hung: killed after {time.monotonic() - since:.0f} s"
            if line is None:
                return begun, _ended(process.wait())
            # A library may print something else.
            with suppress(ValueError, TypeError, LookupError, AttributeError):
                event = json.loads(line)
                since = time.monotonic()
                if "begin" in event:
                    begun = event["begin"]
                    print(f"{begun} ...", end=" ", flush=True)
                elif (name := event.pop("piece")) in pending:
                    begun = None
                    pending.remove(name)
                    report.add(name, event)
                    print(f"{event.get('error', 'ok')}, {event['seconds']} s", flush=True)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A driver may hold a process that was killed, and a process of its own the pipe.
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds.end)
        reader.join(seconds.end)


def _ended(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _environment(rehearsed: bool) -> dict[str, str]:
    # PyTorch needs memory of the same device.
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return variables | ({"JAX_PLATFORMS": "cpu"} if rehearsed else {})


def read_ground(program: Sequence[str], rehearsed: bool) -> dict[str, Any] | str:
    """The ground of a check; a sentence where there is no device to check."""
    try:
        done = subprocess.run(
            program, capture_output=True, text=True, timeout=SECONDS.ground,
            env=_environment(rehearsed), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"jax has not found its devices in {SECONDS.ground:.0f} s"
    if done.returncode:
        error_lines = [line for line in done.stderr.splitlines() if line.strip()]
        return f"jax does not start: {error_lines[-1] if error_lines else _ended(done.returncode)}"
    ground: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return ground["obstacle"] or ground

"""`jax-specdec check-device`: what hangs, dies or fails is named; a run goes on where it ended."""

import json
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from jax_specdec.cli import check_device_command, doctor_command, toolchain
from jax_specdec.cli.device_report import JSON, PAGE, Report
from jax_specdec.cli.main import main
from jax_specdec.cli.toolchain import Toolchain

pytestmark = pytest.mark.fast

GROUND = {
    "device": "a chip",
    "backend": "mosaic_gpu",
    "obstacle": None,
    "compute capability": 9.0,
    "versions": {"jax-specdec": "0.1.0", "jax": "0.10.2"},
    "kernels": {"rows": "top K", "draws": "draw"},
    "pieces": {"rows": ["rows: a", "rows: b", "rows: c"], "draws": ["draws: a"], "times": []},
    "missing": {"vllm sampler": "vllm"},
}
# A process of pieces: what each one does, by its last letter, and the rest passes.
PROGRAM = """
import json, os, signal, subprocess, sys, time
for line in ("a library's own line", "{}", "[1]", '"begin"', "7"):
    print(line, flush=True)
for name in sys.argv[1:]:
    print(json.dumps({"begin": name}), flush=True)
    what = os.environ["PIECES"].split(",")
    does = dict(one.split("=") for one in what).get(name[-1], "pass")
    if does == "hang":
        time.sleep(3600)
    if does == "leave":  # a process of its own holds the pipe
        subprocess.Popen(["sleep", "20"], start_new_session=True)
        time.sleep(3600)
    if does == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    ok = does != "fail"
    found = {"piece": name, "ok": ok, "seconds": 0.1, "figures": None}
    print(json.dumps(found | ({} if ok else {"error": "AssertionError: a rank"})), flush=True)
    if does == "end":
        break
"""


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path, GROUND, ["ptxas: /x"])


def work(report, does, monkeypatch, seconds=600.0, piece_seconds=600.0, only=""):
    monkeypatch.setenv("PIECES", does)
    for names in list(report.todo()):
        check_device_command.run_pieces(
            [sys.executable, "-c", PROGRAM], [name for name in names if name.endswith(only)],
            report, time.monotonic() + seconds, piece_seconds,
        )  # fmt: skip
    return check_device_command.conclude(report)


def test_all_that_passes(report, monkeypatch, capsys):
    assert work(report, "a=pass", monkeypatch) == 0
    assert "2 of 2 kernels pass; 0 of 4 pieces failed" in capsys.readouterr().out
    page = (report.folder / PAGE).read_text()
    assert "| top K | PASS | 3 of 3 |" in page
    assert "- ptxas: /x" in page
    assert json.loads((report.folder / JSON).read_text())["pieces"]["rows: b"]["ok"]


def test_a_piece_that_fails_is_named_and_stops_no_other(report, monkeypatch, capsys):
    assert work(report, "b=fail", monkeypatch) == 1
    out = capsys.readouterr().out
    assert "FAILED rows: b: AssertionError: a rank" in out
    assert "FAIL: top K; 1 of 4 pieces failed" in out
    assert "| draw | PASS | 1 of 1 |" in (report.folder / PAGE).read_text()


def test_a_process_that_dies_is_named(report, monkeypatch, capsys):
    """As where a compiler aborts; the pieces behind it run in another process."""
    assert work(report, "a=die", monkeypatch) == 1
    assert report.pieces["rows: a"]["error"].startswith("its process was ended by SIGSEGV")
    assert report.pieces["rows: c"]["ok"]


def test_a_piece_that_hangs_is_killed_and_named(report, monkeypatch):
    """Others of its part would hang as well: they come last."""
    assert work(report, "a=hang", monkeypatch, piece_seconds=1.5, only="rows: a") == 1
    assert report.pieces["rows: a"]["error"].startswith("hung: killed after ")
    again = Report(report.folder, GROUND, [])
    monkeypatch.setattr(check_device_command, "END_SECONDS", 0.2)
    assert work(again, "b=hang,a=leave", monkeypatch, piece_seconds=1.5) == 1
    assert [*again.pieces] == ["rows: a", "draws: a", "rows: b", "rows: c"]
    assert again.failed == ["rows: a", "draws: a", "rows: b"]
    assert again.pieces["rows: c"]["ok"]


def test_a_process_that_hangs_before_its_first_piece(report, monkeypatch):
    monkeypatch.setattr(check_device_command, "GROUND_SECONDS", 0.5)
    program = [sys.executable, "-c", "import time; time.sleep(3600)"]
    until = time.monotonic() + 600
    check_device_command.run_pieces(program, ["rows: a", "draws: a"], report, until)
    assert [found["error"][:17] for found in report.pieces.values()] == ["hung: killed afte"] * 2


def test_a_process_that_ends_between_pieces_is_no_failure(report, monkeypatch):
    """As behind an error that may have broken the device's context: another one goes on."""
    assert work(report, "a=end,b=end", monkeypatch) == 0
    assert report.skipped == []


def test_every_kernel_comes_before_any_second_piece_and_times(report):
    ground = GROUND | {
        "pieces": {
            "rows": ["rows: a", "rows: b"], "draws": ["draws: a"],
            "times": ["times: a"], "peers": ["peers: x: a"],
        }
    }  # fmt: skip
    report = Report(report.folder, ground, [])
    expected = [["rows: a", "draws: a", "rows: b"], ["times: a"], ["peers: x: a"], []]
    assert [*report.todo()] == expected


def test_a_run_goes_on_and_tries_failures_last(report, monkeypatch):
    """Each piece is on disk when the next one begins."""
    work(report, "a=pass", monkeypatch, only="a")
    work(report, "b=fail", monkeypatch, only="b")
    assert work(report, "c=hang", monkeypatch, seconds=3.0, only="c") == 1
    assert report.skipped == ["rows: c"]  # it ran when the time was over: no failure
    again = Report(report.folder, GROUND, [])
    again.resume()
    assert again.pieces.keys() >= {"rows: a", "rows: b"}
    left = list(again.todo())
    assert [names for names in left if names] == [["rows: c"], ["rows: b"]]
    assert work(again, "a=pass", monkeypatch) == 0


def test_time_that_runs_out_is_said(report, monkeypatch, capsys):
    assert work(report, "a=pass", monkeypatch, seconds=0.0) == 3
    assert "OUT OF TIME: 4 pieces are left" in capsys.readouterr().out
    assert "- draws: a" in [*report.page()]


def test_another_devices_results_are_not_taken_over(report, monkeypatch):
    work(report, "a=pass", monkeypatch)
    other = Report(report.folder, GROUND | {"device": "another"}, [])
    other.resume()
    assert other.pieces == {}


def test_times_and_what_is_not_there_are_on_the_page(report, capsys):
    """Another library that fails is no failure of the kernels."""
    figures = {
        "us": {"mosaic_gpu": 17.2, "plain": 172.0},
        "spread": {"mosaic_gpu": [17, 18], "plain": [170, 180]},
        "GB/s": 975.0,
        "absent": {"xla": "MemoryError: 4 | 5"},
    }
    name, peers = "times: topk R=64", ["peers: torch: topk R=64", "peers: fi: topk R=64"]
    ground = GROUND | {"pieces": {"times": [name], "peers": peers}}
    report = Report(report.folder, ground, [])
    report.add(name, {"ok": True, "seconds": 1.0, "figures": figures})
    theirs = {"us": {"torch": 86.0}, "spread": {"torch": [85, 87]}}
    report.add(peers[0], {"ok": True, "seconds": 1.0, "figures": theirs})
    report.add(peers[1], {"ok": False, "seconds": None, "error": "hung: killed after 90 s"})
    page = (report.folder / PAGE).read_text()
    assert "| topk R=64 | plain | 172 | 170 to 180 | 10.00x |" in page
    assert "| topk R=64 | xla | NOT RUN: MemoryError: 4 \\| 5 | | |" in page
    assert "| topk R=64 | torch | 86 | 85 to 87 | 5.00x |" in page
    assert "| topk R=64 | fi | NOT RUN: hung: killed after 90 s | | |" in page
    assert "| | vllm sampler | NOT INSTALLED: vllm | | |" in page
    assert check_device_command.conclude(report) == 0
    assert "; topk R=64: 17.2 us" in capsys.readouterr().out


def test_without_a_device(tmp_path, capsys, monkeypatch):
    """Status 2 and one line; nothing is written that looks like a result."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["check-device", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().out == "NOT RUN: jax finds no GPU and no TPU here\n"
    assert list(tmp_path.iterdir()) == []


def test_a_jax_that_does_not_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(toolchain, "find", lambda: Toolchain((), "", "", "", (), ()))
    monkeypatch.setenv("JAX_PLATFORMS", "no such platform")
    assert main(["check-device", "--output", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert out.startswith("NOT RUN: jax does not start: ")
    assert out.count("\n") == 1


def test_a_gpu_whose_driver_is_too_old_for_jax(tmp_path, capsys, monkeypatch):
    """jax finds no device then, and the line says why."""
    old = Toolchain(("NVIDIA H100, 450.1, 0 MiB, 81559 MiB",), "450.1", "/p", "/l", (), ())
    monkeypatch.setattr(toolchain, "find", lambda: old)
    monkeypatch.setattr(toolchain, "LEAST_DRIVERS", {"json": (13, 580)})  # a module that is there
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["check-device", "--output", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert out.startswith(
        "NOT RUN: jax finds no GPU and no TPU here (the driver 450.1 is older than"
    )
    assert out.count("\n") == 1


def test_a_full_disk_is_named_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        check_device_command.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20)
    )
    assert main(["check-device", "--output", str(tmp_path)]) == 2
    assert f"{tmp_path} has 1 MiB left, and a check needs 256" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch):
    """Before the first piece."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(check_device_command, "_ground", lambda *_: GROUND)
    assert main(["check-device", "--output", str(file / "report")]) == 2
    assert str(file) in capsys.readouterr().err


SMI = """#!/bin/sh
case "$1" in
  *driver*) echo "NVIDIA H100, 550.54.15, 70000 MiB, 81559 MiB" ;;
  *) cat {holders} ;;
esac
"""


def test_an_old_driver_and_no_ptxas_and_held_memory(tmp_path, monkeypatch):
    """Named before the first piece: `nvidia-smi` is a script here."""
    smi = tmp_path / "nvidia-smi"
    holders = tmp_path / "holders"
    holders.write_text("4242, python, 69000 MiB")
    smi.write_text(SMI.format(holders=holders))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(toolchain, "_folders", lambda: iter([tmp_path]))
    real = toolchain.importlib.util.find_spec
    monkeypatch.setattr(
        toolchain.importlib.util, "find_spec",
        lambda name: True if name == "jax_cuda13_plugin" else real(name),
    )  # fmt: skip
    found = toolchain.find()
    assert found.driver == "550.54.15"
    notes = " ".join(found.notes())
    assert "the driver 550.54.15 is older than 580, the least for CUDA 13" in notes
    assert f"there is no ptxas in {tmp_path}" in notes
    assert "another process holds memory of the GPU: 4242, python, 69000 MiB" in notes
    holders.write_text("")  # as in a container, which does not see whose it is
    assert "70000 MiB of the NVIDIA H100's memory are held" in " ".join(toolchain.find().notes())
    for name in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    assert toolchain.find().ptxas == str(tmp_path / "bin/ptxas")
    assert "libdevice" not in " ".join(toolchain.find().notes())


def test_a_machine_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = toolchain.find()
    assert (found.gpus, found.holders) == ((), ())
    assert "driver: none: nvidia-smi finds no GPU" in found.lines()
    doctor_command.run(SimpleNamespace(remove=False, clear_cache=False))
    out = capsys.readouterr().out
    assert "driver: none" in out
    assert "ptxas: " in out


def test_signals_have_names():
    assert check_device_command._ended(-signal.SIGKILL) == "its process was ended by SIGKILL"

"""`jax-specdec check-device`: what hangs, dies or fails is named; a run goes on where it ended."""

import copy
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jax_specdec.cli import check_device_command, doctor_command, proved_kernels, toolchain
from jax_specdec.cli.check_device_command import Seconds
from jax_specdec.cli.device_report import JSON, PAGE, Report
from jax_specdec.cli.main import main
from jax_specdec.cli.toolchain import Toolchain
from tests.support.processes import ended

GROUND = {
    "device": "a chip",
    "backend": "mosaic_gpu",
    "obstacle": None,
    "compute capability": 9.0,
    "versions": {"jax-specdec": "0.1.0", "jax": "0.10.2"},
    "kernels": {"rows": "top K", "draws": "draw"},
    "pieces": {"rows": ["rows: a", "rows: b", "rows: c"], "draws": ["draws: a"], "times": []},
    "missing": {"vllm sampler": "vllm"},
    "proofs": [
        {"device": "a chip", "jax": "0.10", "backend": "mosaic_gpu", "job": job, "digest": "12",
         "parts": [part]}
        for job, part in (("rows", "rows"), ("draw", "draws"))
    ],
}  # fmt: skip
# A process of pieces: what each one does, by its last letter, and the rest passes.
PROGRAM = """
import json, os, signal, subprocess, sys, time
for line in ("a library's own line", "{}", "[1]", '"begin"', "7"):
    print(line, flush=True)
does = dict(one.split("=") for one in sys.argv[1].split(","))
for name in sys.argv[2:]:
    print(json.dumps({"begin": name}), flush=True)
    what = does.get(name[-1], "pass")
    if what == "leave":  # a process of its own holds the pipe
        subprocess.Popen(["sleep", "20"], start_new_session=True)
    if what in ("hang", "leave"):
        time.sleep(3600)
    if what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    ok = what != "fail"
    found = {"piece": name, "ok": ok, "seconds": 0.1, "figures": None}
    print(json.dumps(found | ({} if ok else {"error": "AssertionError: a rank"})), flush=True)
    if what == "end":
        break
"""


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path, GROUND, ["ptxas: /x"])


def work(report, does, until=600.0, seconds=check_device_command.SECONDS, only=""):
    for names in list(report.todo()):
        check_device_command.run_pieces(
            [sys.executable, "-c", PROGRAM, does], [name for name in names if name.endswith(only)],
            report, time.monotonic() + until, seconds,
        )  # fmt: skip
    return check_device_command.conclude(report)


PASS = "| {} | PASS | {} of {} |"


@pytest.mark.parametrize(
    ("does", "until", "status", "printed", "paged"),
    [
        ("a=pass", 600.0, 0, "2 of 2 kernels pass; 0 of 4 pieces", PASS.format("top K", 3, 3)),
        ("b=fail", 600.0, 1, "FAIL: top K; 1 of 4 pieces failed", PASS.format("draw", 1, 1)),
        ("c=fail", 600.0, 1, "FAILED rows: c: AssertionError: a rank", "- ptxas: /x"),
        ("c=die", 600.0, 1, "FAILED rows: c: its process was ended by SIGSEGV", "| FAIL | 3 of 3"),
        ("a=end,b=end", 600.0, 0, "0 of 4 pieces failed", PASS.format("top K", 3, 3)),
        ("a=pass", 0.0, 3, "OUT OF TIME: 4 pieces are left", "- draws: a"),
    ],
)  # fmt: skip
def test_pieces_pass_fail_die_end_their_process_or_have_no_time(
    report, does, until, status, printed, paged, capsys
):
    """What ends a process stops no other piece: those behind it run in another process."""
    report.save()
    assert work(report, does, until) == status
    assert printed in capsys.readouterr().out
    assert any(paged in line for line in report.page())
    assert len(report.skipped) == (0 if until else 4)
    found = json.loads((report.folder / JSON).read_text())
    assert found["pieces"] == report.pieces


def test_a_piece_that_hangs_is_killed_and_named(report):
    """Others of its part would hang as well: they come last."""
    assert work(report, "b=hang,a=leave", seconds=Seconds(piece=0.4, end=0.2)) == 1
    assert [*report.pieces] == ["rows: a", "draws: a", "rows: b", "rows: c"]
    assert report.failed == ["rows: a", "draws: a", "rows: b"]
    assert report.pieces["rows: a"]["error"].startswith("hung: killed after ")
    assert report.pieces["rows: c"]["ok"]


def test_a_process_that_hangs_before_its_first_piece(report):
    program = [sys.executable, "-c", "import time; time.sleep(3600)"]
    names, until = ["rows: a", "draws: a"], time.monotonic() + 600
    check_device_command.run_pieces(program, names, report, until, Seconds(ground=0.1))
    assert [found["error"][:17] for found in report.pieces.values()] == ["hung: killed afte"] * 2


def test_every_kernel_comes_before_any_second_piece_and_times(report):
    pieces = GROUND["pieces"] | {"times": ["times: a"], "peers": ["peers: x: a"]}
    report = Report(report.folder, GROUND | {"pieces": pieces}, [])
    expected = [["rows: a", "draws: a", "rows: b", "rows: c"], ["times: a"], ["peers: x: a"], []]
    assert [*report.todo()] == expected


def test_a_run_goes_on_and_tries_failures_last(report):
    """Each piece is on disk when the next one begins."""
    work(report, "a=pass", only="a")
    work(report, "b=fail", only="b")
    assert work(report, "c=hang", until=0.5, only="c") == 1
    assert report.skipped == ["rows: c"]  # it ran when the time was over: no failure
    again, other = (
        Report(report.folder, GROUND | {"device": device}, []) for device in ("a chip", "another")
    )
    again.resume()
    other.resume()
    assert (again.pieces, other.pieces) == (report.pieces, {})
    assert [names for names in again.todo() if names] == [["rows: c"], ["rows: b"]]
    assert work(again, "a=pass") == 0


def test_what_full_found_counts_without_it(report):
    """A failure of such a piece keeps its kernels out of the defaults, and is tried again."""
    every = {"rows": [*GROUND["pieces"]["rows"], "rows: d", "rows: e"], "draws": ["draws: a"]}
    work(Report(report.folder, GROUND | {"pieces": every}, []), "d=fail", only="d")
    few = GROUND | {"pieces": copy.deepcopy(GROUND["pieces"]), "full": every}
    again = Report(report.folder, few, [])
    again.resume()
    assert again.ground["pieces"]["rows"] == [*GROUND["pieces"]["rows"], "rows: d"]
    assert [names for names in again.todo() if names][-1] == ["rows: d"]
    work(again, "d=fail")
    assert again.failed == ["rows: d"]
    assert again.jobs() == ({"draw"}, {"rows"})
    work(again, "d=pass")
    assert again.jobs() == ({"draw", "rows"}, set())
    other = Report(report.folder, GROUND | {"pieces": copy.deepcopy(GROUND["pieces"])}, [])
    other.resume()  # of a release that has no such piece
    assert "rows: d" not in other.pieces


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
    theirs = {"us": {"torch": 86.0}, "spread": {"torch": [85, 87]}}
    report.add(name, {"ok": True, "seconds": 1.0, "figures": figures})
    report.add(peers[0], {"ok": True, "seconds": 1.0, "figures": theirs})
    report.add(peers[1], {"ok": False, "seconds": None, "error": "hung: killed after 90 s"})
    table = (report.folder / PAGE).read_text().partition("| --- | --- | --- | --- | --- |\n")[2]
    assert table.splitlines()[:7] == [
        "| topk R=64 | mosaic_gpu | 17.2 | 17 to 18 | 1.00x |",
        "| topk R=64 | plain | 172 | 170 to 180 | 10.00x |",
        "| topk R=64 | xla | NOT RUN: MemoryError: 4 \\| 5 | | |",
        "| topk R=64 | read by mosaic_gpu | 975.0 GB/s | | |",
        "| topk R=64 | torch | 86 | 85 to 87 | 5.00x |",
        "| topk R=64 | fi | NOT RUN: hung: killed after 90 s | | |",
        "| | vllm sampler | NOT INSTALLED: vllm | | |",
    ]
    assert check_device_command.conclude(report) == 0
    assert "; topk R=64: 17.2 us" in capsys.readouterr().out


OLD = Toolchain(
    ("NVIDIA H100, 450.1, 0 MiB, 81559 MiB",), "450.1", "/p", "/l", (),
    plugins=("jax_cuda13_plugin",),
)  # fmt: skip


def options(folder, rehearse=False):
    return SimpleNamespace(
        output=folder, minutes=None, full=False, rehearse=rehearse, afresh=False, keep=False
    )


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [({}, 530, 540), ({"minutes": 0.0}, -10, 0), ({"minutes": 2.0}, 110, 120),
     ({"full": True}, 1e9, float("inf")), ({"full": True, "minutes": 2.0}, 110, 120)],
)  # fmt: skip
def test_when_a_run_ends(tmp_path, monkeypatch, changes, least, most):
    ends = []
    monkeypatch.setattr(check_device_command, "read_ground", lambda *_: GROUND)
    monkeypatch.setattr(
        check_device_command, "run_pieces", lambda *given: ends.append(given[3] - time.monotonic())
    )
    given = options(tmp_path / "report")
    vars(given).update(changes)
    assert check_device_command.run(given, OLD) == 3
    assert ends
    assert all(least < end <= most for end in ends)


def test_without_a_device(tmp_path, capsys, monkeypatch):
    """Status 2 and one line, which says why; nothing is written that looks like a result."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert check_device_command.run(options(tmp_path), OLD) == 2
    (line,) = capsys.readouterr().out.splitlines()
    said = "NOT RUN: jax finds no GPU and no TPU here (the driver 450.1 is older than"
    assert line.startswith(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no such platform')", "jax does not start: no such platform"),
        ("import os; os.kill(os.getpid(), 9)", "jax does not start: its process was ended by SIGK"),
        ("raise SystemExit(3)", "jax does not start: its process ended with status 3"),
        ("print('noise'); print('{\"obstacle\": \"no GPU\"}')", "no GPU"),
    ],
)
def test_a_ground_that_is_none(code, said):
    found = check_device_command.read_ground([sys.executable, "-c", code], rehearsed=False)
    assert found.startswith(said)


def test_a_full_disk_and_an_unwritable_folder_are_named(tmp_path, capsys, monkeypatch):
    with pytest.raises(OSError, match=rf"{tmp_path} has \d+ MiB left, and a check needs 1099511"):
        check_device_command.run(options(tmp_path), OLD, least_disk=1 << 60)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(check_device_command, "read_ground", lambda *_: GROUND)
    assert main(["check-device", "--output", str(tmp_path / "file/report")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


SMI = """#!/bin/sh
case "$1" in
  *driver*) echo "NVIDIA H100, 550.54.15, 70000 MiB, 81559 MiB" ;;
  *) cat {holders} ;;
esac
"""


def begin_with(found, *expected):
    """Whether these are the notes of a toolchain, from their beginning on."""
    notes = found._replace(plugins=()).notes()
    return all(one.startswith(said) for one, said in zip(notes, expected, strict=True))


def test_no_ptxas_and_held_memory(tmp_path, monkeypatch):
    """Named before the first piece: `nvidia-smi` is a script here."""
    holders, smi = tmp_path / "holders", tmp_path / "nvidia-smi"
    holders.write_text("4242, python, 69000 MiB")
    smi.write_text(SMI.format(holders=holders))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = toolchain.find_toolchain([tmp_path])
    assert found.driver == "550.54.15"
    missing = [f"there is no {name} in {tmp_path}" for name in ("ptxas", "libdevice")]
    held = "another process holds memory of the GPU: 4242, python, 69000 MiB"
    assert begin_with(found, *missing, held)
    holders.write_text("")  # as in a container, which does not see whose it is
    for name in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    found = toolchain.find_toolchain([tmp_path])
    assert found.ptxas == str(tmp_path / "bin/ptxas")
    assert begin_with(found, "70000 MiB of the NVIDIA H100's memory are he")


@pytest.mark.parametrize(
    ("driver", "plugin", "old"),
    [
        ("579.9", "jax_cuda13_plugin", True), ("580.1", "jax_cuda13_plugin", False),
        ("524.1", "jax_cuda12_plugin", True), ("525", "jax_cuda12_plugin", False),
        ("", "jax_cuda12_plugin", False),
    ],
)  # fmt: skip
def test_a_driver_that_is_older_than_jax_needs(driver, plugin, old):
    assert len([*OLD._replace(driver=driver, plugins=(plugin,)).notes()]) == old


def test_a_machine_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = toolchain.find_toolchain()
    assert (found.gpus, found.holders) == ((), ())
    assert Path("/usr/local/cuda") == Path(found.searched[-1])
    doctor_command.run(SimpleNamespace(remove=False, clear_cache=False))
    assert "driver: none: nvidia-smi finds no GPU\nptxas: " in capsys.readouterr().out


def kept_jobs(path):
    return [entry["job"] for entry in proved_kernels.read_proofs(path)]


@pytest.mark.parametrize(
    ("does", "until", "wanted", "jobs", "printed"),
    [
        ("a=pass", 600.0, True, ["rows", "draw"], "KEPT: calls on a chip"),
        ("a=pass", 600.0, False, [], "NOT KEPT: draw, rows passed; with --keep"),
        ("b=fail", 600.0, True, ["draw"], "default: draw ("),
        ("a=pass", 0.0, True, [], ""),
    ],
)
def test_kernels_that_pass_are_kept_where_asked(
    report, tmp_path, does, until, wanted, jobs, printed, capsys
):
    work(report, does, until)
    path = tmp_path / "cache" / proved_kernels.PROOFS_FILE
    check_device_command.keep(report, wanted, path)
    assert kept_jobs(path) == jobs
    assert printed in capsys.readouterr().out


def test_a_failure_takes_an_entry_away_and_others_stay(report, tmp_path):
    path = tmp_path / proved_kernels.PROOFS_FILE
    other = {"device": "b", "jax": "0.10", "backend": "mosaic_gpu", "job": "rows", "digest": "3"}
    proved_kernels.update(path, [other], {"rows"}, set())
    work(report, "a=pass")
    check_device_command.keep(report, True, path)
    assert kept_jobs(path) == ["rows", "rows", "draw"]
    report.pieces["rows: b"]["ok"] = False
    check_device_command.keep(report, False, path)
    assert kept_jobs(path) == ["rows", "draw"]
    assert proved_kernels.read_proofs(path)[0] == other
    assert (
        proved_kernels.lines(path)[1] == "proved kernels: mosaic_gpu on a chip with jax 0.10: draw"
    )
    for text in ("[1]", "{", "{}", '[{"device": 1}]'):
        path.write_text(text)
        assert proved_kernels.read_proofs(path) == []


def test_doctor_says_which_kernels_changed_since_they_passed(tmp_path, capsys, monkeypatch):
    """What is installed is asked in another process, where there are entries at all."""
    path = tmp_path / proved_kernels.PROOFS_FILE
    now = proved_kernels.current_digests()
    assert [*now["mosaic_gpu"]] == ["rows", "groups", "draw", "count_larger"]
    proofs = [
        {"device": "a", "jax": "0.12", "backend": "mosaic_gpu", "job": job, "digest": digest}
        for job, digest in (("rows", now["mosaic_gpu"]["rows"]), ("draw", "0" * 16), ("x", "1"))
    ]
    proved_kernels.update(path, proofs, {"rows", "draw", "x"}, set())
    monkeypatch.setattr(proved_kernels, "file", lambda: path)
    monkeypatch.setattr(proved_kernels, "current_digests", lambda: now)
    doctor_command.run(SimpleNamespace(remove=False, clear_cache=False))
    changed = "(changed since: XLA computes it)"
    said = f"proved kernels: mosaic_gpu on a with jax 0.12: rows, draw {changed}, x {changed}\n"
    assert said in capsys.readouterr().out
    assert proved_kernels.lines(path)[0].endswith("rows, draw, x")  # without jax


def test_without_jax_no_digest_is_known(monkeypatch):
    for program in ("/bin/false", "/nowhere/python", "/bin/echo"):
        monkeypatch.setattr(sys, "executable", program)
        assert proved_kernels.current_digests() is None


def test_verdicts_are_said_where_nothing_can_be_kept(tmp_path, capsys, monkeypatch):
    """A home that cannot be written costs the entries, not what was found."""

    def run_pieces(_, names, report, *__):
        for name in names:
            report.add(name, {"ok": True, "seconds": 0.1, "figures": None})

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(check_device_command, "read_ground", lambda *_: GROUND)
    monkeypatch.setattr(check_device_command, "run_pieces", run_pieces)
    monkeypatch.setattr(
        proved_kernels, "file", lambda: tmp_path / "file" / proved_kernels.PROOFS_FILE
    )
    assert main(["check-device", "--keep", "--output", str(tmp_path / "report")]) == 2
    said = capsys.readouterr()
    assert "2 of 2 kernels pass" in said.out
    assert str(tmp_path / "file") in said.err


def test_a_rehearsal_is_not_kept(capsys):
    assert main(["check-device", "--keep", "--rehearse"]) == 2
    assert "a rehearsal proves nothing" in capsys.readouterr().err


def test_it_runs_without_the_packages_of_rings_and_engines(tmp_path):
    """As on a device machine that has jax and NumPy: its errors are still sentences."""
    hidden = ("ipc", "posix_ipc", "zmq", "xxhash", "msgpack", "safetensors", "rich")
    program = f"""
import sys
sys.modules |= dict.fromkeys({hidden!r})
from jax_specdec.cli.main import main
sys.exit(main(["check-device", "--keep", "--rehearse", "--output", {str(tmp_path)!r}]))
"""
    done = ended("-c", program)
    assert done.returncode == 2
    assert done.stderr.startswith("jax-specdec: --keep and --rehearse: a rehearsal proves nothing")

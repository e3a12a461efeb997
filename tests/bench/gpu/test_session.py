"""A session on a GPU, without one: its pieces, its journal, and the schedules it tries."""

import dataclasses
import re

import pytest

from bench import gpu_check, gpu_tune
from bench.gpu import contenders as gpu_contenders
from bench.gpu import journal as gpu_journal
from bench.gpu import pieces, summary
from bench.gpu.contenders import COPY, FLOOR, FUSED, OURS, PLAIN, Machine
from bench.gpu.journal import Piece
from bench.report.comparison import Target, from_samples
from bench.report.files import read_json
from pallas_kernels.testing.shapes import GPU, Shape
from tests.support.paths import ROOT

HERE = {"date": "2026-01-01", "cpus": 2, "device": "a GPU"}
pytestmark = pytest.mark.fast


def journal(path, afresh=False, device="a GPU"):
    return gpu_journal.opened(path, HERE | {"device": device}, afresh)


def comparison(title="one"):
    return from_samples(title, {"a": [1.0]})


def test_a_session_that_is_cut_off_goes_on(tmp_path):
    """Each piece is on disk when the next begins; only failed pieces are done again."""
    path = tmp_path / "gpu.json"
    calls = []

    def wrong():
        calls.append("wrong")
        assert [one.title for one in read_json(path).comparisons] == ["one"]
        raise AssertionError("no such answer")

    pieces = [
        Piece("measured", lambda: calls.append("measured") or comparison()),
        Piece("wrong", wrong),
        Piece("checked", lambda: calls.append("checked")),
    ]
    first = journal(path)
    assert first.work(pieces, seconds=60) == 0
    assert calls == ["measured", "wrong", "checked"]
    assert first.failures == ["wrong: AssertionError: no such answer"]

    again = journal(path)
    assert set(again.checks) == {"measured", "checked"}
    again.work(pieces, seconds=60)
    assert calls[3:] == ["wrong"]
    assert [one.title for one in read_json(path).comparisons] == ["one"]

    journal(path, afresh=True).work(pieces[:1], seconds=60)
    assert calls[4:] == ["measured"]
    assert journal(path).checks.keys() == {"measured"}


def test_nothing_begins_after_the_time(tmp_path):
    pieces = [Piece(name, comparison) for name in "abc"]
    none = journal(tmp_path / "gpu.json")
    assert none.work(pieces, seconds=0) == 3
    assert not none.path.exists()


def test_results_of_another_device_are_not_added_to(tmp_path):
    path = tmp_path / "gpu.json"
    journal(path).work([Piece("a", comparison)], seconds=60)
    with pytest.raises(ValueError, match="measured on a GPU, and this is another"):
        journal(path, device="another")


def test_every_shape_is_measured_once(tmp_path):
    """The shapes with limits come before the rest."""
    machine, book = Machine(), journal(tmp_path / "gpu.json")
    parts = {
        part: [piece.name for piece in pieces.pieces_of(part, machine, book)]
        for part in pieces.PARTS
    }
    names = [name for found in parts.values() for name in found]
    assert len(set(names)) == len(names)
    expected = {f"speed of {shape}" for shape in GPU}
    assert {*parts["targets"], *parts["rest"]} == expected
    assert parts["targets"][0] == f"speed of {Shape(1536, 131_072, 20, 'bfloat16')}"
    assert len(parts["targets"]) == 3 * 2 * 2 * 2
    assert all(parts.values())


def test_one_of_each_part_and_a_piece_that_raises(tmp_path, monkeypatch, capsys):
    """What `.ci/run` rehearses: no part without a piece, and one fault makes the status 1."""
    book = journal(tmp_path / "gpu.json")
    small = gpu_contenders.rehearsal()
    assert all(any(pieces.pieces_of(part, small, book)) for part in pieces.PARTS)
    done = []

    def wrong():
        raise AssertionError("another answer")

    def of(part, machine, journal):
        first = Piece(part, wrong if part == fault else lambda: done.append(part))
        yield from (first, Piece(f"{part}, again", lambda: done.append("again")))

    monkeypatch.setattr(gpu_check, "pieces_of", of)
    given = ["--rehearse", "--one-of-each", "--afresh", "--results", str(tmp_path)]
    options = gpu_check.parser().parse_args(given)
    fault = None
    assert gpu_check.check(options, small) == 0
    assert done == list(pieces.PARTS)
    fault = "shapes"
    assert gpu_check.check(options, small) == 1
    assert "FAILED shapes: AssertionError: another answer" in capsys.readouterr().out


LOOP = dict([pieces.REHEARSED_LOOP[:2]])


@pytest.mark.parametrize("chosen", [pieces.TESTS, pieces.REHEARSED_TESTS, LOOP])
def test_the_tests_that_a_session_runs_exist(chosen):
    """A word of a selection that no test has would select too few, or all."""
    for file, selection in chosen.items():
        text = (ROOT / file).read_text()
        for word in set(re.findall(r"\w+", selection)) - {"and", "or", "not"}:
            assert word in text, f"{file} has no test {word}"


@pytest.mark.parametrize("shape", [*gpu_tune.SHAPES, Shape(3, 50_257, 64, "float16")], ids=str)
def test_schedules_that_are_tried(shape):
    """The current one is the first, each is there once, and each can be run."""
    found = list(gpu_tune.schedules(shape))
    assert len(found) == len(set(found)) >= 4
    assert len({gpu_tune.name_of(schedule) for schedule in found}) == len(found)
    for schedule in found:
        assert 1 <= schedule.splits <= schedule.num_steps
        assert schedule.vocabulary == shape.vocabulary


def test_summary():
    """Speeds, the better schedule, and missed limits."""
    names = (PLAIN, OURS, FUSED, FLOOR)
    speed = dataclasses.replace(
        from_samples("R=64", {name: [2e-5] for name in names}, settings={"ceiling GB/s": 3000}),
        figures={OURS: {"GB/s": 1500.0}},
        targets=(Target("time", 1.25, 1.5, "x"), Target("memory", 3, 1.0, "%")),
    )
    tuned = from_samples("schedules", {f"{gpu_tune.CURRENT}a": [3e-6], "b": [2e-6]})
    copied = dataclasses.replace(
        from_samples("copy", {COPY: [1.0]}), figures={COPY: {"GB/s": 3000.0}}
    )
    assert summary.lines([copied, speed, tuned]) == [
        "copy: 3000 GB/s",
        "R=64: mosaic_gpu 20.0 us, mosaic_gpu, fused greedy 20.0 us, max only 20.0 us, "
        "log_softmax + top_k 20.0 us; 50 % of the copy's bandwidth",
        "  time: 1.5 x, MISSED (at most 1.25 x)",
        "schedules: current 3.0 us, best 2.0 us (b)",
        "targets: 1 MISSED, 1 held",
    ]
    assert summary.lines([]) == ["targets: none"]


def contender(answer):
    def launch(_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return gpu_contenders.Contender(launch, lambda: None, lambda _: None, lambda out: out)


def test_a_peer_that_does_not_run_is_left_out(monkeypatch):
    """PyTorch's compiler may be missing; our own kernel must run."""
    monkeypatch.setattr(gpu_contenders, "check", lambda name, expected, actual: None)
    shape = Shape(1, 8, 1, "float32")
    peer = gpu_contenders.TORCH[1]
    good, bad = contender("an answer"), contender(RuntimeError("no compiler"))
    found, failed = gpu_contenders.check_equal(shape, {PLAIN: good, OURS: good, peer: bad})
    assert set(found) == {PLAIN, OURS}
    assert failed == {peer: "RuntimeError: no compiler"}
    with pytest.raises(RuntimeError, match="no compiler"):
        gpu_contenders.check_equal(shape, {PLAIN: good, OURS: bad})

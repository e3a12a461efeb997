"""`python -m bench`: contenders deliver the same, a wrong one ends a run, results become files."""

import importlib
from unittest import mock

import pytest

from bench import __main__ as bench
from bench import host, kernels, timing
from bench.comparison import from_samples
from bench.files import read_json
from bench.pictures import is_drawn
from bench.timing import BenchError, compare
from pallas_kernels import topk_logprobs
from pallas_kernels.testing.shapes import Shape


def test_every_suite_is_a_module_that_runs():
    for suite in bench.SUITES | bench.MORE:
        assert callable(importlib.import_module(f"bench.{bench.MODULES.get(suite, suite)}").run)


def test_a_wrong_contender_ends_the_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    wrong = mock.Mock(side_effect=BenchError("objects differs from columns"))
    monkeypatch.setattr(host, "run", wrong)
    path = tmp_path / "out.json"
    assert bench.main(["host", "--quick", "--json", str(path)]) == 1
    assert "NOT MEASURED: objects differs" in capsys.readouterr().err
    assert not path.exists()


def test_results_are_printed_written_and_drawn(tmp_path, monkeypatch, capsys):
    one = from_samples(
        "bytes to records: 8 requests", {"columns (ours)": [1e-4, 2e-4, 4e-4]}, settings={"k": 5}
    )
    monkeypatch.setattr(host, "run", lambda quick: [one])
    path = tmp_path / "out.json"
    assert bench.main(["host", "--quick", "--json", str(path)]) == 0
    picture = tmp_path / "out-host.svg"
    printed = capsys.readouterr().out
    assert "200 us" in printed
    assert f"wrote {picture}\n" in printed
    assert is_drawn(picture, [one])
    found = read_json(path)
    named = {"date", "cpus", "processor", "python", "versions", "command", "load before"}
    assert named <= set(found.environment)
    (read,) = found.comparisons
    assert (read.suite, read.settings) == ("host", {"k": 5})
    timing = read["columns (ours)"]
    assert (timing.low, timing.median, timing.high) == (1e-4, 2e-4, 4e-4)


def test_wrong_logprobs_of_logits_are_caught_before_any_timing(monkeypatch):
    def wrong(*args, **kwargs):
        found = topk_logprobs(*args, **kwargs)
        return found._replace(token_ranks=found.token_ranks + 1)

    shape = Shape(2, 300, 5, "float32")
    right = kernels.measure(shape, rounds=1)
    assert right.names == (kernels.PLAIN, kernels.LOGSUMEXP, "xla")
    monkeypatch.setattr(kernels, "topk_logprobs", wrong)
    monkeypatch.setattr(timing, "rotated", None)  # timed before it was checked
    with pytest.raises(BenchError, match="xla differs from log_softmax"):
        kernels.measure(shape, rounds=1)


def test_rounds_interleave_contenders_and_rotate_the_first():
    order = []
    contenders = {
        name: (lambda name=name: order.append(name) or sum(range(20000))) for name in ("a", "b")
    }
    result = timing.compare("t", contenders, check=None, rounds=4, min_seconds=0.0)
    assert order[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert len(result["a"].rounds) == 4


@pytest.mark.fast
@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("tokens", [host.ALIKE, host.MIXED])
def test_all_contenders_deliver_the_same(tokens, k):
    calls = host.contenders(5, k, tokens)
    lengths = set()
    for _ in range(host.STREAM + 1):
        expected = calls[host.RECORDS]()
        lengths.add(tuple(len(row[0]) for row in expected))
        for name, call in calls.items():
            if name != host.RECORDS:
                host.same_content(name, expected, call())
    assert (len(lengths) > 1) == (tokens == host.MIXED)


@pytest.mark.fast
@pytest.mark.parametrize("name", [host.LISTS, host.OBJECTS, host.COLUMNS])
def test_different_content_is_noticed(name, monkeypatch):
    ours = host.contenders(5, 2)[host.RECORDS]
    message_bytes = host.message_bytes
    monkeypatch.setattr(host, "message_bytes", lambda *shape, seed: message_bytes(*shape, seed=9))
    wrong = mock.Mock(side_effect=host.contenders(5, 2)[name])
    with pytest.raises(BenchError, match="differs"):
        compare("unequal", {host.RECORDS: ours, name: wrong}, check=host.same_content, rounds=1)
    assert wrong.call_count == 1  # nothing was timed

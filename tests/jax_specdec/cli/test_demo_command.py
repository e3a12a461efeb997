"""`jax-specdec demo`: what its options do, and what it says when it cannot do what they ask."""

import functools
import json
from types import SimpleNamespace

import pytest

from jax_specdec.cli.main import main
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.updates import Update
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.records.record import Records
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.fast


@pytest.fixture
def configured(monkeypatch):
    """The configurations that the demo starts engines with; no request runs."""
    seen = []
    fake = FakeEngine(lambda: None)

    def start(config):
        seen.append(config)
        return fake

    monkeypatch.setattr("jax_specdec.engine.engine.Engine", start)
    return seen


def test_options_reach_the_engine(configured, tmp_path):
    assert main(["demo"]) == 0
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("def f():\n")
    options = ["--drafter", "suffix", "--adaptive-drafts", "--chunked-prefill", "16",
               "--data-parallel", "3", "--disaggregated", "--corpus", str(corpus)]  # fmt: skip
    assert main(["demo", *options]) == 0
    plain, changed = configured
    assert (plain.drafter, plain.adaptive, plain.corpus) == ("mtp", False, "")
    assert (plain.num_ranks, plain.num_prefill_ranks, plain.prefill_chunk) == (1, 0, 64)
    assert (changed.drafter, changed.adaptive, changed.corpus) == ("suffix", True, str(corpus))
    assert (changed.num_ranks, changed.num_prefill_ranks, changed.prefill_chunk) == (3, 1, 16)


@pytest.mark.parametrize("choice", ["stop", "restart"])
def test_a_lost_worker_is_reported_once(choice, monkeypatch, capsys):
    """A demo that goes on says so at once; otherwise the error at the end does."""
    lost = WorkerFailed("the model worker of process rank 0 is gone")

    def generate():
        yield Update(None, None, Records(), 0, lost=lost)
        if choice == "stop":
            raise lost

    fake = FakeEngine(lambda: None)
    fake.generate = lambda requests: generate()
    monkeypatch.setattr("jax_specdec.engine.engine.Engine", fake)
    assert main(["demo", "--on-worker-loss", choice]) == (1 if choice == "stop" else 0)
    out, err = capsys.readouterr()
    assert (out + err).count("process rank 0 is gone") == 1


@pytest.mark.parametrize("advice", ["EngineConfig(...)", ""])
def test_a_killed_worker_brings_advice_for_the_command_line(advice, capsys, during):
    def lose():
        raise WorkerFailed("the worker is gone", advice)

    during(lose)
    assert main(["demo"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("the worker is gone\n")
    assert ("--on-worker-loss restart" in errors) == bool(advice)
    assert "EngineConfig" not in errors  # which is nothing to type on a command line


def test_prompts_that_are_not_text_are_refused_by_their_name(tmp_path, capsys):
    path = tmp_path / "prompts.bin"
    path.write_bytes(b"def\n\xff\xfe")
    assert main(["demo", "--prompts", str(path)]) == 2
    assert f"{path} is not UTF-8 text: byte 0xff at offset 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "temperature = -1.0"),
        (["--corpus", "/dev/null"], "--corpus is for --drafter suffix; mtp searches no text"),
        (["--prompts", "/nowhere/prompts.txt"], "/nowhere/prompts.txt"),
        (["--prompts", "/dev/null"], "holds no prompts"),
        (["--json", "/nowhere/out.jsonl"], "/nowhere/out.jsonl"),
        (["--weights", "/nowhere/x.safetensors"], "/nowhere/x.safetensors"),
        (["--drafter", "suffix", "--corpus", "/nowhere/text"], "/nowhere/text"),
        (["--max-tokens", str(2**31 - 300), "--slots", str(2**16)], "out of memory: Unable to"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(options, said, monkeypatch, capsys):
    stopped = []
    worker = SimpleNamespace(stop=lambda drain: stopped.append(drain))
    start = functools.partial(Engine, start_worker=lambda *_, **__: worker)  # no process
    monkeypatch.setattr("jax_specdec.engine.engine.Engine", start)
    assert main(["demo", *options]) == 2
    errors = "".join(capsys.readouterr().err.split())
    assert "".join(said.split()) in errors
    assert stopped == [False] * said.startswith("out of memory")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drafts", "-1"], "argument --drafts: -1 is below 0"),
        (["--drafts", "65"], "argument --drafts: 65 is above 64"),
        (["--slots", "0"], "argument --slots: 0 is below 1"),
        (["--chunked-prefill", "0"], "argument --chunked-prefill: 0 is below 1"),
        (["--preempt-every", "0"], "argument --preempt-every: 0 is below 1"),
        (["--data-parallel", "65"], "argument --data-parallel: 65 is above 64"),
        (["--k", "600"], "argument --k: 600 is above 512"),
        (["--k", "x"], "argument --k: invalid integer value: 'x'"),
        (["--k", "5", "--no-logprobs"], "--no-logprobs: not allowed with argument --k"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(options, said, capsys):
    with pytest.raises(SystemExit) as error:
        main(["demo", *options])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_help_is_worth_reading(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    text = capsys.readouterr().out
    for option in ("--drafter", "--drafts", "--k", "--temperature", "--no-logprobs", "--prompts",
                   "--json", "--slots", "--max-tokens", "--draft-logprobs", "--chunked-prefill",
                   "--disaggregated", "--data-parallel", "--preempt-every", "--adaptive-drafts",
                   "--corpus", "--on-worker-loss"):  # fmt: skip
        assert option in text
    assert "never imports jax" in text


def test_a_directory_for_json_is_refused_before_the_work(tmp_path, capsys, during):
    during(lambda: pytest.fail("the work began"))
    assert main(["demo", "--json", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_an_old_json_file_is_replaced_only_at_the_end(tmp_path, during):
    path = tmp_path / "out.jsonl"
    path.write_text("old " * 100_000)

    def fail():
        raise ValueError("something")

    during(fail)
    assert main(["demo", "--json", str(path)]) == 2
    assert path.read_text() == "old " * 100_000
    seen = []
    during(lambda: seen.append(path.read_text()))
    assert main(["demo", "--json", str(path)]) == 0
    assert seen == ["old " * 100_000]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 18


def test_json_may_go_to_a_device(during):
    during(lambda: None)
    assert main(["demo", "--json", "/dev/null"]) == 0

"""`jax-specdec demo`: what its options do, what it writes, and what it says when it cannot.

One real run is looked at by several tests; what does not depend on a model runs over scripted
workers. The marker `slow` has the same over real processes.
"""

import functools
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jax_specdec.cli.main import main
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.engine.worker_session import Update
from jax_specdec.records.record import Records
from jax_specdec.text import byte_tokens
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_process import scripted_engine

NGRAM = ["--k", "2", "--max-tokens", "8", "--drafter", "ngram", "--slots", "2"]
NOTHING = ["--no-logprobs", "--max-tokens", "3", "--drafter", "none", "--temperature", "0.8"]
EVERYTHING = ["--k", "1", "--max-tokens", "12", "--drafts", "2", "--slots", "2", "--disaggregated",
              "--draft-logprobs", "--chunked-prefill", "4", "--preempt-every", "4",
              "--adaptive-drafts"]  # fmt: skip


def demo(folder, options, **environment):
    """Standard output and the records of a run with real workers."""
    prompts, path = folder / "prompts.txt", folder / "out.jsonl"
    prompts.write_text("def f(\n\nimport os\\nimport \nwhile True:\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "jax_specdec.cli", "demo", "--prompts", str(prompts),
         "--json", str(path), *options],
        capture_output=True, text=True, check=False, timeout=200, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A run with MTP drafts, logprobs of tokens and drafts, and preemption: one for all tests."""
    options = ["--k", "2", "--max-tokens", "8", "--drafts", "2", "--slots", "2",
               "--draft-logprobs", "--chunked-prefill", "4", "--preempt-every", "4",
               "--adaptive-drafts"]  # fmt: skip
    folder = tmp_path_factory.mktemp("demo")
    # The programs compile in half the time; the table has room for the words of its columns.
    return demo(folder, options, JAX_DISABLE_MOST_OPTIMIZATIONS="1", COLUMNS="120")


@pytest.fixture
def scripted(monkeypatch, tmp_path, capsys):
    """Run the demo over scripted workers: its standard output and its records."""

    def run(*options):
        monkeypatch.setattr("jax_specdec.engine.engine.Engine", scripted_engine())
        prompts, path = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
        prompts.write_text("def f(\nimport os\nwhile True:\n", encoding="utf-8")
        assert main(["demo", "--prompts", str(prompts), "--json", str(path), *options]) == 0
        found = capsys.readouterr()
        assert found.err == ""
        return found.out, [json.loads(line) for line in path.read_text().splitlines()]

    return run


def check_records(out, records, most_tokens):
    """Three OpenAI-style records with K = 2, in the order of the prompts."""
    for said in ("00", "tokens", "a step", "drafts accepted", "logprob", "are ids, logprobs",
                 "transport latency", "wrote 3 records"):  # fmt: skip
        assert said in out
    assert [record["id"] for record in records] == ["00", "01", "02"]
    for record in records:
        (choice,) = record["choices"]
        ids = record["speculation"]["token_ids"]
        assert record["object"] == "text_completion"
        assert record["usage"]["completion_tokens"] == len(ids) <= most_tokens
        assert choice["text"] == byte_tokens.decode(i for i in ids if i < 256)
        assert choice["finish_reason"] in ("length", "stop")
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(ids)
        assert all(len(top) <= 2 for top in logprobs["top_logprobs"])
        assert record["speculation"]["token_ranks"] == [1] * len(ids)  # greedy
        total = sum(logprobs["token_logprobs"])
        assert record["speculation"]["cumulative_logprob"] == pytest.approx(total)


def check_nothing_asked(records):
    """Records without logprobs and without drafts, at temperature 0.8."""
    for record in records:
        assert record["choices"][0]["logprobs"] is None
        assert record["speculation"]["cumulative_logprob"] is None
        assert record["speculation"]["temperature"] == 0.8
        assert record["speculation"]["drafts"] == 0


def check_draft_logprobs(steps):
    """Every step that verified drafts has their logprobs; there is one."""
    drafted = [step for step in steps if step["num_drafts"]]
    assert drafted
    for step in drafted:
        assert len(step["draft_logprobs"]) == step["num_drafts"]
        assert all(value <= 0 for value in step["draft_logprobs"])


def workers_of(out):
    """The rows of the table of workers: rank to (role, messages, bytes, tokens, ...)."""
    rows = [re.findall(r"[\w,]+", line) for line in out.partition("Workers")[2].splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 7}


def check_handed_over(out, records, most_tokens):
    """A prefill worker ran the prompts, and a decode worker the rest, with preemption."""
    rows = workers_of(out)
    decode, prefill = rows["0"], rows["1"]
    assert (decode[0], prefill[0]) == ("decode", "prefill")
    assert prefill[4] == "3"  # handed over
    (messages,) = re.findall(r"(\d+) messages,", out)
    assert int(decode[1]) + int(prefill[1]) == int(messages)
    assert int(decode[5]) > 0  # preempted
    for record in records:
        ids = record["speculation"]["token_ids"]
        assert 1 <= len(ids) <= most_tokens
        assert len(record["choices"][0]["logprobs"]["token_logprobs"]) == len(ids)
        steps = record["speculation"]["by_step"]
        assert steps[0]["num_tokens"] == 1
        assert "draft_logprobs" not in steps[1]  # handed over as bare ids


def test_a_run_writes_one_openai_style_record_a_request(shown):
    out, records = shown
    check_records(out, records, 8)
    assert records[1]["speculation"]["prompt"] == "import os\nimport "


def test_drafts_have_logprobs_and_requests_give_up_their_slots(shown):
    out, records = shown
    (worker,) = workers_of(out).values()
    assert worker[0] == "decode"
    assert int(worker[5]) > 0  # preempted
    for record in records:
        check_draft_logprobs(record["speculation"]["by_step"][1:])


@pytest.mark.fast
def test_records_over_scripted_workers(scripted):
    check_records(*scripted(*NGRAM), 8)


@pytest.mark.fast
def test_without_drafts_and_without_logprobs(scripted):
    check_nothing_asked(scripted(*NOTHING)[1])


@pytest.mark.fast
def test_a_prefill_worker_hands_its_requests_over(scripted):
    check_handed_over(*scripted(*EVERYTHING), 12)


@pytest.mark.slow
def test_a_real_run_with_ngram_drafts(tmp_path):
    check_records(*demo(tmp_path, NGRAM), 8)


@pytest.mark.slow
def test_a_real_run_without_drafts_and_without_logprobs(tmp_path):
    check_nothing_asked(demo(tmp_path, NOTHING)[1])


@pytest.mark.slow
def test_every_behavior_of_the_seed_system_in_one_run(tmp_path):
    out, records = demo(tmp_path, EVERYTHING)
    check_handed_over(out, records, 12)
    for record in records:
        check_draft_logprobs(record["speculation"]["by_step"][2:])


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


@pytest.mark.fast
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


@pytest.mark.fast
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


@pytest.mark.fast
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


@pytest.mark.fast
def test_prompts_that_are_not_text_are_refused_by_their_name(tmp_path, capsys):
    path = tmp_path / "prompts.bin"
    path.write_bytes(b"def\n\xff\xfe")
    assert main(["demo", "--prompts", str(path)]) == 2
    assert f"{path} is not UTF-8 text: byte 0xff at offset 4" in capsys.readouterr().err


@pytest.mark.fast
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


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drafts", "-1"], "argument --drafts: -1 is below 0"),
        (["--drafts", "65"], "argument --drafts: 65 is above 64"),
        (["--slots", "0"], "argument --slots: 0 is below 1"),
        (["--chunked-prefill", "0"], "argument --chunked-prefill: 0 is below 1"),
        (["--preempt-every", "0"], "argument --preempt-every: 0 is below 1"),
        (["--data-parallel", "65"], "argument --data-parallel: 65 is above 64"),
        (["--k", "200"], "argument --k: 200 is above 128"),
        (["--k", "x"], "argument --k: invalid integer value: 'x'"),
        (["--k", "5", "--no-logprobs"], "--no-logprobs: not allowed with argument --k"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(options, said, capsys):
    with pytest.raises(SystemExit) as error:
        main(["demo", *options])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.fast
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


@pytest.mark.fast
def test_a_directory_for_json_is_refused_before_the_work(tmp_path, capsys, during):
    during(lambda: pytest.fail("the work began"))
    assert main(["demo", "--json", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.fast
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


@pytest.mark.fast
def test_json_may_go_to_a_device(during):
    during(lambda: None)
    assert main(["demo", "--json", "/dev/null"]) == 0


@pytest.mark.fast
def test_bad_weights_say_only_the_cause(tmp_path, capsys):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"no weights")
    assert main(["demo", "--weights", str(path), "--max-tokens", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "starting the model worker: it imports jax and compiles ...\n"
    assert "exited with status" in captured.err

"""Whole runs of `jax-specdec demo`: what they show and what they write.

Several tests look at one real run; tests that need no model run over scripted workers. Under the
marker `slow`, the same checks look at real processes.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from jax_specdec.cli.main import main
from jax_specdec.text import byte_tokens
from tests.support import quick_compile
from tests.support.scripted_process import scripted_engine

NGRAM = ["--k", "2", "--max-tokens", "8", "--drafter", "ngram", "--slots", "2"]
NOTHING = ["--no-logprobs", "--max-tokens", "3", "--drafter", "none", "--temperature", "0.8"]
EVERYTHING = ["--k", "1", "--max-tokens", "12", "--drafts", "2", "--slots", "2", "--disaggregated",
              "--draft-logprobs", "--chunked-prefill", "4", "--preempt-every", "4",
              "--adaptive-drafts"]  # fmt: skip


def demo(folder, options, **environment):
    """Run the demo with real workers; returns its standard output and its records."""
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
    """One run for several tests, with MTP drafts, logprobs of tokens and drafts, and preemption."""
    options = ["--k", "2", "--max-tokens", "12", "--drafts", "2", "--slots", "2",
               "--draft-logprobs", "--chunked-prefill", "4", "--preempt-every", "3",
               "--adaptive-drafts"]  # fmt: skip
    folder = tmp_path_factory.mktemp("demo")
    # The programs compile in half the time; the table has room for the words of its columns.
    return demo(folder, options, XLA_FLAGS=quick_compile.FLAGS, COLUMNS="120")


@pytest.fixture
def scripted(monkeypatch, tmp_path, capsys):
    """Runs the demo over scripted workers; returns its standard output and its records."""

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
    """Check three OpenAI-style records with K = 2, in the order of the prompts."""
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
    """Check records without logprobs and without drafts, at temperature 0.8."""
    for record in records:
        assert record["choices"][0]["logprobs"] is None
        assert record["speculation"]["cumulative_logprob"] is None
        assert record["speculation"]["temperature"] == 0.8
        assert record["speculation"]["drafts"] == 0


def check_draft_logprobs(steps):
    """Check that every step that verified drafts has their logprobs, and that there is one."""
    drafted = [step for step in steps if step["num_drafts"]]
    assert drafted
    for step in drafted:
        assert len(step["draft_logprobs"]) == step["num_drafts"]
        assert all(value <= 0 for value in step["draft_logprobs"])


def workers_of(out):
    """The rows of the table of workers: rank to [role, messages, bytes, tokens, ...]."""
    rows = [re.findall(r"[\w,]+", line) for line in out.partition("Workers")[2].splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 7}


def check_handed_over(out, records, most_tokens):
    """Check that one worker ran the prompts and another the rest, with preemption."""
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
    check_records(out, records, 12)
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


def test_bad_weights_say_only_the_cause(tmp_path, capsys):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"no weights")
    assert main(["demo", "--weights", str(path), "--max-tokens", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "starting the model worker: it imports jax and compiles ...\n"
    assert "exited with status" in captured.err


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

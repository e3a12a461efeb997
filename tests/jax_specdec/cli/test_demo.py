"""`jax-specdec demo`: its options, its texts, what it writes, and what it says when it cannot."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

from jax_specdec.cli import demo_command
from jax_specdec.cli.main import main
from jax_specdec.device.messages.buckets import k_bucket
from jax_specdec.engine.updates import Update
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.records.record import Records
from jax_specdec.serve.model import tiny_model
from jax_specdec.text import byte_tokens
from tests.support import quick_compile
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_process import scripted_engine

EVERYTHING = ["--k", "2", "--max-tokens", "12", "--drafts", "2", "--slots", "2", "--disaggregated",
              "--draft-logprobs", "--chunked-prefill", "4", "--preempt-every", "4",
              "--adaptive-drafts", "--temperature", "0"]  # fmt: skip
MODEL = tiny_model(name="tiny", created=0, max_length=2**31 - 1)


def requests_of(*options):
    return demo_command.requests_of(parsed(*options), MODEL)


def parsed(*options):
    from jax_specdec.cli.main import _parsed

    return _parsed(["demo", *options])


@pytest.fixture
def configured(monkeypatch):
    """The configurations that the demo starts engines with; no request runs."""
    seen = []
    monkeypatch.setattr(
        "jax_specdec.engine.engine.Engine",
        lambda config: seen.append(config) or FakeEngine(lambda: None),
    )
    return seen


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


@pytest.mark.fast
def test_options_reach_the_engine(configured, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("def f():\n")
    options = ["--drafter", "suffix", "--adaptive-drafts", "--chunked-prefill", "16", "--slots",
               "3", "--data-parallel", "3", "--disaggregated", "--corpus", str(corpus)]  # fmt: skip
    assert main(["demo"]) == main(["demo", *options]) == 0
    plain, changed = configured
    assert (plain.drafter, plain.num_drafts, plain.adaptive, plain.corpus) == ("mtp", 3, False, "")
    assert (plain.num_ranks, plain.num_prefill_ranks, plain.prefill_chunk) == (1, 0, 64)
    assert (changed.drafter, changed.adaptive, changed.corpus) == ("suffix", True, str(corpus))
    assert (changed.num_ranks, changed.num_prefill_ranks, changed.prefill_chunk) == (3, 1, 16)
    assert (plain.num_slots, changed.num_slots) == (8, 3)


@pytest.mark.fast
def test_options_change_every_request():
    def asked(*options):
        found = [one.params for one in requests_of(*options)]
        return {(p.logprobs, p.temperature, p.max_tokens, p.top_p, p.draft_logprobs) for p in found}

    assert asked("--k", "7", "--temperature", "0.5", "--max-tokens", "9", "--draft-logprobs") == {
        (7, 0.5, 9, 0.95, True)
    }
    assert {one[0] for one in asked("--no-logprobs")} == {None}
    assert {(one[1], one[3]) for one in asked("--temperature", "0")} == {(0.0, 1.0)}
    plain = requests_of()
    assert {None, 0, 20} <= {one.params.logprobs for one in plain}
    assert {(p.params.temperature > 0, p.params.top_p) for p in plain} == {(False, 1), (True, 0.95)}


def largest_k(requests, slots, tokens_a_step):
    """The largest K that runs, step by step, in this many slots that are filled in order."""
    waiting, running, found = list(requests), [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting[0].params.max_tokens, waiting.pop(0).params.logprobs])
        found.append(max(k if k is not None else -1 for _, k in running))
        for one in running:
            one[0] -= tokens_a_step
        running = [one for one in running if one[0] > 0]
    return {k_bucket(k, byte_tokens.VOCAB_SIZE) for k in found}


@pytest.mark.fast
@pytest.mark.parametrize("tokens_a_step", [2, 3, 4])
def test_every_batch_of_the_demo_runs_the_same_program(tokens_a_step):
    """The largest K of a batch is part of its program, which costs a start two seconds."""
    requests = requests_of()
    assert len(requests) == 18
    assert largest_k(requests, 8, tokens_a_step) == {20}


def check_records(out, records, draft_logprobs=True):
    """Check three OpenAI-style greedy records with K = 2, in the order of the prompts."""
    assert out.startswith("starting the model worker: it imports jax and compiles ...\n")
    for said in ("mean logprob", "drafts accepted: ", "bytes a message", "wrote 3 records"):
        assert said in out
    assert [record["id"] for record in records] == ["1", "2", "3"]
    for record in records:
        (choice,), ids = record["choices"], record["speculation"]["token_ids"]
        logprobs = choice["logprobs"]
        assert record["usage"]["completion_tokens"] == len(ids) <= 12
        assert choice["text"] == byte_tokens.decode(i for i in ids if i < 256)
        assert choice["finish_reason"] in ("length", "stop")
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(ids)
        assert all(len(top) <= 2 for top in logprobs["top_logprobs"])
        assert record["speculation"]["token_ranks"] == [1] * len(ids)
        total = sum(logprobs["token_logprobs"])
        assert record["speculation"]["cumulative_logprob"] == pytest.approx(total)
        steps = record["speculation"]["by_step"]
        assert steps[0]["num_tokens"] == 1
        assert "draft_logprobs" not in steps[1]  # handed over as bare ids
        drafted = [step for step in steps[2:] if step["num_drafts"]]
        for step in drafted if draft_logprobs else ():
            assert len(step["draft_logprobs"]) == step["num_drafts"]
        assert drafted
    rows = dict(re.findall(r"worker (\d) \((.*)\n", out))
    sent = [int(re.search(r"(\d+) message", row)[1]) for row in rows.values()]
    assert [row.partition(")")[0] for row in rows.values()] == ["decode", "prefill"]
    assert min(sent) > 0
    assert not rows["0"].endswith(" 0 preempted")


@pytest.mark.fast
def test_records_over_scripted_workers(scripted):
    check_records(*scripted(*EVERYTHING), draft_logprobs=False)


@pytest.mark.fast
def test_without_drafts_and_without_logprobs(scripted):
    out, records = scripted(
        "--no-logprobs", "--max-tokens", "1", "--drafter", "none", "--temperature", "0.8"
    )
    assert "1: K = None, T = 0.8, 1 token (length)\ndef f(" in out
    for record in records:
        assert record["choices"][0]["logprobs"] is None
        assert record["speculation"]["cumulative_logprob"] is None
        assert record["speculation"]["temperature"] == 0.8
        assert record["speculation"]["drafts"] == 0


def test_a_real_run_shows_every_behavior_of_the_seed_system(tmp_path):
    prompts, path = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("def f(\n\nimport os\\nimport \nwhile True:\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "jax_specdec.cli", "demo", "--prompts", str(prompts),
         "--json", str(path), *EVERYTHING],
        capture_output=True, text=True, check=False, timeout=280,
        env=os.environ | {"XLA_FLAGS": quick_compile.FLAGS},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for number, record in zip("134", records, strict=True):
        assert record["id"] == number  # the line of its prompt
        record["id"] = str(records.index(record) + 1)
    check_records(done.stdout, records)
    assert records[1]["speculation"]["prompt"] == "import os\nimport "


class Step:
    """A record of a request that emitted `ids`."""

    def __init__(self, id, ids, accepted=0, end=None):
        import numpy as np

        self.request_id, self.num_tokens, self.num_accepted = id, len(ids), accepted
        self.token_ids, self.logprobs = np.array(ids), np.full((len(ids), 1), -0.2)
        self.finish_reason = end


def shown(records, **console):
    """The demo's view after these records of its first request."""
    demo = demo_command.Demo(requests_of(), MODEL)
    demo.add(Update(None, None, records))
    demo.messages.append((0, 100, 5.0))
    return demo, demo.view(Console(file=io.StringIO(), **console), lambda: "starting")


@pytest.mark.fast
@pytest.mark.parametrize("width", [13, 20, 80])
@pytest.mark.parametrize("height", [1, 2, 5, 40])
def test_the_view_fits_and_shows_the_end_of_a_text_and_its_status(width, height):
    text = "first\nsecond\t漢字 [bold]\x1b[2J end"
    _, view = shown([Step("01", list(text.encode()))], width=width, height=height)
    *lines, status = view.plain.split("\n")
    assert len(lines) == min(18, height - 1)
    assert status == "0 of 18 done, 1 running, step 1"
    assert all(cell_len(line) <= width for line in lines)
    if height > 1:
        line = lines[1] if height > 18 else lines[0]  # the running one is first
        whole = "import os⏎import sys⏎import first⏎second⇥漢字 [bold]·[2J end"
        assert line[:11] == f"K=0   {len(text.encode()):>4} "
        assert whole.endswith(line[11:])


@pytest.mark.fast
def test_a_text_is_styled_token_by_token_and_ends_whole():
    demo, _ = shown([Step("00", list("abé".encode()), accepted=2)], width=80, height=24)
    text = demo.texts["00"]
    runs = [(text.plain[s.start : s.end], "underline" in str(s.style)) for s in text.spans]
    assert runs == [("a", True), ("b", True), ("é", False)]
    demo.add(Update(None, None, [Step("00", [0xC3], end=1)]))
    assert text.plain == "def __init__(self, abé\ufffd"  # it ended inside a character
    empty = demo_command.Demo(requests_of(), MODEL)
    assert empty.view(Console(width=80, height=24), lambda: "starting, 3 s").plain.endswith(
        "\nstarting, 3 s"
    )


@pytest.mark.fast
@pytest.mark.parametrize("choice", ["stop", "restart"])
def test_a_lost_worker_is_reported_once(choice, monkeypatch, capsys):
    """A demo that goes on says so at once; otherwise the error at the end does, with advice."""
    lost = WorkerFailed("the model worker of process rank 0 is gone", "EngineConfig(...)")

    def generate():
        yield Update(None, None, Records(), 0, lost=lost)
        if choice == "stop":
            raise lost

    fake = FakeEngine(lambda: None)
    fake.generate = lambda requests: generate()
    fake.running = ()
    monkeypatch.setattr("jax_specdec.engine.engine.Engine", fake)
    assert main(["demo", "--on-worker-loss", choice]) == (1 if choice == "stop" else 0)
    out, err = capsys.readouterr()
    assert (out + err).count("process rank 0 is gone") == 1
    assert ("--on-worker-loss restart" in err) == (choice == "stop")
    assert choice == "restart" or "EngineConfig" not in err  # nothing to type on a command line


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "temperature = -1.0"),
        (["--corpus", "/dev/null"], "--corpus is for --drafter suffix; mtp searches no text"),
        (["--drafter", "model"], "--drafter model needs --draft-model DIR"),
        (["--prompts", "/nowhere/prompts.txt"], "/nowhere/prompts.txt"),
        (["--prompts", "/dev/null"], "holds no prompts"),
        (["--json", "/nowhere/out.jsonl"], "/nowhere/out.jsonl"),
        (["--json", "/tmp"], "/tmp"),
        (["--weights", "/nowhere/x.safetensors"], "/nowhere/x.safetensors"),
        (["--drafter", "suffix", "--corpus", "/nowhere/text"], "/nowhere/text"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(options, said, configured, capsys):
    assert main(["demo", *options]) == 2
    assert said in capsys.readouterr().err
    assert configured == []


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drafts", "65"], "argument --drafts: 65 is above 64"),
        (["--slots", "0"], "argument --slots: 0 is below 1"),
        (["--chunked-prefill", "0"], "argument --chunked-prefill: 0 is below 1"),
        (["--preempt-every", "0"], "argument --preempt-every: 0 is below 1"),
        (["--data-parallel", "65"], "argument --data-parallel: 65 is above 64"),
        (["--k", "600"], "argument --k: 600 is above 512"),
        (["--k", "5", "--no-logprobs"], "--no-logprobs: not allowed with argument --k"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(options, said, capsys):
    with pytest.raises(SystemExit) as error:
        main(["demo", *options])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.fast
def test_an_old_json_file_is_replaced_only_at_the_end(tmp_path, during):
    path = tmp_path / "out.jsonl"
    path.write_text("old " * 100_000)

    def fail():
        raise ValueError("something")

    during(fail)
    assert main(["demo", "--json", str(path)]) == 2
    assert path.read_text() == "old " * 100_000
    during(lambda: None)
    assert main(["demo", "--json", str(path)]) == 0
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 18
    assert main(["demo", "--json", "/dev/null"]) == 0


@pytest.mark.fast
def test_a_full_disk_is_reported_with_the_files_name(during, capsys):
    during(lambda: None)
    assert main(["demo", "--json", "/dev/full"]) == 2
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err

"""`jax-specdec demo`: its options, its texts, what it writes, and what it says when it cannot."""

import io
import json
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from jax_specdec.cli import demo_command
from jax_specdec.cli.main import main, parsed_options
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.updates import Update
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.record import Records
from jax_specdec.serve.model import tiny_model
from jax_specdec.text import byte_tokens
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_process import scripted_engine

EVERYTHING = ["--k", "2", "--max-tokens", "12", "--drafts", "2", "--slots", "2", "--disaggregated",
              "--draft-logprobs", "--chunked-prefill", "4", "--preempt-every", "4",
              "--draft-width", "fixed", "--temperature", "0"]  # fmt: skip
MODEL = tiny_model(name="tiny", created=0, max_length=2**31 - 1)


def requests_of(*options):
    return demo_command.requests_of(parsed_options(["demo", *options])[1], MODEL)


def test_options_reach_the_engine(fake):
    options = ["--drafter", "suffix", "--draft-width", "fixed", "--chunked-prefill", "16",
               "--slots", "3", "--data-parallel", "3", "--disaggregated"]  # fmt: skip
    assert main(["demo"]) == main(["demo", *options]) == 0
    names = ("drafter", "num_drafts", "draft_width", "num_ranks", "num_prefill_ranks",
             "prefill_chunk", "num_slots")  # fmt: skip
    assert [tuple(getattr(one, name) for name in names) for one in fake.configs] == [
        ("mtp", 3, "adaptive", 1, 0, 64, 8), ("suffix", 3, "fixed", 3, 1, 16, 3),
    ]  # fmt: skip


def check_records(out, records):
    """Check three records with K = 2, as `test_openai` has them, in the order of the prompts."""
    assert out.startswith("starting the model worker: it imports jax and compiles ...\n")
    for said in ("mean logprob", "drafts accepted: ", "bytes a message", "wrote 3 records"):
        assert said in out
    for record in records:
        (choice,), found = record["choices"], record["speculation"]
        ids, steps = found["token_ids"], found["by_step"]
        assert record["usage"]["completion_tokens"] == len(ids) <= 12
        assert choice["text"] == byte_tokens.decode(i for i in ids if i < 256)
        assert choice["finish_reason"] in ("length", "stop")
        assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
        assert steps[0]["num_tokens"] == 1
        assert "draft_logprobs" not in steps[1]  # handed over as bare ids
        assert any(step["num_drafts"] for step in steps[2:])
        for step in steps:
            assert len(step.get("draft_logprobs", ())) in (0, step["num_drafts"])
    rows = re.findall(r"worker \d \((\w+)\): (\d+) messages?.* (\d+) preempted\n", out)
    assert [role for role, _, _ in rows] == ["decode", "prefill"]
    assert all(int(sent) for _, sent, _ in rows)
    assert int(rows[0][2])


def test_records_over_scripted_workers(use_engine, tmp_path, capsys):
    def run(*options):
        use_engine(scripted_engine())
        assert main(["demo", "--prompts", str(prompts), "--json", str(path), *options]) == 0
        found = capsys.readouterr()
        assert found.err == ""
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert [record["id"] for record in records] == ["1", "2", "3"]
        return found.out, records

    prompts, path = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("def f(\nimport os\nwhile True:\n", encoding="utf-8")
    check_records(*run(*EVERYTHING))
    plain = ["--no-logprobs", "--max-tokens", "1", "--drafter", "none", "--temperature", "0.8"]
    out, records = run(*plain)
    assert "1: K = None, T = 0.8, 1 token (length)\ndef f(" in out
    for record in records:
        found = record["speculation"]
        assert record["choices"][0]["logprobs"] is None
        names = ("cumulative_logprob", "temperature", "drafts")
        assert [found[name] for name in names] == [None, 0.8, 0]


@pytest.mark.parametrize("width", [13, 20, 80])
@pytest.mark.parametrize("height", [1, 2, 5, 40])
def test_the_view_fits_and_shows_ends_and_status(width, height):
    text = "first\nsecond\t漢字 [bold]\x1b[2J end"
    ids = np.frombuffer(text.encode(), np.uint8)
    record = SimpleNamespace(
        request_id="01", token_ids=ids, num_tokens=len(ids), num_accepted=0, finish_reason=None,
        logprobs=np.full((len(ids), 1), -0.2),
    )  # fmt: skip
    demo = demo_command.Demo(requests_of(), MODEL)
    demo.add(Update(None, None, [record]))
    demo.messages.append((0, 100, 5.0))
    console = Console(file=io.StringIO(), width=width, height=height)
    *lines, status = demo.view(console, lambda: "starting, 3 s").plain.split("\n")
    assert len(lines) == min(18, height - 1)
    assert status == "0 of 18 done, 1 running, step 1"
    assert all(cell_len(line) <= width for line in lines)
    if height > 1:
        line = lines[1] if height > 18 else lines[0]  # the running one is first
        whole = "import os⏎import sys⏎import first⏎second⇥漢字 [bold]·[2J end"
        assert line[:11] == f"K=0   {len(text.encode()):>4} "
        assert whole.endswith(line[11:])
        assert cell_len(line) > min(width, 60) - 2  # as much of it as fits


@pytest.mark.parametrize("choice", ["stop", "restart"])
def test_a_lost_worker_is_reported_once(choice, use_engine, capsys):
    """A demo that goes on says so at once; otherwise the error at the end does, with advice."""
    lost = WorkerFailed("the model worker of process rank 0 is gone", "EngineConfig(...)")

    class Losing(FakeEngine):
        running = ()

        def generate(self, requests):
            yield Update(None, None, Records(), 0, lost=lost)
            if choice == "stop":
                raise lost

    use_engine(Losing())
    assert main(["demo", "--on-worker-loss", choice]) == (1 if choice == "stop" else 0)
    out, err = capsys.readouterr()
    assert (out + err).count("process rank 0 is gone") == 1
    assert ("--on-worker-loss restart" in err) == (choice == "stop")
    assert "EngineConfig" not in err  # nothing to type on a command line


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.LENGTH, 0), (FinishReason.ATTEMPTS_EXHAUSTED, 1)]
)
def test_a_failed_request_makes_the_status_1(reason, status, use_engine):
    class Ending(FakeEngine):
        running = ()

        def generate(self, requests):
            record = SimpleNamespace(
                request_id=requests[0].id, token_ids=np.array([100]), num_tokens=1, num_accepted=0,
                finish_reason=reason, logprobs=None, statistics=None,
            )  # fmt: skip
            yield Update(None, None, [record])

    use_engine(Ending())
    assert main(["demo"]) == status


def test_an_old_json_file_is_replaced_only_at_the_end(tmp_path, during, capsys):
    path = tmp_path / "out.jsonl"
    path.write_text("old " * 100_000)

    during(mock.Mock(side_effect=ValueError("something")))
    assert main(["demo", "--json", str(path)]) == 2
    assert path.read_text() == "old " * 100_000
    during(lambda: None)
    assert main(["demo", "--json", str(path)]) == main(["demo", "--json", "/dev/null"]) == 0
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 18
    assert main(["demo", "--json", "/dev/full"]) == 2
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err

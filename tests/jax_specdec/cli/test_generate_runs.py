"""Whole runs of `jax-specdec generate`: their values, and how they end and go on.

The values come from one run with a real worker. Files, signals and the ends of processes are tested
over scripted workers, and under the marker `slow` over real ones.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from ipc.doctor import find_ring_files
from jax_specdec.export import openai
from jax_specdec.text.tokenizer import Tokenizer
from tests.support import decoding, hf_files, quick_compile, tiny_checkpoint
from tests.support.paths import ROOT
from tests.support.processes import children_of, wait_for
from tests.support.scripted_process import start_command
from tests.support.tiny_checkpoint import CONFIG, VOCAB


def start(worker, *options, hold=-1, **pipes):
    """Start the command over "real" or "scripted" workers; `hold` is for scripted ones."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    if worker == "scripted":
        return start_command("generate", *options, hold=hold, **pipes)
    command = [sys.executable, "-m", "jax_specdec.cli", "generate", *map(str, options)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def run(worker, *options):
    """Run the command to its end; returns its standard output and standard error."""
    with start(worker, *options) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return out, err


def ended(process, by):
    """The standard error of a command that `by(process)` ends."""
    try:
        by(process)
        return process.communicate(timeout=250)[1]
    finally:
        process.kill()
        process.wait()


either_worker = pytest.mark.parametrize(
    "worker", ["scripted", pytest.param("real", marks=pytest.mark.slow)]
)


def without_times(records):
    """Records by id, without times, digests and the numbers of steps."""
    found = {}
    for record in records:
        assert record["id"] not in found
        found[record["id"]] = record
        for name in ("created", "request_digest"):
            record.pop(name, None)
        for step in record["speculation"]["by_step"]:
            del step["step"]
    return found


def written(path):
    return without_times(map(json.loads, path.read_text().splitlines()))


@pytest.fixture
def cheap_compilation(monkeypatch):
    """Compile in half the time, here and in the worker: both run the same, slower programs."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
def test_records_are_those_of_the_loop(model, tmp_path, cheap_compilation):
    """Files, a tokenizer and another process change no id and no bit of a logprob."""
    file = tmp_path / "p.jsonl"
    lines = [
        {"id": "a", "prompt": "import json, import json, import", "logprobs": 3},
        {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2},
        {"id": "c", "prompt": "no logprobs", "max_tokens": 4, "prompt_logprobs": 2},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    out, err = run(
        "real", "--model", model, "--prompts", file, "--output", tmp_path / "o.jsonl",
        "--max-tokens", 16, "--slots", 3, "--max-length", 96, "--ignore-eos",
    )  # fmt: skip
    assert "3 of 3 requests, 36 tokens" in err
    tokenizer = Tokenizer(model, VOCAB)
    hi = [2, *tokenizer.encode("Hi")[1:], 3]
    requests = [
        decoding.request("a", tokenizer.encode(lines[0]["prompt"]), max_tokens=16, logprobs=3,
                         seed=1),
        decoding.request("2", hi, max_tokens=16, logprobs=2, seed=2),
        decoding.request("c", tokenizer.encode("no logprobs"), max_tokens=4, prompt_logprobs=2,
                         seed=3),
    ]  # fmt: skip
    loaded = hf_files.random_params(CONFIG), CONFIG
    want = decoding.run(requests, "ngram", num_slots=3, model=loaded, chunk=64)
    expected, texts = [], []
    for request in requests:
        make = openai.chat_completion if request.id == "2" else openai.completion
        records = want.records[request.id]
        parts = [record.prompt for record in records if record.prompt is not None]
        prompt = openai.joined_prompt(parts, 2)[0] if parts else None
        table = tokenizer.table()
        expected.append(make(request, records, table, model="tiny-qwen", created=0, prompt=prompt))
        before = "" if request.id == "2" else table.decode(request.prompt_token_ids)
        text = table.decode(want.token_ids(request.id))
        texts.append(f"== {request.id} ==\n{before}{text}\n")
    found = written(tmp_path / "o.jsonl")
    assert found == without_times(json.loads(json.dumps(expected)))
    assert len(found["c"]["speculation"]["prompt_logprobs"]) == len(requests[2].prompt_token_ids)
    assert out == "".join(texts)  # what was shown is what was written


@pytest.mark.slow
def test_two_devices_and_a_draft_model_change_no_token(tmp_path, monkeypatch):
    """The vocabulary does not divide, and the drafts of the model itself are all accepted."""
    config = dataclasses.replace(CONFIG, vocab_size=301)
    directory = tiny_checkpoint.write(tmp_path / "odd", config)
    devices = "--xla_force_host_platform_device_count=2"
    monkeypatch.setenv("XLA_FLAGS", f"{quick_compile.FLAGS} {devices}")
    run(
        "real", "--model", directory, "--draft-model", directory, "--tensor-parallel", 2,
        "--prompt", "import json, import", "--output", tmp_path / "o.jsonl", "--logprobs", 301,
        "--max-tokens", 17, "--slots", 2, "--max-length", 64, "--ignore-eos", "--quiet",
    )  # fmt: skip
    (record,) = written(tmp_path / "o.jsonl").values()
    found = record["speculation"]
    request = decoding.request("1", found["prompt_token_ids"], max_tokens=17, logprobs=0)
    loaded = hf_files.random_params(config), config
    want = decoding.run([request], "none", num_slots=2, model=loaded)
    assert found["token_ids"] == want.token_ids("1")
    rows = np.concatenate([part.logprobs for part in want.records["1"]])[:, 0]
    logprobs = record["choices"][0]["logprobs"]
    np.testing.assert_allclose(logprobs["token_logprobs"], rows, atol=1e-4, rtol=0)
    for name in ("num_drafts", "num_accepted"):
        assert sum(one[name] for one in found["by_step"]) == 12


@either_worker
def test_a_killed_run_goes_on(worker, model, tmp_path):
    def kill(process):
        wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= 2)
        process.send_signal(signal.SIGKILL)

    file, path, whole = tmp_path / "p.txt", tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    file.write_text("".join(f"prompt number {index}\n" for index in range(14)))
    options = ["--model", model, "--prompts", file, "--max-tokens", 60, "--slots", 2,
               "--temperature", 0.9, "--logprobs", 1, "--drafter", "ngram", "--quiet"]  # fmt: skip
    ended(start(worker, *options, "--output", path, hold=200), kill)
    before = b"".join(path.read_bytes().splitlines(keepends=True)[:-1])
    assert 1 <= before.count(b"\n") < 14  # it was killed in the middle
    with path.open("r+b") as out:  # and, as a write may be cut, in the middle of its last line
        out.truncate(len(before) + 100)
    _, error = run(worker, *options, "--output", path)
    assert "cut off a half-written record of 100 bytes" in error
    assert f"in the output already: {before.count(bytes([10]))} of 14 requests" in error
    assert path.read_bytes().startswith(before)
    run(worker, *options, "--output", whole)
    assert written(path) == written(whole)
    said = "in the output already: 14 of 14 requests\n"
    assert run(worker, *options, "--output", path) == ("", said)


@either_worker
@pytest.mark.parametrize(
    ("end", "kept"), [("interrupt", True), ("lost worker", True), ("lost worker", False)]
)
def test_a_run_that_ends_early_says_how_to_go_on(worker, end, kept, model, tmp_path):
    def stop(process):
        assert process.stdout.read(12).startswith("== 1 ==")  # texts have begun
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            (child,) = children_of(process.pid)
            os.kill(child, signal.SIGKILL)

    (tmp_path / "p.txt").write_text("a\n" * 50)  # enough to do, however late it is stopped
    options = ["--model", model, "--prompts", tmp_path / "p.txt", "--max-tokens", 400,
               "--slots", 1, *(["--output", tmp_path / "o.jsonl"] if kept else ())]  # fmt: skip
    process = start(worker, *options, hold=10)
    error = ended(process, stop)
    assert process.returncode == (130 if end == "interrupt" else 1)
    assert re.search(
        r"ended before that: \d+ of 50 requests, kept in .*o.jsonl: run the same command again for"
        if kept
        else "with --output they are kept, and the same command runs the others",
        error,
    )
    assert end == "interrupt" or re.search(r"(?s)was killed by signal 9.*memory runs out", error)
    assert not re.search(r"\bring\b|Engine", error)
    assert not [file for file in find_ring_files() if file.creator.pid == process.pid]


@either_worker
@pytest.mark.parametrize("full", ["the output", "standard output"])
def test_what_cannot_be_written_is_named_with_what_was_kept(worker, full, model, tmp_path):
    (tmp_path / "p.txt").write_text("a\n")
    output = "/dev/full" if full == "the output" else tmp_path / "o.jsonl"
    options = ["--model", model, "--prompts", tmp_path / "p.txt", "--max-tokens", 2]
    with open("/dev/full" if full == "standard output" else os.devnull, "w") as shown:
        process = start(worker, *options, "--output", output, stdout=shown)
        error = ended(process, lambda _: None)
    assert process.returncode in (2, 120)  # 120: Python cannot close its standard output
    name, kept = (output, 0) if full == "the output" else (full, "[01]")
    assert f"No space left on device: '{name}'" in error
    assert re.search(rf"ended before that: {kept} of 1 request, kept in {output}: run", error)
    assert "Traceback" not in error

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
import time

import jax
import numpy as np
import pytest

from ipc.doctor import find_ring_files
from tests.support import decoding, hf_files, quick_compile, tiny_checkpoint
from tests.support.paths import ROOT
from tests.support.processes import children_of
from tests.support.scripted_process import start_command
from tests.support.tiny_checkpoint import CONFIG, make_tokenizer


def start(worker, *options, hold=-1, **pipes):
    """Start the command over "real" or "scripted" workers; `hold` is for scripted ones."""
    if worker == "scripted":
        return start_command("generate", *options, hold=hold, **pipes)
    command = [sys.executable, "-m", "jax_specdec.cli", "generate", *map(str, options)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def run(worker, *options):
    """Run the command to its end; returns its standard output and standard error."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(worker, *options, **pipes) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return out, err


either_worker = pytest.mark.parametrize(
    "worker", ["scripted", pytest.param("real", marks=pytest.mark.slow)]
)


def without_times(path):
    """The records of a file by id, without times and without the numbers of steps."""
    records = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record["id"] not in records
        records[record["id"]] = record
        del record["created"]
        for step in record["speculation"]["by_step"]:
            del step["step"]
    return records


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
    records = {
        one["id"]: one for one in map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    }
    tokenizer = make_tokenizer()
    ids = [tokenizer.encode(lines[0]["prompt"]).ids, [2, *tokenizer.encode("Hi").ids[1:], 3],
           tokenizer.encode("no logprobs").ids]  # fmt: skip
    requests = [
        decoding.request(name, prompt, max_tokens=tokens, logprobs=k, prompt_logprobs=prompt_k)
        for name, prompt, tokens, k, prompt_k in zip(
            "a2c", ids, (16, 16, 4), (3, 2, None), (None, None, 2), strict=True
        )
    ]
    params = hf_files.random_params(CONFIG)
    want = decoding.run(requests, "ngram", num_slots=3, model=(params, CONFIG), chunk=64)
    for name, prompt in zip("a2c", ids, strict=True):
        found = records[name]["speculation"]
        assert found["prompt_token_ids"] == prompt
        assert found["token_ids"] == want.token_ids(name)
        assert records[name]["model"] == "tiny-qwen"
    logprobs = [float(x) for part in want.records["a"] for x in part.logprobs[:, 0]]
    assert records["a"]["choices"][0]["logprobs"]["token_logprobs"] == logprobs
    assert records["2"]["object"] == "chat.completion"
    content = records["2"]["choices"][0]["logprobs"]["content"]
    logprobs = [float(x) for part in want.records["2"] for x in part.logprobs[:, 0]]
    assert [token["logprob"] for token in content] == logprobs
    assert records["c"]["choices"][0]["logprobs"] is None
    rows = [one.prompt for one in want.records["c"] if one.prompt is not None]
    first, *entries = records["c"]["speculation"]["prompt_logprobs"]
    assert first is None
    assert "prompt_logprobs" not in records["a"]["speculation"]
    assert [entry["logprob"] for entry in entries] == [
        float(x) for part in rows for x in part.logprobs[:, 0]
    ]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * (len(ids[2]) - 1)
    # What was shown is what was written.
    shown = "".join(
        f"== {name} ==\n{'' if name == '2' else line.get('prompt')}{text}\n"
        for name, line, text in (
            ("a", lines[0], records["a"]["choices"][0]["text"]),
            ("2", lines[1], records["2"]["choices"][0]["message"]["content"]),
            ("c", lines[2], records["c"]["choices"][0]["text"]),
        )
    )
    assert out == shown


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
    (record,) = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    found = record["speculation"]
    request = decoding.request("1", found["prompt_token_ids"], max_tokens=17, logprobs=0)
    loaded = hf_files.random_params(config), config
    want = decoding.run([request], "none", num_slots=2, model=loaded)
    assert found["token_ids"] == want.token_ids("1")
    rows = np.concatenate([part.logprobs for part in want.records["1"]])[:, 0]
    logprobs = record["choices"][0]["logprobs"]
    np.testing.assert_allclose(logprobs["token_logprobs"], rows, atol=1e-4, rtol=0)
    steps = found["by_step"]
    assert sum(one["num_drafts"] for one in steps) == 12
    assert sum(one["num_accepted"] for one in steps) == 12


@either_worker
def test_a_killed_run_goes_on(worker, model, tmp_path):
    file, path, whole = tmp_path / "p.txt", tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    file.write_text("".join(f"prompt number {index}\n" for index in range(14)))
    options = ["--model", model, "--prompts", file, "--max-tokens", 60, "--slots", 2,
               "--temperature", 0.9, "--logprobs", 1, "--drafter", "ngram", "--quiet"]  # fmt: skip
    process = start(worker, *options, "--output", path, hold=200, stderr=subprocess.DEVNULL)
    try:
        while not (path.exists() and path.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    before = b"".join(path.read_bytes().splitlines(keepends=True)[:-1])
    assert 1 <= before.count(b"\n") < 14  # it was killed in the middle
    with path.open("r+b") as out:  # and, as a write may be cut, in the middle of its last line
        out.truncate(len(before) + 100)
    _, error = run(worker, *options, "--output", path)
    assert "cut off a half-written record of 100 bytes" in error
    assert f"in the output already: {before.count(bytes([10]))} of 14 requests" in error
    assert path.read_bytes().startswith(before)
    run(worker, *options, "--output", whole)
    assert without_times(path) == without_times(whole)
    assert run(worker, *options, "--output", path) == (
        "", "in the output already: 14 of 14 requests\n",
    )  # fmt: skip


@either_worker
@pytest.mark.parametrize(
    ("end", "kept"), [("interrupt", True), ("lost worker", True), ("lost worker", False)]
)
def test_a_run_that_ends_early_says_how_to_go_on(worker, end, kept, model, tmp_path):
    (tmp_path / "p.txt").write_text("a\n" * 50)  # enough to do, however late it is stopped
    process = start(
        worker, "--model", model, "--prompts", tmp_path / "p.txt", "--max-tokens", 400,
        "--slots", 1, *(["--output", tmp_path / "o.jsonl"] if kept else ()),
        hold=10, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout.read(12).startswith("== 1 ==")  # texts have begun
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            (child,) = children_of(process.pid)
            os.kill(child, signal.SIGKILL)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (130 if end == "interrupt" else 1)
    if kept:
        assert re.search(r"ended before that: \d+ of 50 requests, kept in .*o.jsonl: run", error)
        assert "run the same command again for the others" in error
    else:
        assert "with --output they are kept, and the same command runs the others" in error
    if end == "lost worker":
        assert "was killed by signal 9" in error
        assert "memory runs out" in error
    assert not re.search(r"\bring\b|Engine", error)
    assert not [file for file in find_ring_files() if file.creator.pid == process.pid]


@either_worker
@pytest.mark.parametrize("full", ["the output", "standard output"])
def test_what_cannot_be_written_is_named_with_what_was_kept(worker, full, model, tmp_path):
    (tmp_path / "p.txt").write_text("a\n")
    output = "/dev/full" if full == "the output" else tmp_path / "o.jsonl"
    with open("/dev/full" if full == "standard output" else os.devnull, "w") as shown:
        process = start(
            worker, "--model", model, "--prompts", tmp_path / "p.txt", "--max-tokens", 2,
            "--output", output, stdout=shown, stderr=subprocess.PIPE,
        )  # fmt: skip
        _, error = process.communicate(timeout=250)
    assert process.returncode in (2, 120)  # 120: Python cannot close its standard output
    name, kept = (output, 0) if full == "the output" else (full, "[01]")
    assert f"No space left on device: '{name}'" in error
    assert re.search(rf"ended before that: {kept} of 1 request, kept in {output}: run", error)
    assert "Traceback" not in error

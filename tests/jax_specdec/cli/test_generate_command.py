"""`jax-specdec generate`, as a user runs it: a checkpoint, prompts, texts and records.

The loop's values come from one run with a real worker. Files, signals and the ends of processes are
tested over scripted workers, and under the marker `slow` over real ones.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ipc.doctor import find_ring_files
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.cli import generate_command, main
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerFailed, WorkerProcess
from tests.support import decoding, hf_files
from tests.support.paths import ROOT
from tests.support.scripted_process import start_command

VOCAB = 300
CONFIG = ModelConfig.tiny(VOCAB, qkv_bias=True, tie_embeddings=False, num_mtp_layers=0)
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|model|>"


def make_tokenizer():
    """Trained on this file; special ids 0 to 3."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,  # as usual, the model has ids that the tokenizer has not
        special_tokens=["<s>", "</s>", "<|user|>", "<|model|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([__file__], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf") / "tiny-qwen"
    hf_files.write(directory, CONFIG, shards=2, fields={"eos_token_id": 1})
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return directory


def start(worker, *options, hold=-1, **pipes):
    """Start the command over "real" or "scripted" workers; only the latter can be held."""
    if worker == "scripted":
        return start_command("generate", *options, hold=hold, **pipes)
    command = [sys.executable, "-m", "jax_specdec.cli", "generate", *map(str, options)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def run(worker, *options):
    """Standard output and standard error of a run that succeeds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(worker, *options, **pipes) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return out, err


either_worker = pytest.mark.parametrize(
    "worker",
    [
        pytest.param("scripted", marks=pytest.mark.fast),
        pytest.param("real", marks=pytest.mark.slow),
    ],
)


def without_times(path):
    """The records of a file by id, without times and numbers of steps."""
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


def test_records_are_those_of_the_loop(model, tmp_path, cheap_compilation):
    """Another process, files and a tokenizer between: the same ids and logprobs, bit for bit."""
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
            children = f"/proc/{process.pid}/task/{process.pid}/children"
            with open(children) as file:
                (child,) = map(int, file.read().split())
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
        assert "with --output FILE they are kept, and the same command runs the others" in error
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


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "mtp"], "has no MTP head in DeepSeek's layout (model.layers.2.eh_proj"),
        (["--max-tokens", "600"], "are more than the 512 positions that the model was made for"),
        (["--max-length", "600"], "600 tokens in a slot are more than the 512 positions"),
        (["--max-length", "20"], "exceed the 20 tokens of a slot"),
        (["--logprobs", "129"], "logprobs = 129 must be from 0 to 128"),
        (["--slots", "0"], "num_slots = 0 must be from 1"),
        (["--drafts", "65"], "num_drafts = 65 must be from 0 to 64"),
        (["--output", "/"], "Is a directory"),
        (["--corpus", __file__], "--corpus is for --drafter suffix; ngram searches no text"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_runs(options, message, model, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("a\n")
    arguments = ["generate", "--model", str(model), "--prompts", str(tmp_path / "p.txt")]
    assert main.main([*arguments, *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert not shown.out


@pytest.mark.fast
def test_lines_that_are_not_json_are_named(model, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text("bare text\n")
    arguments = ["generate", "--model", str(model), "--prompts", str(tmp_path / "p.jsonl")]
    assert main.main(arguments) == 2
    said = capsys.readouterr().err
    assert re.search(r"line 1: .*column 1.* such as \{\"prompt\": .* not end in \.jsonl", said), (
        said
    )


def test_a_model_that_does_not_fit_is_reported_in_the_workers_words(model):
    code = (
        "import sys\n"
        "from jax_specdec.device.model import memory\n"
        "from jax_specdec.device.worker import worker_process\n"
        "memory.available_bytes = lambda: 2**20\n"
        "sys.exit(worker_process.main())"
    )
    start = functools.partial(WorkerProcess, program=(sys.executable, "-c", code))
    config = EngineConfig(
        vocab_size=VOCAB, weights=str(model), dtype="float32", drafter="ngram", max_length=20_000
    )
    request = decoding.request("a", [5], max_tokens=3)
    with (
        Engine(config, start_worker=start) as engine,
        pytest.raises(
            WorkerFailed, match=r"(?s)status 1.*GiB in float32, with its caches; ava"
        ) as e,
    ):
        list(engine.generate([request]))
    assert "Traceback" not in str(e.value)


@pytest.mark.fast
def test_the_drafting_options_reach_the_engine(model, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("a\n")
    seen = []

    def start(config):
        seen.append(config)
        raise ValueError("enough is known")

    monkeypatch.setattr("jax_specdec.engine.engine.Engine", start)
    arguments = ["generate", "--model", str(model), "--prompts", str(tmp_path / "p.txt")]
    assert main.main(arguments) == 2
    assert main.main([*arguments, "--adaptive-drafts", "--drafter", "suffix", "--drafts", "5"]) == 2
    assert [(one.drafter, one.num_drafts, one.adaptive) for one in seen] == [
        ("ngram", 3, False),
        ("suffix", 5, True),
    ]


@pytest.mark.fast
def test_another_question_under_the_same_id_is_refused(model, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("a\n")
    output = tmp_path / "o.jsonl"
    output.write_text('{"id": "1", "request_digest": "0"}\n')
    arguments = ["generate", "--model", str(model), "--prompts", str(tmp_path / "p.txt")]
    assert main.main([*arguments, "--output", str(output)]) == 2
    assert "has a record of id '1' that was made from another prompt" in capsys.readouterr().err
    assert output.read_text() == '{"id": "1", "request_digest": "0"}\n'


@pytest.mark.fast
def test_a_terminal_gets_nothing_that_moves_its_cursor(monkeypatch, capsys):
    shown = generate_command.shower()
    shown("text", "a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\x1b[2J\tb\n"  # a file gets what the model wrote
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    generate_command.shower()("text", "a\x1b[2J [bold]b\x9b1m\n")
    assert capsys.readouterr().out.replace("\x1b[0m", "") == "a·[2J [bold]b·1m\n"

"""`jax-specdec generate`: what its options do, and what it refuses before anything runs."""

import argparse
import functools
import io
import json
import re
import sys
from types import SimpleNamespace

import pytest

from jax_specdec.cli import generate_command, main, standard_output
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerFailed, WorkerProcess
from tests.support import decoding, tiny_checkpoint
from tests.support.tiny_checkpoint import VOCAB


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "mtp"], "has no MTP head in DeepSeek's layout (model.layers.2.eh_proj"),
        (["--max-tokens", "600"], "are more than the 512 positions that the model was made for"),
        (["--max-length", "600"], "600 tokens in a slot are more than the 512 positions"),
        (["--max-length", "20"], "exceed the 20 tokens of a slot"),
        (["--logprobs", "513"], "logprobs = 513 must be from 0 to 512"),
        (["--output", "/"], "Is a directory"),
        (["--corpus", __file__], "--corpus is for --drafter suffix; ngram searches no text"),
        (["--drafter", "model"], "--drafter model needs --draft-model DIR"),
        (["--draft-model", "x", "--drafter", "ngram"], "--draft-model is for --drafter model; ng"),
        (["--draft-model", "nowhere"], "there is no directory nowhere"),
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
        "from jax_specdec import child\n"
        "memory.available_bytes = lambda *_: 2**20\n"
        "sys.exit(child.main(['jax_specdec.device.worker.worker_process']))"
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
def test_drafting_options_and_devices_reach_the_engine(model, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("a\n")
    seen = []

    def start(config):
        seen.append(config)
        raise ValueError("enough is known")

    monkeypatch.setattr("jax_specdec.engine.engine.Engine", start)
    arguments = ["generate", "--model", str(model), "--prompts", str(tmp_path / "p.txt")]
    assert main.main(arguments) == 2
    assert main.main([*arguments, "--adaptive-drafts", "--drafter", "suffix", "--drafts", "5"]) == 2
    assert main.main([*arguments, "--tensor-parallel", "2"]) == 2
    assert [(one.drafter, one.num_drafts, one.adaptive, one.tensor_parallel) for one in seen] == [
        ("ngram", 3, False, 1),
        ("suffix", 5, True, 1),
        ("ngram", 3, False, 2),
    ]


@pytest.mark.fast
def test_a_draft_model_must_have_the_same_tokenizer_and_enough_positions(
    model, tmp_path, monkeypatch, capsys
):
    small = tiny_checkpoint.write(tmp_path / "small")
    seen = []

    def start(config):
        seen.append(config)
        raise ValueError("enough is known")

    monkeypatch.setattr("jax_specdec.engine.engine.Engine", start)
    prompt = ["--prompt", "a", "--draft-model", str(small)]
    arguments = ["generate", "--model", str(model), *prompt]
    assert main.main(arguments) == 2
    assert main.main([*arguments, "--drafts", "0"]) == 2
    assert [(one.drafter, one.num_drafts, one.draft_model) for one in seen] == [
        ("model", 3, str(small)),
        ("none", 0, ""),
    ]
    capsys.readouterr()
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    assert main.main(arguments) == 2
    assert "more than the 100 positions that" in capsys.readouterr().err
    (small / "config.json").write_text(json.dumps(config))
    rules = json.loads((small / "tokenizer.json").read_text())
    rules["added_tokens"][2]["content"] = "<|person|>"
    vocabulary = rules["model"]["vocab"]
    vocabulary["<|person|>"] = vocabulary.pop("<|user|>")
    (small / "tokenizer.json").write_text(json.dumps(rules))
    assert main.main(arguments) == 2
    said = capsys.readouterr().err
    assert "has another tokenizer than" in said
    assert "id 2 is '<|person|>' there and '<|user|>' here" in said


@pytest.mark.fast
def test_another_request_under_the_same_id_is_refused(model, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("a\n")
    output = tmp_path / "o.jsonl"
    output.write_text('{"id": "1", "request_digest": "0"}\n')
    arguments = ["generate", "--model", str(model), "--prompts", str(tmp_path / "p.txt")]
    assert main.main([*arguments, "--output", str(output)]) == 2
    assert "has a record of id '1' that was made from another prompt" in capsys.readouterr().err
    assert output.read_text() == '{"id": "1", "request_digest": "0"}\n'


@pytest.mark.fast
def test_kept_sets_are_a_wish_of_the_command_line():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    generate_command.add(parser.add_subparsers())
    model = SimpleNamespace(hf=SimpleNamespace(eos_token_ids=(2,)))
    for more, wanted in (([], False), (["--kept-token-ids"], True)):
        options = parser.parse_args(["generate", "--model", "m", "--prompts", "p", *more])
        assert generate_command._defaults(options, model).kept_token_ids is wanted


@pytest.mark.fast
def test_a_terminal_gets_nothing_that_moves_its_cursor(monkeypatch, capsys):
    show, style = standard_output.shower(quiet=False)
    show("text", "a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\x1b[2J\tb\n"  # a file gets what the model wrote
    assert style is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show, style = standard_output.shower(quiet=False)
    show("text", "a\x1b[2J [bold]b\x9b1m\n")
    assert capsys.readouterr().out.replace("\x1b[0m", "") == "a·[2J [bold]b·1m\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    show, style = standard_output.shower(quiet=False)
    show(style(-2.0, True), "two")
    show(style(-0.01, False), "one")
    drawn = capsys.readouterr().out
    assert re.fullmatch(r"\x1b\[4;[\d;]+mtwo\x1b\[0m\x1b\[[\d;]+mone\x1b\[0m", drawn)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "given", "ids"),
    [
        (["--prompt", "ab"], b"", ["1"]),
        (["--prompt", "ab", "--prompt", "-"], b"a\n\nb\n", ["1", "2"]),
        (["--prompts", "-"], b"ab\n\nb\n", ["1", "3"]),
    ],
)
def test_prompts_from_the_command_line_and_from_standard_input(
    options, given, ids, model, monkeypatch, capsys
):
    seen = []

    def start(self, requests):
        seen.extend(requests)
        raise ValueError("enough is known")

    monkeypatch.setattr("jax_specdec.engine.engine.Engine.__init__", lambda self, config: None)
    monkeypatch.setattr("jax_specdec.engine.engine.Engine.__enter__", lambda self: self)
    monkeypatch.setattr("jax_specdec.engine.engine.Engine.__exit__", lambda *_: None)
    monkeypatch.setattr("jax_specdec.engine.engine.Engine.generate", start)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert main.main(["generate", "--model", str(model), *options]) == 2
    assert "enough is known" in capsys.readouterr().err
    tokenizer = tiny_checkpoint.make_tokenizer()
    texts = {"1": "ab", "2": "a\n\nb", "3": "b"}
    assert [one.id for one in seen] == ids
    assert [list(one.prompt_token_ids) for one in seen] == [
        tokenizer.encode(texts[id]).ids for id in ids
    ]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "one of the arguments --prompt --prompts is required"),
        (["--prompt", "a", "--prompts", "f"], "not allowed with argument --prompt"),
    ],
)
def test_prompts_come_from_one_place(options, said, capsys):
    with pytest.raises(SystemExit):
        main.main(["generate", "--model", "m", *options])
    assert said in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (b"a\xff", ["--prompts", "-"], "standard input is not UTF-8 text: byte 0xff at offset 1"),
        (b"\n", ["--prompts", "-"], "standard input holds no prompts"),
        (b"a", ["--prompt", "-", "--prompt", "-"], "standard input can be read once"),
    ],
)
def test_standard_input_that_is_no_prompt_is_named(
    given, options, said, model, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert main.main(["generate", "--model", str(model), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` fetches it"),
        ("model.gguf", "model.gguf is a GGUF file, which is not read"),
        ("/nowhere/at/all", "there is no directory /nowhere/at/all: name a directory in Hugging"),
        (__file__, "test_generate_command.py is a file: name a directory"),
        (".", ". has no config.json: name a directory in Hugging Face layout"),
    ],
)
def test_a_model_that_is_something_else_is_answered_with_the_way_out(
    name, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main.main(["generate", "--model", name, "--prompt", "a"]) == 2
    assert said in capsys.readouterr().err

"""What no command does: each refusal is one message with status 2, before anything starts."""

import io
import sys

import pytest

from jax_specdec.cli.main import COMMANDS
from tests.support.command_status import status_of
from tests.support.hostile_responses import line
from tests.support.openai_records import snowman

GENERATE = "generate --model {model} --prompts {folder}/p.txt"
SERVE = "serve --model {model}"
FILES = {
    "p.txt": b"a\n",
    "bare.jsonl": b"bare text\n",
    "deep.jsonl": b"[" * 9999,
    "o.jsonl": b'{"id": "1", "request_digest": "0"}\n',
    "run.html": b"{}",
    "run.jsonl": b"{}",
    "latin.jsonl": b"\xff\xfe",
    **dict.fromkeys(["good.jsonl", "good.html"], line(snowman()).encode()),
}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        # Options of one value.
        ("", "usage: jax-specdec"),
        ("demo --drafter x", "usage: jax-specdec"),
        ("demo --drafts 65", "argument --drafts: 65 is above 64"),
        ("demo --temperature -1", "temperature = -1.0"),
        ("demo --k 5 --no-logprobs", "--no-logprobs: not allowed with argument --k"),
        ("serve --restart-window 0.5", "restart_window = 0.5 must be from 1"),
        ("serve --timeout inf", "--timeout: 'inf' is not a number of seconds above 0"),
        ("serve --prepare logprobs=x", "logprobs = 'x' must be a whole number"),
        ("serve --prepare colour=1", "'colour' is not known"),
        ("serve --prepare off", "options such as --no-penalties"),
        ("serve --max-logprobs 513", "--max-logprobs: 513 is above 512"),
        ("serve --max-changed-ids none", "--max-changed-ids: invalid integer value: 'none'"),
        # Those that are not known, or that stand for two.
        ("demo --draft 3", "unrecognized arguments: --draft 3; did you mean --drafts?"),
        *((f"{name} --hel", "--hel") for name in COMMANDS),  # one that is abbreviated
        ("view f --titel=x", "--titel=x; did you mean --title?"),
        ("generate --model m --promp=a", "--promp is not known; did you mean --prompt?"),
        # Those that need another one, or that another one makes meaningless.
        ("demo --draft-model x", "--draft-model needs --model: the tiny model has no smaller one"),
        (f"{GENERATE} --drafter model", "--drafter model needs --draft-model DIR"),
        (f"{GENERATE} --draft-model x --drafter ngram", "--draft-model is for --drafter model; ng"),
        (f"{GENERATE} --drafter mtp", "has no MTP head in DeepSeek's layout (model.layers.2.eh_pr"),
        (f"{GENERATE} --replicas 2", "are for --ray: add it"),
        (f"{GENERATE} --restart-window 9", "--restart-window is for --max-restarts: add it"),
        (f"{SERVE} --replicas 2", "are for --ray: add it"),
        (f"{SERVE} --ray --scaling upscale_delay_s=1", "--scaling is for --max-replicas: add it"),
        (f"{SERVE} --ray --access-log", "--access-log is not for --ray"),
        (f"{GENERATE} --replica-devices GPU", "'GPU' is not NAME=N, such as GPU=4"),
        ("serve --vocab-size 9", "--vocab-size is for --own-model"),
        ("serve --own-model m:f", "needs --tokenizer DIR"),
        ("generate --model m", "one of the arguments --prompt --prompts is required"),
        # Lengths.
        (f"{GENERATE} --max-tokens 600", "are more than the 512 positions that the model was made"),
        (f"{SERVE} --max-length 600", "--max-length 600 is more than the 512 positions"),
        # Names under which others reach the server.
        ("serve --host 0.0.0.0", "--host 0.0.0.0 is reached by others"),
        ("serve --host ::", "(--allowed-host '*')"),
        ("serve --host gpu.example", "(--allowed-host NAME)"),
        # Files.
        *((f"{command} --compilation-cache {folder}", f"--compilation-cache {folder} cannot be")
          for command in ("serve", "demo", SERVE, GENERATE)
          for folder in ("p.txt", "p.txt/x", "/proc/x", "/dev/null")),
        ("demo --prompts /nowhere/prompts.txt", "/nowhere/prompts.txt"),
        ("demo --json /nowhere/out.jsonl", "/nowhere/out.jsonl"),
        (f"{GENERATE} --draft-model nowhere", "there is no directory nowhere"),
        (f"{GENERATE} --output /", "Is a directory"),
        (f"{GENERATE} --output o.jsonl", "has a record of id '1' that was made from another pro"),
        ("generate --model {model} --prompts bare.jsonl", "column 1): it must be a JSON object s"),
        ("generate --model {model} --prompts deep.jsonl", "line 1: the line is not read"),
        ("view run.html", "the page would replace"),
        ("view good.jsonl good.html", "the page would replace good.html"),
        ("view run.jsonl", "run.jsonl: line 1 is not a completion"),
        ("view latin.jsonl", "'utf-8' codec can't decode"),
        # Models that are something else.
        ("generate --model Qwen/Qwen3-0.6B --prompt a", "`hf download Qwen/Qwen3-0.6B --local-dir"),
        ("generate --model model.gguf --prompt a", "there is no file model.gguf"),
        (f"generate --model {__file__} --prompt a", "test_refusals.py is a file: name a directory"),
        ("generate --model . --prompt a", ". has no config.json: name a directory in Hugging Fac"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_way_out(
    command, said, model, fake, tmp_path, monkeypatch, capsys
):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert status_of(*command.format(model=model, folder=tmp_path).split()) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err
    assert (out, fake.configs) == ("", [])
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (b"a\xff", "--prompts -", "standard input is not UTF-8 text: byte 0xff at offset 1"),
        (b"\n", "--prompts -", "standard input holds no prompts"),
        (b"a", "--prompt - --prompt -", "standard input can be read once"),
    ],
)
def test_standard_input_that_is_no_prompt_is_named(
    given, options, said, model, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert status_of("generate", "--model", model, *options.split()) == 2
    assert said in capsys.readouterr().err

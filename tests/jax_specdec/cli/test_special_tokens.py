"""Special tokens in messages are text in every command, unless its option says otherwise."""

import json
from contextlib import nullcontext

import pytest

from jax_specdec.cli import generate_command, main, serve_command

ATTACK = [{"role": "user", "content": "a</s>b"}]
OPTION = "--special-tokens-in-messages"
TAKEN = [([], 0), ([OPTION], 1)]
END = 1  # the id of </s>


@pytest.mark.parametrize(("more", "taken"), TAKEN)
def test_serve_reads_them_as_its_option_says(more, taken, model):
    _, options = main.parsed_options(["serve", "--model", str(model), *more])
    make, *_ = serve_command.model_of(options)
    assert make().encoder.encode_chat(ATTACK).count(END) == taken


class Read(Exception):
    """What a command has read, before it runs anything."""


@pytest.mark.parametrize(("more", "taken"), TAKEN)
def test_generate_reads_them_as_its_option_says(more, taken, model, tmp_path, monkeypatch):
    def stop(options, model, prompts):
        raise Read(prompts)

    monkeypatch.setattr(generate_command, "engine_config", stop)
    monkeypatch.setattr(generate_command, "worker_ahead", nullcontext)
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"messages": ATTACK}))
    _, options = main.parsed_options(
        ["generate", "--model", str(model), "--prompts", str(lines), *more]
    )
    with pytest.raises(Read) as raised:
        generate_command.run(options)
    (prompt,) = raised.value.args[0]
    assert prompt.request.prompt_token_ids.count(END) == taken

"""`jax-specdec generate`: what its options do, and its texts in the order of their prompts."""

import io
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from jax_specdec.cli import generate, standard_output
from jax_specdec.cli.prompts import Prompt
from jax_specdec.declaration import Serves
from jax_specdec.engine.config import EngineConfig
from jax_specdec.export.delivery import Delivery
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.text.detokenize import TokenTable
from tests.support import tiny_checkpoint
from tests.support.command_status import status_of
from tests.support.scripted_process import scripted_engine


def test_options_reach_the_engine(model, fake, tmp_path):
    """Who drafts, devices, how many tokens a slot must hold, and what each request asks for."""
    small = tiny_checkpoint.write(tmp_path / "small")
    usual = {
        "drafter": "ngram", "num_drafts": 3, "draft_width": "adaptive", "tensor_parallel": 1,
        "draft_model": "", "batch_invariant": False, "on_worker_loss": "stop", "max_length": 256,
        "max_restarts": EngineConfig.max_restarts,
    }  # fmt: skip
    for options, changes, params in (
        ("", {}, (False, (1,))),
        ("--draft-width fixed --drafter suffix --drafts 5 --kept-token-ids",
         {"draft_width": "fixed", "drafter": "suffix", "num_drafts": 5}, (True, (1,))),
        ("--tensor-parallel 2 --ignore-eos", {"tensor_parallel": 2}, (False, ())),
        (f"--draft-model {small}", {"drafter": "model", "draft_model": str(small)}, (False, (1,))),
        (f"--draft-model {small} --drafts 0", {"drafter": "none", "num_drafts": 0}, (False, (1,))),
        ("--max-restarts 3 --batch-invariant",
         {"on_worker_loss": "restart", "max_restarts": 3, "batch_invariant": True}, (False, (1,))),
        *((f"--max-tokens {most}", {"max_length": holds}, (False, (1,)))
          for most, holds in ((4, 128), (200, 256), (500, 512))),
        ("--max-length 20", {"max_length": 20}, (False, (1,))),
    ):  # fmt: skip
        assert status_of("generate", "--model", model, "--prompt", "a", *options.split()) == 0
        config, asked = fake.configs[-1], fake.requests[-1].params
        assert {name: getattr(config, name) for name in usual} == usual | changes
        assert (asked.kept_token_ids, asked.stop_token_ids) == params


def test_workers_serve_what_the_prompts_ask_for(model, fake):
    more = ["--temperature", "0.5", "--logprobs", "3", "--seed", "7"]
    assert status_of("generate", "--model", model, "--prompt", "a", "--prompt", "b", *more) == 0
    asked = SamplingParams(temperature=0.5, logprobs=3)
    assert fake.configs[0].serves == Serves.of([asked]) != Serves()
    assert fake.configs[0].starts_soon


def test_a_draft_model_needs_tokenizer_and_positions(model, fake, tmp_path, capsys):
    def refused():
        assert status_of("generate", "--model", model, "--prompt", "a", "--draft-model", small) == 2
        return capsys.readouterr().err

    small = tiny_checkpoint.write(tmp_path / "small")
    file = small / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": 100}))
    assert "more than the 100 positions that" in refused()
    file.write_text(json.dumps(config))
    rules = small / "tokenizer.json"
    rules.write_text(rules.read_text().replace("<|user|>", "<|person|>"))
    said = f"{small} has another tokenizer than {model}: id 2 is '<|person|>' there and '<|user|>'"
    assert said in refused()


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


@pytest.mark.parametrize(
    ("options", "given", "texts"),
    [
        ("--prompt ab", b"", {"1": "ab"}),
        ("--prompt ab --prompt -", b"a\n\nb\n", {"1": "ab", "2": "a\n\nb"}),
        ("--prompts -", b"ab\n\nb\n", {"1": "ab", "3": "b"}),
    ],
)
def test_prompts_from_the_command_line_and_from_standard_input(
    options, given, texts, model, fake, monkeypatch
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert status_of("generate", "--model", model, *options.split()) == 0
    encode = Tokenizer.from_file(str(model / "tokenizer.json")).encode
    found = {one.id: list(one.prompt_token_ids) for one in fake.requests}
    assert found == {id: encode(text).ids for id, text in texts.items()}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--logprobs", 5], {}),
        (["--logprobs", 0], {}),
        (["--kept-token-ids"], {}),
        ([], {"logprobs": 2}),  # of one prompt
        ([], {"prompt_logprobs": 0}),
    ],
)
def test_records_come_where_no_terminal_is(options, line, model, use_engine, tmp_path, capsys):
    """In place of the texts, which lack what was asked for; the same as with --output."""
    use_engine(scripted_engine())
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    rows = {"prompt": "a"} | line, {"prompt": "b"}
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model", model, "--prompts", prompts, "--max-tokens", 4, *options]
    assert status_of("generate", *given) == 0
    shown, said = capsys.readouterr()
    records = [json.loads(row) for row in shown.splitlines()]
    assert status_of("generate", *given, "--output", out, "--quiet") == 0
    kept = [json.loads(row) for row in out.read_text().splitlines()]
    for record in records + kept:
        del record["created"]
    assert sorted(records, key=str) == sorted(kept, key=str)
    assert len(records) == 2
    assert "standard output is no terminal: records with the logprobs" in said


@pytest.mark.parametrize(
    ("options", "terminal"),
    [
        ([], False),
        (["--logprobs", 1, "--output"], False),
        (["--logprobs", 1, "--quiet"], False),
        (["--logprobs", 1], True),
    ],
)
def test_texts_stay_texts_where_nothing_is_lost(
    options, terminal, model, use_engine, tmp_path, capsys, monkeypatch
):
    use_engine(scripted_engine())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    more = [tmp_path / "o.jsonl"] if "--output" in options else []
    given = ["--model", model, "--prompt", "ab", "--max-tokens", 4, *options, *more]
    assert status_of("generate", *given) == 0
    shown, said = capsys.readouterr()
    assert ("ab" in shown) != ("--quiet" in options)
    assert "request_digest" not in shown
    assert "no terminal" not in said


@pytest.mark.fast
def test_a_stop_string_ends_a_text(model, use_engine, tmp_path, capsys):
    """It may begin and end inside tokens, and stand in the prompt."""
    use_engine(scripted_engine())

    def ask(*options, line=None):
        prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
        prompts.write_text(json.dumps({"prompt": "a"} | (line or {})) + "\n" * 2)
        out.unlink(missing_ok=True)
        given = ("--prompts", prompts, "--max-tokens", 40, "--logprobs", 1, "--output", out)
        assert status_of("generate", "--model", model, *given, *options) == 0
        (record,) = map(json.loads, out.read_text().splitlines())
        return record, record["choices"][0], capsys.readouterr().out

    whole, choice, _ = ask("--ignore-eos")
    text = choice["text"]
    stop = text[7:9]
    for options, line in ((["--stop", stop], {}), ([], {"stop": ["never", stop]})):
        record, cut, shown = ask("--ignore-eos", "--stop", "never", *options, line=line)
        assert cut["text"] == text[: text.index(stop)]
        assert cut["finish_reason"] == "stop"
        assert shown == "a" + cut["text"] + "\n"
        count = record["usage"]["completion_tokens"]
        assert 0 < count < whole["usage"]["completion_tokens"]
        for name, values in cut["logprobs"].items():
            assert values == choice["logprobs"][name][:count]
        for said in (whole["speculation"], record["speculation"]):
            by_step = said["by_step"]
            for total, each in (("drafts", "num_drafts"), ("accepted", "num_accepted")):
                assert said[total] == sum(step[each] for step in by_step)
            assert said["steps"] == len(by_step) > 1
            assert said["accepted"] > 0
        assert record["request_digest"] != whole["request_digest"]


# Texts in order --------------------------------------------------------------------------------

TABLE = TokenTable([bytes([byte]) for byte in range(256)])


def record(id, text, reason=None, **more):
    ids = np.frombuffer(text if isinstance(text, bytes) else text.encode(), np.uint8)
    return SimpleNamespace(request_id=id, token_ids=ids, finish_reason=reason, **more)


def shown(ids, *records, chat=False, style=None):
    """What is shown of the requests `ids` after these records."""
    found = []
    prompts = [Prompt(Request(id=id, prompt_token_ids=(65, 66)), chat) for id in ids]
    texts = generate.TextsInOrder(prompts, TABLE, lambda *one: found.append(one), style)
    assert not found  # before the first record, the worker loads or refuses
    deliveries = {id: Delivery(TABLE) for id in ids}
    for one in records:
        for part in deliveries[one.request_id].push(one):
            texts.add(part)
    return found


def test_one_text_grows_at_a_time_in_the_order_of_the_prompts():
    assert shown(
        "abc",
        record("b", "one "), record("a", "uno "), record("c", "eins", FinishReason.LENGTH),
        record("a", "due"), record("b", "two"), record("a", "", FinishReason.STOP_TOKEN),
        record("b", "!", FinishReason.LENGTH),
    ) == [
        ("title", "== a ==\n"), ("prompt", "AB"), ("text", "uno "), ("text", "due"), ("text", "\n"),
        ("title", "== b ==\n"), ("prompt", "AB"), ("text", "one "), ("text", "two"), ("text", "!"),
        ("text", "\n"),
        ("title", "== c ==\n"), ("prompt", "AB"), ("text", "eins"), ("text", "\n"),
    ]  # fmt: skip


def test_tokens_of_requests_with_logprobs_have_styles():
    """Tokens of one style are shown together, and a character has the style of its last byte."""
    logprobs = np.float32([[-0.5, -1], [-0.5, -1], [-0.5, -1], [-2, -1]])
    assert shown(
        "a",
        record("a", "abé", num_accepted=2, logprobs=logprobs),
        record("a", "c", FinishReason.LENGTH, logprobs=None),
        style=lambda logprob, accepted: f"{logprob:g} {accepted}",
    ) == [
        ("prompt", "AB"), ("-0.5 True", "ab"), ("-2 False", "é"), ("text", "c"), ("text", "\n"),
    ]  # fmt: skip


def test_half_characters_early_ends_and_conversations():
    half, rest = "é".encode()[:1], "é".encode()[1:]
    lost = record("a", "", FinishReason.WORKER_LOST)
    assert shown("a", record("a", half), record("a", rest + b"\xf0"), lost, chat=True) == [
        ("text", "é"), ("text", "\ufffd"), ("error", "[ended early: worker_lost]"), ("text", "\n"),
    ]  # fmt: skip


@pytest.mark.fast
def test_the_rate_is_of_decoding_alone(monkeypatch, capsys):
    clock = iter([10.0, 17.0, 19.0])
    monkeypatch.setattr(generate.time, "monotonic", lambda: next(clock))
    tally = generate.Tally(2)
    for tokens in (4, 0, 30):
        tally.count(tokens)
    tally.end("a", FinishReason.LENGTH)
    assert tally.conclude("; more") == 0
    said = "1 of 2 requests, 34 tokens: the first after 7.0 s, loading included, the others at 15.0"
    assert capsys.readouterr().err == f"{said} a second; more\n"
    later = iter([0.0, 1.0])
    monkeypatch.setattr(generate.time, "monotonic", lambda: next(later))
    tally = generate.Tally(1)
    tally.count(1)
    tally.conclude()
    assert capsys.readouterr().err == (
        "0 of 1 request, 1 token: the first after 1.0 s, loading included\n"
    )

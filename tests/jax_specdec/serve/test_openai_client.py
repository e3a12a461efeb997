"""The openai package against a live server: sync, async, streamed, both endpoints."""

import base64
import functools
import math
from types import SimpleNamespace

import numpy as np
import openai
import pytest

from jax_specdec.engine import FinishReason
from jax_specdec.text.detokenize import TextStream
from tests.support import http_server
from tests.support.http_server import EOS, MODEL, TABLE, VOCAB
from tests.support.requests import request
from tests.support.scripted_worker import continuation, logprob

PROMPT = "hello you"
IDS = MODEL.encoder.encode(PROMPT)
SCORES = [None, *(logprob(list(IDS[:n])) for n in range(1, len(IDS)))]
encode = MODEL.encoder.encode


def expected(ids=IDS, max_tokens=20, stop_ids=(EOS,)):
    """Ids, logprobs and text of an undisturbed run."""
    asked = request("r", ids, max_tokens=max_tokens, stop_token_ids=stop_ids)
    tokens, logprobs = continuation(asked)
    return tokens, logprobs, TABLE.decode(tokens)


def arrays(columns):
    """The columns of an answer."""
    return {
        name: np.frombuffer(base64.b64decode(x["data"]), x["dtype"]).reshape(x["shape"])
        for name, x in columns.items()
    }


def complete(client, **changes):
    asked = {"model": "scripted", "prompt": PROMPT, "max_tokens": 20, **changes}
    return client.completions.create(**asked)


def chat(client, **changes):
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"model": "scripted", "messages": messages, "max_tokens": 20, **changes}
    return client.chat.completions.create(**asked)


def joined(choices):
    """What the choices of a stream, or the only one of an answer, add up to."""
    rows = [one.logprobs for one in choices if one.logprobs]
    lists = ("tokens", "token_logprobs", "text_offset")
    return SimpleNamespace(
        text="".join(one.text for one in choices),
        token_ids=[id for one in choices for id in getattr(one, "token_ids", ())],
        finish=[one.finish_reason for one in choices if one.finish_reason],
        stop_reason=choices[-1].stop_reason,
        **{name: [x for one in rows for x in getattr(one, name)] for name in lists},
    )


def both_ways(client, **changes):
    """The same request whole and streamed."""
    yield joined(complete(client, **changes).choices)
    yield joined([chunk.choices[0] for chunk in complete(client, stream=True, **changes)])


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("scripted", "model")
    assert client.models.retrieve("scripted") == model
    with pytest.raises(openai.NotFoundError, match="'some/other' is not served here"):
        client.models.retrieve("some/other")


def test_a_completion_whole_and_streamed(client):
    tokens, logprobs, text = expected()
    first, second = both_ways(client, logprobs=2)
    assert first == second == SimpleNamespace(
        text=text, token_ids=[], finish=["stop" if tokens[-1] == EOS else "length"],
        stop_reason=None, token_logprobs=logprobs, text_offset=first.text_offset,
        tokens=[TABLE.completion_text[one] for one in tokens],
    )  # fmt: skip
    assert first.text_offset[0] == 0
    usage = complete(client).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(IDS), len(tokens))
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 3
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage) == ([], usage)


def test_a_chat_completion_whole_and_streamed(client):
    _, logprobs, text = expected()
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello "}]},
             {"role": "assistant", "content": "you"}]  # fmt: skip
    asked = {"messages": parts, "logprobs": True, "top_logprobs": 1}
    (choice,) = chat(client, **asked).choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert [entry.logprob for entry in choice.logprobs.content] == logprobs
    choices = [chunk.choices[0] for chunk in chat(client, **asked, stream=True)]
    assert [one.delta.role for one in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert "".join(one.delta.content for one in choices) == text
    assert [entry.logprob for one in choices for entry in one.logprobs.content] == logprobs
    assert choices[-1].finish_reason == choice.finish_reason


def test_without_max_tokens_a_chat_fills_its_slot(client):
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = chat(client, max_tokens=None, extra_body=extra)
    assert answer.usage.total_tokens == MODEL.max_length
    assert answer.choices[0].token_ids == expected(max_tokens=55, stop_ids=())[0]


def test_choices_are_numbered_prompt_by_prompt(client):
    prompts = ["one", "two"]
    texts = dict(enumerate(expected(encode(one))[2] for one in prompts for _ in range(2)))
    answer = complete(client, prompt=prompts, n=2)
    assert {choice.index: choice.text for choice in answer.choices} == texts
    assert answer.usage.prompt_tokens == 6
    by_index = dict.fromkeys(texts, "")
    for chunk in complete(client, prompt=[list(encode(p)) for p in prompts], n=2, stream=True):
        by_index[chunk.choices[0].index] += chunk.choices[0].text
    assert by_index == texts


def test_parameters_reach_the_worker(server, client):
    """As OpenAI and vLLM name them, on both endpoints; each choice has a seed of its own."""
    before = len(server.workers[0].commands)
    asked = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"3": 7, "0": -2.5}}
    asked |= {"extra_body": {"repetition_penalty": 1.25, "min_tokens": 2}, "max_tokens": 3}
    complete(client, **asked, n=3, seed=41, temperature=0.5)
    chat(client, **asked)
    complete(client, max_tokens=1)
    commands = server.workers[0].commands[before:]
    *sent, plain = [one.request.params for one in commands if hasattr(one, "request")]
    assert sorted(params.seed for params in sent[:-1]) == [41, 42, 43]
    for params in sent:
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1.0)
        assert (params.repetition_penalty, params.min_tokens) == (1.25, 2)
        assert params.logit_bias == ((3, 7.0), (0, -2.5))
        assert params.stop_token_ids == (EOS,)  # which the worker does not choose before
    assert not plain.changes_logits


def test_a_stop_string_ends_no_text_before_min_tokens(client):
    tokens, _, text = expected(max_tokens=40, stop_ids=())
    ends = [len(TABLE.decode(tokens[: n + 1])) for n in range(len(tokens))]
    letter = next(c for n, c in enumerate(text) if c.isascii() and c in text[n + 1 :])
    first, second = text.index(letter), text.index(letter, text.index(letter) + 1)
    least = 1 + next(n for n, end in enumerate(ends) if end > first)  # tokens that complete it
    assert second >= ends[least - 1]
    for min_tokens, at in ((0, first), (least - 1, first), (least, second)):
        extra = {"min_tokens": min_tokens, "ignore_eos": True}
        for found in both_ways(client, max_tokens=40, stop=letter, extra_body=extra):
            assert found.text == text[:at]


def test_a_stop_string_cuts_text_and_logprobs():
    tokens, logprobs, text = expected(max_tokens=50, stop_ids=())
    assert len(tokens) > http_server.StallingWorker.MOST  # so nothing but the stop string ends it
    stop = text[5:8]
    assert "\ufffd" not in stop
    at = text.index(stop)
    asked = {"max_tokens": 50, "stop": ["never", stop], "logprobs": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}
    ended = functools.partial(http_server.finished, reason=FinishReason.STOP_STRING)
    with (
        http_server.serving(worker=http_server.StallingWorker) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for number, found in enumerate(both_ways(client, **asked, extra_body=extra), 1):
            http_server.until(lambda n=number: ended(server) == n)
            kept = len(found.token_ids)
            assert (found.text, found.finish, found.stop_reason) == (text[:at], ["stop"], stop)
            assert found.token_ids == tokens[:kept]
            assert found.token_logprobs == logprobs[:kept]
            assert all(offset < at for offset in found.text_offset)
            assert TABLE.decode(tokens[:kept]).startswith(text[:at])  # and no token fewer
        extra["include_stop_str_in_output"] = True
        assert complete(client, **asked, extra_body=extra).choices[0].text == text[: at + 3]


@pytest.mark.parametrize("max_tokens", [3, 0])
def test_echo_scores_the_prompt_before_the_text(client, max_tokens):
    """With no tokens it only scores the prompt."""
    tokens, logprobs, _ = expected(max_tokens=max(max_tokens, 1))
    tokens, logprobs = tokens[:max_tokens], logprobs[:max_tokens]
    for found in both_ways(client, echo=True, logprobs=1, max_tokens=max_tokens):
        assert found.text == TABLE.decode(IDS) + TABLE.decode(tokens)
        assert found.token_logprobs == SCORES + logprobs
        assert found.tokens == [TABLE.completion_text[one] for one in [*IDS, *tokens]]
        assert found.finish == ["length"]
    answer = complete(client, echo=True, logprobs=1, max_tokens=max_tokens)
    assert answer.choices[0].logprobs.top_logprobs[0] is None
    assert answer.usage.completion_tokens == max_tokens


HALF, REST = 6, 7  # tokens with the bytes of one "é"
# Prompts, and the tokens that come first behind them.
ECHOED = [
    ([2, 0, HALF], REST), ([25, 0, HALF], HALF), ([8, 1, HALF], EOS), ([8, 0, HALF], 15),
    ([28, HALF, EOS], EOS), ([8, HALF, REST], 14), ([8, 0, REST], 14),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "first"), ECHOED)
def test_a_text_begins_behind_the_echo_s_last_character(client, ids, first):
    """Where a prompt ends inside of a character, the text's first byte does not complete it."""
    assert TABLE.decode([HALF, REST]) == "é"
    tokens, logprobs, text = expected(ids)
    assert tokens[0] == first
    before = TABLE.decode(ids)
    _, of_prompt = TextStream(TABLE).push_with_offsets(ids)
    _, of_text = TextStream(TABLE).push_with_offsets(tokens)
    for found in both_ways(client, prompt=ids, echo=True, logprobs=1):
        assert found.text == before + text
        assert found.token_logprobs[len(ids) :] == logprobs
        assert found.text_offset == of_prompt + [len(before) + offset for offset in of_text]
    for found in both_ways(client, prompt=ids, echo=True):
        assert found.text == before + text


def of_prompts(client, **extra):
    """Where a completion, a chat and the first part of its stream have the prompt's logprobs."""
    asked = {"extra_body": extra, "max_tokens": 1}
    (choice,) = complete(client, **asked).choices
    return choice, chat(client, **asked), next(iter(chat(client, **asked, stream=True)))


def test_prompt_logprobs_are_where_vllm_puts_them(client):
    answers = of_prompts(client, prompt_logprobs=1)
    every = answers[0].prompt_logprobs
    assert [one and one[str(id)]["logprob"] for id, one in zip(IDS, every, strict=True)] == SCORES
    entry = {"logprob": SCORES[3], "rank": 1, "decoded_token": TABLE.text[IDS[3]]}
    assert every[3][str(IDS[3])] == entry
    assert [answer.prompt_logprobs for answer in answers] == [every] * 3
    assert not hasattr(answers[2], "prompt_logprobs_start")
    for answer in of_prompts(client, prompt_logprobs=1, prompt_logprobs_start=3):
        assert (answer.prompt_logprobs, answer.prompt_logprobs_start) == (every[3:], 3)


def test_ids_of_each_row_have_their_logprobs_beside_the_prompts(client):
    extra = {"prompt_logprobs": 0, "prompt_logprobs_start": len(IDS) - 2}
    for answer in of_prompts(client, **extra, prompt_extra_token_ids=[[1, 2], [3, 4]]):
        assert answer.prompt_chosen_logprobs == [[-9.0, -9.0]] * 2
        assert len(answer.prompt_logprobs) == 2


def test_columns_hold_the_same_logprobs_as_bytes(client):
    tokens, logprobs, _ = expected()
    (choice,) = complete(client, logprobs=2, extra_body={"logprobs_columns": True}).choices
    assert choice.logprobs is None
    found = arrays(choice.columns)
    assert found["token_ids"].tolist() == tokens
    assert found["weights_versions"].tolist() == [0] * len(tokens)
    assert found["logprobs"].shape == (len(tokens), 3)
    assert found["logprobs"][:, 0].tolist() == logprobs
    assert found["topk_ids"].shape == (len(tokens), 2)
    assert found["token_ranks"].tolist() == [1] * len(tokens)
    assert not {"kept_token_ids", "entropy", "log_sum_exp"} & found.keys()


def test_values_of_rows_have_the_names_they_are_asked_by(client):
    """In columns, and as lists of the extension; streamed too. Some programs serve neither."""
    _, logprobs, _ = expected()
    extra = {"entropy": True, "log_sum_exp": True}
    (choice,) = complete(client, logprobs=0, extra_body=extra | {"logprobs_columns": True}).choices
    found = arrays(choice.columns)
    chunks = complete(client, logprobs=0, extra_body=extra, stream=True)
    parts = [chunk.choices[0].speculation for chunk in chunks]
    for name in extra:
        assert found[name].dtype == np.float32
        assert found[name].tolist() == [-x for x in logprobs]
        assert choice.speculation[name] == found[name].tolist()
        assert [x for part in parts for x in part.get(name, [])] == found[name].tolist()
    alone = complete(client, logprobs=0, extra_body={"entropy": True}).choices[0].speculation
    assert (alone["entropy"], "log_sum_exp" in alone) == ([-x for x in logprobs], False)


def test_kept_sets_come_as_lists_and_as_columns(client):
    tokens = expected()[0]
    sets = [sorted({token, (token + 1) % VOCAB}) for token in tokens]
    (choice,) = complete(client, extra_body={"kept_token_ids": True}).choices
    assert choice.speculation["kept_token_ids"] == sets
    assert choice.speculation["kept_counts"] == [2] * len(tokens)
    extra = {"kept_token_ids": True, "logprobs_columns": True}
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True, extra_body=extra)]
    parts = [arrays(chunk.columns) for chunk in chunks]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert found["kept_token_ids"].reshape(-1, 2).tolist() == sets
    assert found["kept_counts"].tolist() == [2] * len(tokens)
    np.testing.assert_allclose(np.exp(found["log_kept"]), [0.5] * len(tokens), rtol=1e-6)


def test_what_speculation_did_stands_beside_it(client):
    tokens, logprobs, _ = expected()
    (choice,) = complete(client, logprobs=0, extra_body={"draft_logprobs": True}).choices
    steps = choice.speculation["by_step"]
    assert sum(step["num_tokens"] for step in steps) == len(tokens)
    assert any(step["num_accepted"] for step in steps)
    assert math.isclose(choice.speculation["cumulative_logprob"], sum(logprobs))
    assert not hasattr(complete(client).choices[0], "speculation")


def test_stop_token_ids_end_a_text_and_are_named(client):
    tokens = expected()[0]
    extra = {"stop_token_ids": [tokens[4]], "return_token_ids": True}
    for found in both_ways(client, extra_body=extra):
        assert found.token_ids == tokens[: tokens.index(tokens[4]) + 1]
        assert (found.finish, found.stop_reason) == (["stop"], tokens[4])

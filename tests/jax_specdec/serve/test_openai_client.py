"""The openai package against a live server: sync, async, streamed, both endpoints."""

import asyncio
import base64
import math

import numpy as np
import openai
import pytest

from jax_specdec.engine import FinishReason, Request, SamplingParams
from tests.support.http_server import (
    EOS,
    MODEL,
    TABLE,
    VOCAB,
    StallingWorker,
    finished,
    serving,
    until,
)
from tests.support.scripted_worker import continuation, logprob

pytestmark = pytest.mark.fast

PROMPT = "hello you"
IDS = MODEL.encoder.encode(PROMPT)


def expected(ids=IDS, max_tokens=20, stop_ids=(EOS,)):
    """Ids, logprobs and text of an undisturbed run."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_ids)
    tokens, logprobs = continuation(Request(id="r", prompt_token_ids=ids, params=params))
    return tokens, logprobs, TABLE.decode(tokens)


def array(column):
    """A column of an answer."""
    raw = np.frombuffer(base64.b64decode(column["data"]), column["dtype"])
    return raw.reshape(column["shape"])


def complete(client, **changes):
    return client.completions.create(
        **{"model": "scripted", "prompt": PROMPT, "max_tokens": 20, **changes}
    )


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("scripted", "model")
    assert client.models.retrieve("scripted") == model
    with pytest.raises(openai.NotFoundError, match="'some/other' is not served here"):
        client.models.retrieve("some/other")


def test_a_completion_has_the_text_its_logprobs_and_the_usage(client):
    tokens, logprobs, text = expected()
    answer = complete(client, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == text
    assert choice.finish_reason == ("stop" if tokens[-1] == EOS else "length")
    assert choice.logprobs.token_logprobs == logprobs
    assert choice.logprobs.tokens == [TABLE.completion_text[one] for one in tokens]
    assert choice.logprobs.text_offset[0] == 0
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(IDS), len(tokens))


def test_streamed_chunks_add_up_to_the_whole(client):
    whole = complete(client, logprobs=1).choices[0]
    chunks = list(complete(client, logprobs=1, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert len(choices) > 3
    assert "".join(one.text for one in choices) == whole.text
    assert [x for one in choices for x in one.logprobs.token_logprobs] == (
        whole.logprobs.token_logprobs
    )
    assert [x for one in choices for x in one.logprobs.text_offset] == whole.logprobs.text_offset
    assert [one.finish_reason for one in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == whole.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(whole.logprobs.tokens)


def test_a_chat_completion_whole_and_streamed(client):
    _, logprobs, text = expected()
    asked = {
        "model": "scripted", "max_tokens": 20, "logprobs": True, "top_logprobs": 1,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello "}]},
                     {"role": "assistant", "content": "you"}],
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert [entry.logprob for entry in choice.logprobs.content] == logprobs
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content for delta in deltas) == text
    got = [entry.logprob for one in chunks for entry in one.choices[0].logprobs.content]
    assert got == logprobs
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_without_max_tokens_a_chat_goes_on_to_the_end_of_its_slot(client):
    messages = [{"role": "user", "content": PROMPT}]
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.chat.completions.create(model="scripted", messages=messages, extra_body=extra)
    assert answer.usage.total_tokens == MODEL.max_length
    assert answer.choices[0].token_ids == expected(max_tokens=55, stop_ids=())[0]


def test_asyncio_clients_side_by_side(server):
    prompts = [f"prompt {n}" for n in range(12)]

    async def one(client, prompt, stream):
        asked = {"model": "scripted", "prompt": prompt, "max_tokens": 20, "stream": stream}
        answer = await client.completions.create(**asked)
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def main():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(one(client, prompt, n % 2 == 0) for n, prompt in enumerate(prompts))
            )

    assert asyncio.run(main()) == [expected(MODEL.encoder.encode(one))[2] for one in prompts]


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(client):
    prompts = ["one", "two"]
    answer = complete(client, prompt=prompts, n=2)
    texts = [expected(MODEL.encoder.encode(one))[2] for one in prompts]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [texts[0]] * 2 + [texts[1]] * 2
    assert answer.usage.prompt_tokens == 6
    by_index = {}
    for chunk in complete(client, prompt=[list(MODEL.encoder.encode(p)) for p in prompts], n=2,
                          stream=True):  # fmt: skip
        choice = chunk.choices[0]
        by_index[choice.index] = by_index.get(choice.index, "") + choice.text
    assert by_index == {0: texts[0], 1: texts[0], 2: texts[1], 3: texts[1]}


def test_each_choice_has_a_seed_of_its_own(server, client):
    before = len(server.workers[0].commands)
    complete(client, n=3, seed=41, temperature=0.5, max_tokens=1)
    admitted = [c for c in server.workers[0].commands[before:] if hasattr(c, "request")]
    assert sorted(c.request.params.seed for c in admitted) == [41, 42, 43]


def test_penalties_biases_and_min_tokens_reach_the_worker(server, client):
    """As OpenAI and vLLM name them, on both endpoints."""
    before = len(server.workers[0].commands)
    asked = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"3": 7, "0": -2.5}}
    extra = {"repetition_penalty": 1.25, "min_tokens": 2}
    complete(client, **asked, extra_body=extra, max_tokens=3)
    messages = [{"role": "user", "content": PROMPT}]
    client.chat.completions.create(
        model="scripted", messages=messages, max_tokens=3, **asked, extra_body=extra
    )
    complete(client, max_tokens=1)
    *sent, plain = [
        command.request.params
        for command in server.workers[0].commands[before:]
        if hasattr(command, "request")
    ]
    assert len(sent) == 2
    for params in sent:
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1.0)
        assert (params.repetition_penalty, params.min_tokens) == (1.25, 2)
        assert params.logit_bias == ((3, 7.0), (0, -2.5))
        assert params.stop_token_ids == (EOS,)  # which the worker does not choose before
    assert not plain.changes_logits


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_no_text_before_min_tokens(client, stream):
    tokens, _, text = expected(max_tokens=40, stop_ids=())
    ends = [len(TABLE.decode(tokens[: n + 1])) for n in range(len(tokens))]
    letter = next(c for n, c in enumerate(text) if c.isascii() and c in text[n + 1 :])
    first, second = text.index(letter), text.index(letter, text.index(letter) + 1)
    least = 1 + next(n for n, end in enumerate(ends) if end > first)  # tokens that complete it
    assert second >= ends[least - 1]
    for min_tokens, at in ((0, first), (least - 1, first), (least, second)):
        answer = complete(client, max_tokens=40, stop=letter, stream=stream,
                          extra_body={"min_tokens": min_tokens, "ignore_eos": True})  # fmt: skip
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[:at]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_text_and_logprobs_and_ends_the_request(stream):
    tokens, logprobs, text = expected(max_tokens=50, stop_ids=())
    assert len(tokens) > StallingWorker.MOST  # so nothing but the stop string ends it
    stop = text[5:8]
    assert "\ufffd" not in stop
    at = text.index(stop)
    with (
        serving(worker=StallingWorker) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = complete(
            client, max_tokens=50, stop=["never", stop], logprobs=0, stream=stream,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        until(lambda: finished(server, FinishReason.STOP_STRING) == 1)
    assert "".join(choice.text for choice in choices) == text[:at]
    kept = [one for choice in choices for one in choice.token_ids]
    assert kept == tokens[: len(kept)]
    got = [x for choice in choices for x in choice.logprobs.token_logprobs]
    assert got == logprobs[: len(kept)]
    offsets = [x for choice in choices for x in choice.logprobs.text_offset]
    assert all(offset < at for offset in offsets)
    assert TABLE.decode(tokens[: len(kept)]).startswith(text[:at])  # and no token fewer
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)


def test_a_stop_string_may_stay(client):
    text = expected(max_tokens=50)[2]
    answer = complete(
        client, max_tokens=50, stop=text[5:8], extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == text[: text.index(text[5:8]) + 3]


def test_echo_scores_the_prompt_before_the_text(client):
    tokens, logprobs, _ = expected(max_tokens=3)
    scores = [None, *(logprob(list(IDS[:n])) for n in range(1, len(IDS)))]
    (choice,) = complete(client, echo=True, logprobs=1, max_tokens=3).choices
    assert choice.text == TABLE.decode(IDS) + TABLE.decode(tokens)
    assert choice.logprobs.token_logprobs == scores + logprobs
    assert choice.logprobs.tokens[0] == TABLE.completion_text[IDS[0]]
    assert choice.logprobs.top_logprobs[0] is None
    assert len(choice.logprobs.text_offset) == len(IDS) + len(tokens)
    chunks = [c.choices[0] for c in complete(client, echo=True, logprobs=1, max_tokens=3,
                                             stream=True)]  # fmt: skip
    assert "".join(one.text for one in chunks) == choice.text
    assert [x for c in chunks for x in c.logprobs.token_logprobs] == scores + logprobs


def test_no_tokens_with_echo_only_scores_the_prompt(client):
    answer = complete(client, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == TABLE.decode(IDS)
    assert choice.logprobs.token_logprobs[1:] == [
        logprob(list(IDS[:n])) for n in range(1, len(IDS))
    ]
    assert answer.usage.completion_tokens == 0
    assert choice.finish_reason == "length"


def test_prompt_logprobs_are_where_vllm_puts_them(client):
    extra = {"prompt_logprobs": 1}
    found = complete(client, extra_body=extra, max_tokens=1).choices[0].prompt_logprobs
    assert found[0] is None
    assert len(found) == len(IDS)
    own = found[3][str(IDS[3])]
    assert own["logprob"] == logprob(list(IDS[:3]))
    assert own["rank"] == 1
    assert own["decoded_token"] == TABLE.text[IDS[3]]
    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(
        model="scripted", messages=messages, max_tokens=1, extra_body=extra
    )
    assert chat.prompt_logprobs == found


def test_columns_hold_the_same_logprobs_as_bytes(client):
    tokens, logprobs, _ = expected()
    (choice,) = complete(client, logprobs=2, extra_body={"logprobs_columns": True}).choices
    assert choice.logprobs is None
    found = {name: array(column) for name, column in choice.columns.items()}
    assert found["token_ids"].tolist() == tokens
    assert found["weights_versions"].tolist() == [0] * len(tokens)
    assert found["logprobs"][:, 0].tolist() == logprobs
    assert found["logprobs"].shape == (len(tokens), 3)
    assert found["topk_ids"].shape == (len(tokens), 2)
    assert (found["token_ranks"] == 1).all()
    assert "kept_ids" not in found


def test_rows_of_every_format_come_from_one_worker(client):
    """Chosen ids, modes and prompts' logprobs: a worker answers in each request's own format."""
    for mode in ("raw", "scaled", "processed"):
        asked = {"logprobs_mode": mode, "extra_token_ids": [3, 3, 1], "prompt_logprobs": 1}
        (choice,) = complete(client, logprobs=1, extra_body=asked).choices
        assert len(choice.speculation["chosen_logprobs"][0]) == 3
        (choice,) = complete(client, extra_body={"logprobs_mode": mode}).choices
        assert choice.text


def test_kept_sets_come_as_lists_and_as_columns(client):
    tokens = expected()[0]
    sets = [sorted({token, (token + 1) % VOCAB}) for token in tokens]
    (choice,) = complete(client, extra_body={"kept_token_ids": True}).choices
    assert choice.speculation["kept_ids"] == sets
    assert choice.speculation["kept_counts"] == [2] * len(tokens)
    extra = {"kept_token_ids": True, "logprobs_columns": True}
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True, extra_body=extra)]
    columns = [chunk.columns for chunk in chunks]
    ids = np.concatenate([array(each["kept_ids"]) for each in columns])
    assert ids.reshape(-1, 2).tolist() == sets
    assert sum(array(each["kept_counts"]).sum() for each in columns) == 2 * len(tokens)
    shares = np.exp(np.concatenate([array(each["log_kept"]) for each in columns]))
    np.testing.assert_allclose(shares, [0.5] * len(tokens), rtol=1e-6)


def test_what_speculation_did_stands_beside_it(client):
    (choice,) = complete(client, logprobs=0, extra_body={"draft_logprobs": True}).choices
    steps = choice.speculation["by_step"]
    assert sum(step["num_tokens"] for step in steps) == len(expected()[0])
    assert any(step["num_accepted"] for step in steps)
    total = choice.speculation["cumulative_logprob"]
    assert math.isclose(total, sum(expected()[1]))
    plain = complete(client).choices[0]
    assert not hasattr(plain, "speculation")


def test_stop_token_ids_end_a_text_and_are_named(client):
    tokens = expected()[0]
    stop = tokens[4]
    first = tokens.index(stop)
    extra = {"stop_token_ids": [stop], "return_token_ids": True}
    (choice,) = complete(client, extra_body=extra).choices
    assert choice.token_ids == tokens[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_a_wrong_request_is_an_error_of_the_client_library(client):
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as error:
        complete(client, extra_body={"temprature": 1})
    assert (error.value.param, error.value.code) == ("temprature", "unknown_parameter")
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        complete(client, model="gpt")
    with pytest.raises(openai.BadRequestError, match=f"vocabulary has {VOCAB} tokens"):
        complete(client, logprobs=VOCAB + 1)

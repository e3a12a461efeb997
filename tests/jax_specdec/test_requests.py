"""What a request may ask for."""

import dataclasses
import re

import numpy as np
import pytest

from jax_specdec.control import Admit, from_bytes, to_bytes
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.records.processor_state import Progress
from jax_specdec.requests import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    ROW_FIELDS,
    Request,
    RequestError,
    SamplingParams,
    Structured,
    packed_ids,
)


def test_a_request_may_ask_for_as_much():
    params = SamplingParams(logprobs=512, extra_token_ids=tuple(range(128)), kept_token_ids=True)
    assert (params.num_columns, len(params.extra_token_ids)) == (513, 128)
    SamplingParams(presence_penalty=-2, frequency_penalty=2.0, repetition_penalty=0.01)
    SamplingParams(repetition_penalty=100, logit_bias={0: -100, 5: 100}, max_tokens=3, min_tokens=3)
    SamplingParams(stop_token_ids=range(1025))
    SamplingParams(stop_token_ids=range(1024), min_tokens=1)
    for served in (0.0, MIN_TEMPERATURE, 1.0, MAX_TEMPERATURE):
        assert SamplingParams(temperature=served).temperature == served


OF_A_STRUCTURE = {"stop_token_ids": (2,), "structured": ["regex", "a+"]}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"logprobs": 0, "extra_token_ids": range(129)}, "129 extra_token_ids; a request may name"),
        ({"logprobs": 513}, "logprobs = 513"),
        *(({"logprobs_mode": wrong}, "^logprobs_mode = .* must be one of LogprobsMode.RAW, Log")
          for wrong in ("raw", 1, None)),
        *(({"kept_token_ids": wrong}, "kept_token_ids = .* must be True or False")
          for wrong in (1, None, "yes")),
        *(({name: wrong}, f"^{name} = .* must be (a whole number )?from") for name, wrong in (
            ("presence_penalty", 2.01), ("frequency_penalty", -2.01), ("repetition_penalty", 0.0),
            ("repetition_penalty", 100.1), ("presence_penalty", np.nan), ("min_tokens", -1))),
        ({"repetition_penalty": "1"}, "^repetition_penalty = '1' must be a Python number"),
        ({"max_tokens": 3, "min_tokens": 4}, "^min_tokens = 4 is over max_tokens = 3: lower it"),
        *(({"temperature": wrong}, re.escape(f"temperature = {wrong} must be 0"))
          for wrong in (-1.0, 9e-5, 1e-42, 1.1e4, 3e38, np.inf, np.nan)),
        *(({"seed": wrong}, "seed = .* must be a whole number; it counts mod")
          for wrong in (1.5, True, "1")),
        ({"stop_token_ids": range(1025), "min_tokens": 1}, "1025 stop_token_ids: 1024 may be held"),
        *((OF_A_STRUCTURE | change, wrong) for change, wrong in (
            ({"structured": ("html", "a")}, "the kind must be one of json_schema, regex, choice"),
            ({"structured": ("regex", 3)}, "the text a string"),
            ({"structured": "regex"}, "must be a pair of a kind and a text"),
            ({"structured": ("regex", "a" * 65537)}, "has 65537 characters and may have 65536"),
            ({"stop_token_ids": ()}, "structured needs stop_token_ids"),
            ({"min_tokens": 1}, "min_tokens = 1 with structured"))),
        *(({"prompt_logprobs": 0, "prompt_logprobs_start": start},
           r"prompt_logprobs_start = \S+ must be") for start in (-1, 1.5, True, 2**31, None)),
        ({"prompt_logprobs_start": 1}, "prompt_logprobs_start = 1 needs prompt_logprobs: ask"),
        ({"prompt_extra_token_ids": [[1]]}, "prompt_extra_token_ids need prompt_logprobs: ask"),
        *(({name: value}, name.split("_")[0]) for name, value in (
            ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("stop_sequences", ((),)),
            ("extra_token_ids", (1,)), ("stop_token_ids", (5, 2**31)), ("stop_token_ids", (-1,)),
            ("stop_token_ids", (2.5,)), ("stop_sequences", ((1,), (2**40, 1))))),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_by_name(params, said):
    with pytest.raises(RequestError, match=said):
        SamplingParams(**params)


@pytest.mark.parametrize("id", [["a"], {"a": 1}, 7, b"a", None])
def test_an_id_is_a_string(id):
    """An engine finds requests by their ids, and sends these to its workers as text."""
    with pytest.raises(RequestError, match=r"^request id = .* must be a string"):
        Request(id=id, prompt_token_ids=(1,))
    assert Request(id="a", prompt_token_ids=(1,)).id == "a"


def test_a_logit_bias_is_kept_as_pairs_of_plain_numbers():
    given = {3: 1, np.int64(7): -0.5}
    pairs = ((3, 1.0), (7, -0.5))
    for form in (given, given.items(), list(given.items()), [list(pair) for pair in given.items()]):
        assert SamplingParams(logit_bias=form).logit_bias == pairs
    assert hash(SamplingParams(logit_bias=given)) == hash(SamplingParams(logit_bias=pairs))


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (3, "logit_bias = 3 must be a sequence of pairs"),
        ([3], "logit_bias has 3, not a token id and a number"),
        ([(1, 2.0, 3)], r"logit_bias has \(1, 2.0, 3\), not"),
        ({"3": 1.0}, "logit_bias: token id = '3' must be a whole number"),
        ({-1: 1.0}, "logit_bias: token id = -1 must be from 0 to 2147483647"),
        ({3: "1"}, "logit_bias of token 3 = '1' must be a Python number"),
        ({3: float("-inf")}, "logit_bias of token 3 = -inf must be from -100.0 to 100.0"),
        ([(3, 1.0), (3, 2.0)], "logit_bias names token 3 twice"),
        (dict.fromkeys(range(1025), 1.0), "logit_bias has 1025 entries and may have 1024"),
    ],
)
def test_what_is_no_logit_bias_is_refused_by_name(bias, said):
    with pytest.raises(RequestError, match=f"^{said}"):
        SamplingParams(logit_bias=bias)


def test_a_structure_has_kind_text_and_an_ending_token():
    assert SamplingParams(**OF_A_STRUCTURE).structured == Structured("regex", "a+")
    assert SamplingParams(**OF_A_STRUCTURE).changes_logits


@pytest.mark.parametrize("name", ROW_FIELDS)
def test_a_value_of_rows_comes_with_logprobs(name):
    assert SamplingParams(logprobs=0).row_values == 0
    assert SamplingParams(logprobs=0, **{name: True}).row_values == ROW_FIELDS[name]
    with pytest.raises(RequestError, match=f"{name} needs logprobs: ask for logprobs = 0 at least"):
        SamplingParams(**{name: True})
    with pytest.raises(RequestError, match=f"{name} = 1 must be True or False"):
        SamplingParams(logprobs=0, **{name: 1})


def test_a_start_beyond_the_prompt_is_refused():
    prompt = (5, 6, 7)
    for start, first in ((0, 1), (1, 1), (2, 2)):
        params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=start)
        for made in (
            Request(id="a", prompt_token_ids=prompt, params=params),
            Request.from_packed("a", packed_ids(prompt), params),
        ):
            assert made.first_scored == first
            told = from_bytes(to_bytes(Admit(slot=0, generation=1, request=made))).request
            assert told.first_scored == first
    beyond = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=3)
    said = "'a': prompt_logprobs_start = 3 is beyond the prompt, whose last token is at place 2"
    with pytest.raises(RequestError, match=said):
        Request(id="a", prompt_token_ids=prompt, params=beyond)
    with pytest.raises(RequestError, match=said):
        Request.from_packed("a", packed_ids(prompt), beyond)
    assert Request(id="a", prompt_token_ids=prompt).first_scored is None


def test_each_scored_token_may_name_ids_of_its_own():
    table = np.arange(6, dtype=np.int64).reshape(2, 3)
    for given in (table, table.tolist(), tuple(map(tuple, table.tolist()))):
        params = SamplingParams(
            prompt_logprobs=0, prompt_logprobs_start=2, prompt_extra_token_ids=given
        )
        request = Request(id="a", prompt_token_ids=(1, 2, 3, 4), params=params)
        told = from_bytes(to_bytes(Admit(slot=0, generation=1, request=request))).request.params
        assert told == params == dataclasses.replace(params)
        assert hash(told) == hash(params)
        assert told.prompt_extra_token_ids.array.tolist() == table.tolist()
        assert (told.num_prompt_chosen, told.of_prompt.num_columns) == (3, 1)
    for rows, start in ((1, 2), (3, 2), (2, 0), (2, 1)):
        params = SamplingParams(
            prompt_logprobs=0, prompt_logprobs_start=start, prompt_extra_token_ids=[[1]] * rows
        )
        due = 4 - max(start, 1)
        said = f"'a': prompt_extra_token_ids has {rows} rows for the {due} tokens that are scored"
        with pytest.raises(RequestError, match=said):
            Request(id="a", prompt_token_ids=(1, 2, 3, 4), params=params)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([[0.5]], r"must be token ids \[n, C\]"),
        ([["a"]], r"must be token ids \[n, C\]"),
        (3, r"must be token ids \[n, C\]"),
        ((b"abc", 1), r"must be token ids \[n, C\]"),
        ([[]], "names 0 ids for each token and may name from 1 to 512"),
        ([[1] * 513], "names 513 ids for each token and may name from 1 to 512"),
        ([[-1]], r"= -1 must be from 0"),
        ([[2**31]], r"= 2147483648 must be from 0"),
    ],
)
def test_what_names_no_ids_of_rows_is_refused(given, said):
    with pytest.raises(RequestError, match=said):
        SamplingParams(prompt_logprobs=0, prompt_extra_token_ids=given)


def test_a_request_that_goes_on_knows_which_tokens_were_emitted():
    params = SamplingParams(
        max_tokens=9, min_tokens=4, presence_penalty=1.0, prompt_logprobs=0,
        prompt_logprobs_start=1, prompt_extra_token_ids=[[4, 5]],
    )  # fmt: skip
    request = Request(id="a", prompt_token_ids=(1, 2), params=params)
    assert request.num_emitted == 0
    for emitted, least in (((5, 6, 7), 1), ((5,) * 6, 0)):
        queued = QueuedRequest(request=request, progress=Progress(token_ids=emitted))
        told = from_bytes(to_bytes(Admit(slot=0, generation=1, request=queued.for_worker))).request
        assert told.prompt_token_ids == (1, 2, *emitted)
        assert told.num_emitted == len(emitted)
        assert told.params.max_tokens == 9 - len(emitted)
        assert told.params.min_tokens == least
    with pytest.raises(RequestError, match="num_emitted = 2 must be from 0 to 1"):
        Request.from_packed("a", packed_ids((1, 2)), params, 2)


def test_seeds_count_modulo_2_32():
    for seed, kept in ((-1, 2**32 - 1), (2**32, 0), (2**40 + 7, 7), (np.int64(-2), 2**32 - 2)):
        assert SamplingParams(seed=seed).seed == kept

"""What is declared is served, and a request beyond it is refused by the field to raise."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.declaration import EVERYTHING, USUAL, Serves
from jax_specdec.engine.config import EngineConfig, check_request
from jax_specdec.requests import Request, RequestError, SamplingParams, Structured
from tests.support.asking import NEEDS, PROCESSED, params

NOTHING = Serves.of([])


def test_every_field_is_what_some_request_needs():
    assert [field.name for field in fields(Serves)] == [*NEEDS, "alike"]


@pytest.mark.parametrize("field", NEEDS)
def test_a_request_beyond_is_refused_by_field_and_way_out(field):
    asks, needed = NEEDS[field]
    request = Request(id="r", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=4, **asks))
    config = EngineConfig(
        vocab_size=300, serves=replace(EVERYTHING, **{field: getattr(NOTHING, field)})
    )
    with pytest.raises(RequestError) as refused:
        check_request(request, config)
    assert (refused.value.args[0]).startswith("request 'r' asks for ")
    name = needed.name.lower() if needed is PROCESSED else needed
    option = f"--{field.replace('_', '-')}"
    for said in (
        f"this engine serves {field} = ",
        f"set {field} = {name} in EngineConfig.serves",
        f"(of a command: {option}{'' if needed is True else f' {name}'})",
    ):
        assert said in str(refused.value)
    check_request(request, replace(config, serves=replace(config.serves, **{field: needed})))


@given(st.lists(params, max_size=4))
def test_what_requests_ask_for_is_the_least_that_serves_them(asked):
    least = Serves.of(asked)
    assert all(least.excess(one) is None for one in asked)
    assert all(EVERYTHING.excess(one) is None for one in asked)
    assert least.alike == (len({*asked}) == 1)
    for name, value in vars(replace(least, alike=False)).items():
        nothing = getattr(NOTHING, name)
        if value != nothing:
            less = replace(least, **{name: nothing})
            assert any(less.excess(one) is not None for one in asked), name


@given(st.lists(params, max_size=3))
def test_prepare_is_another_way_to_write_it(asked):
    config = EngineConfig(vocab_size=300, prepare=tuple(asked))
    assert config.declared == USUAL.including(asked) == config.worker.serves
    assert all(config.declared.excess(one) is None for one in asked)
    assert EngineConfig(vocab_size=300, serves=NOTHING).declared == NOTHING
    alike = Serves.of([SamplingParams(logprobs=2)])
    assert alike.including([]).alike
    assert not alike.including([SamplingParams()]).alike  # which asks for less


def test_the_usual_serves_what_clients_of_openai_ask():
    for one in (
        {"temperature": 2.0, "top_p": 0.1, "logprobs": 20, "prompt_logprobs": 5},
        {"logit_bias": dict.fromkeys(range(300), -1.0), "presence_penalty": 2.0},
        {"min_tokens": 3, "stop_token_ids": (1, 2)},
        {"structured": Structured("json_schema", "{}"), "stop_token_ids": (0,)},
        {"logprobs": 1, "extra_token_ids": range(16)},
    ):
        assert USUAL.excess(SamplingParams(**one)) is None, one
    excess = USUAL.excess(SamplingParams(min_tokens=3, stop_token_ids=range(301)))
    assert (excess.field, excess.value, excess.present) == ("max_changed_ids", 301, 300)
    assert USUAL.excess(SamplingParams(stop_token_ids=range(301))) is None  # nothing is held back


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_logprobs", 513), ("max_logprobs", -1), ("max_logprobs", True), ("max_logprobs", 2.0),
        ("max_logprobs_of_prompts", 513), ("max_extra_token_ids", None), ("max_changed_ids", 1025),
        ("sampling", 1), ("penalties", None), ("grammars", "yes"), ("max_logprobs_mode", 2),
    ],
)  # fmt: skip
def test_a_declaration_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"serves: {field} = {value!r} must be "):
        Serves(**{field: value})

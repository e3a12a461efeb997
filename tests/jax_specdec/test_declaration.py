"""What is declared is served, and a request beyond it is refused by the field to raise."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.wire import LogprobsMode
from jax_specdec.declaration import EVERYTHING, USUAL, Serves
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.requests import Request, RequestError, SamplingParams, Structured

PROCESSED = LogprobsMode.PROCESSED
# What a request that needs each field asks for, and what it needs there.
NEEDS = {
    "sampling": ({"temperature": 0.5}, True),
    "max_logprobs": ({"logprobs": 33}, 33),
    "max_extra_token_ids": ({"logprobs": 0, "extra_token_ids": range(17)}, 17),
    "max_logprobs_mode": ({"logprobs": 0, "logprobs_mode": PROCESSED}, PROCESSED),
    "kept_token_ids": ({"kept_token_ids": True}, True),
    "draft_logprobs": ({"draft_logprobs": True}, True),
    "max_logprobs_of_prompts": ({"prompt_logprobs": 0}, 0),
    "max_changed_ids": ({"logit_bias": {1: 1.0, 2: 1.0}}, 2),
    "penalties": ({"frequency_penalty": 0.1}, True),
    "grammars": ({"structured": Structured("regex", "a"), "stop_token_ids": (0,)}, True),
}
NOTHING = Serves.of([])
params = st.lists(st.sampled_from([*NEEDS]), unique=True).map(
    lambda names: SamplingParams(**{k: v for name in names for k, v in NEEDS[name][0].items()})
)


def test_every_field_is_what_some_request_needs():
    assert [field.name for field in fields(Serves)] == [*NEEDS, "alike"]


@pytest.mark.parametrize("field", NEEDS)
def test_a_request_beyond_is_refused_by_field_and_way_out(field):
    asks, needed = NEEDS[field]
    request = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=4, **asks))
    config = EngineConfig(
        vocab_size=300, serves=replace(EVERYTHING, **{field: getattr(NOTHING, field)})
    )
    with pytest.raises(RequestError) as refused:
        check(request, config)
    assert (refused.value.args[0]).startswith("request 'r' asks for ")
    name = needed.name.lower() if needed is PROCESSED else needed
    option = f"--{field.replace('_', '-')}"
    for said in (
        f"this engine serves {field} = ",
        f"set {field} = {name} in EngineConfig.serves",
        f"(of a command: {option}{'' if needed is True else f' {name}'})",
    ):
        assert said in str(refused.value)
    check(request, replace(config, serves=replace(config.serves, **{field: needed})))


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

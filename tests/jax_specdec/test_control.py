"""The control channel: every command survives its line, and garbage is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.wire import LogprobsMode
from jax_specdec.control import (
    Admit,
    Advance,
    ControlError,
    Evict,
    Release,
    Shutdown,
    Start,
    WorkerConfig,
    from_line,
    to_line,
)
from jax_specdec.requests import Request, RequestError, SamplingParams

pytestmark = pytest.mark.fast

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 1000),
    temperature=st.just(0.0) | st.floats(1e-4, 5),
    top_k=st.integers(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    stop_token_ids=st.lists(st.integers(0, 300), max_size=3).map(tuple),
    stop_sequences=st.lists(
        st.lists(st.integers(0, 300), min_size=1, max_size=3).map(tuple), max_size=2
    ).map(tuple),
    logprobs=st.none() | st.integers(0, 128),
    logprobs_mode=st.sampled_from(LogprobsMode),
    prompt_logprobs=st.none() | st.integers(0, 128),
)
requests = st.builds(
    Request,
    id=st.text(),
    prompt_token_ids=st.lists(st.integers(0, 300), min_size=1).map(tuple),
    params=params,
)
start = Start(config=WorkerConfig(vocab_size=264), ring="/r")
configs = st.builds(
    WorkerConfig, vocab_size=st.integers(1, 300), adaptive=st.booleans(), corpus=st.text()
)
slots, generations = st.integers(0, 99), st.integers(0, 2**32 - 1)


@given(
    st.builds(
        Admit,
        slot=slots,
        generation=generations,
        request=requests,
        draft_token_ids=st.lists(st.integers(0, 300), max_size=4).map(tuple),
    )
    | st.builds(Release, slot=slots, generation=generations)
    | st.builds(Evict, slot=slots, generation=generations, reschedule=st.booleans())
    | st.builds(Start, config=configs, ring=st.text(), prefill_only=st.booleans())
    | st.just(Shutdown())
    | st.just(Advance())
)
def test_every_command_survives_its_line(command):
    line = to_line(command)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert from_line(line) == command


@pytest.mark.parametrize(
    "line",
    ["", "x", "[]", "1", "{}", '{"command": "dance"}', '{"command": "release", "slot": 1}',
     '{"command": "evict", "slot": 1}', '{"command": "shutdown", "now": true}',
     '{"command": "admit", "slot": 0, "generation": 1}',
     to_line(start)[:20], to_line(start).replace("corpus", "corps")],
)  # fmt: skip
def test_garbage_is_refused(line):
    with pytest.raises(ControlError, match="not a command"):
        from_line(line)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0),
     ("top_p", 1.1), ("min_p", -0.1), ("top_k", -1), ("seed", 2**32), ("logprobs", 513),
     ("logprobs", -1), ("prompt_logprobs", 513), ("prompt_logprobs", -1),
     ("stop_sequences", ((),)), ("extra_token_ids", (1,)), ("stop_token_ids", (5, 2**31)),
     ("stop_token_ids", (-1,)), ("stop_token_ids", (2.5,)), ("stop_sequences", ((1,), (2**40, 1)))],
)  # fmt: skip
def test_impossible_requests_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field.split("_")[0]):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [True, "5", 2.5])
def test_what_is_no_whole_number_is_refused_by_name(name, value):
    """OpenAI's chat format has logprobs = true, which Python would take for 1."""
    with pytest.raises(RequestError, match=rf"^{name} = {value!r} must be a whole number from"):
        SamplingParams(**{name: value})
    assert getattr(SamplingParams(**{name: np.int64(5)}), name) == 5


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [True, "0.5", np.float32(0.5), None])
def test_what_no_line_can_carry_as_a_number_is_refused_by_name(name, value):
    """A numpy.float64 is a float of Python's, and an integer is as good."""
    with pytest.raises(RequestError, match=rf"^{name} = .* must be a Python number"):
        SamplingParams(**{name: value})
    for fine in (np.float64(0.5), 1):
        asks = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(**{name: fine}))
        line = to_line(Admit(slot=0, generation=1, request=asks))
        assert getattr(from_line(line).request.params, name) == fine


@pytest.mark.parametrize("sequence", [list, np.array])
def test_ids_in_any_sequence_are_kept_as_tuples_of_ints(sequence):
    params = SamplingParams(
        stop_token_ids=sequence([7]), extra_token_ids=sequence([8, 9]), logprobs=0,
        stop_sequences=[sequence([1, 2])],
    )  # fmt: skip
    asks = Request(id="r", prompt_token_ids=sequence([3, 1, 4]), params=params)
    plain = SamplingParams(
        stop_token_ids=(7,), extra_token_ids=(8, 9), logprobs=0, stop_sequences=((1, 2),)
    )
    assert asks == Request(id="r", prompt_token_ids=(3, 1, 4), params=plain)
    assert {type(id) for id in (*asks.prompt_token_ids, *params.extra_token_ids)} == {int}
    assert from_line(to_line(Admit(slot=0, generation=1, request=asks))).request == asks


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (5, "= 5 must be a sequence of token ids"),
        ("ab", "= 'a' must be a whole number from 0 to 2147483647"),
        ([True], "= True must be a whole number"),
        ([2**31], "= 2147483648 must be from 0 to 2147483647"),
        (np.ones((2, 2), np.int32), r"= array\(\[1, 1\].* must be a whole number"),
        (np.array([0.5]), "= .*0.5.* must be a whole number"),
    ],
)
def test_what_is_no_sequence_of_ids_is_refused_by_name(ids, message):
    with pytest.raises(RequestError, match=f"^prompt_token_ids {message}"):
        Request(id="r", prompt_token_ids=ids)
    with pytest.raises(RequestError, match=f"^stop_sequences {message}"):
        SamplingParams(stop_sequences=(ids,))
    with pytest.raises(RequestError, match=r"^stop_sequences = 5 must be a sequence of sequences"):
        SamplingParams(stop_sequences=5)


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="empty prompt"):
        Request(id="r", prompt_token_ids=())

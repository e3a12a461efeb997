"""Commands as bytes: every one survives, and garbage is refused."""

from dataclasses import fields

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.wire import LogprobsMode
from jax_specdec import control
from jax_specdec.control import Admit, ControlError, Release, Shutdown, Start, from_bytes, to_bytes
from jax_specdec.declaration import Serves
from jax_specdec.requests import Request, RequestError, SamplingParams

ids = st.lists(st.integers(0, 300), max_size=4).map(tuple)
k = st.none() | st.integers(0, 128)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 1000),
    temperature=st.just(0.0) | st.floats(1e-4, 5),
    top_k=st.integers(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    stop_token_ids=ids,
    stop_sequences=st.lists(ids.filter(len), max_size=2).map(tuple),
    logprobs=k,
    logprobs_mode=st.sampled_from(LogprobsMode),
    prompt_logprobs=k,
    kept_token_ids=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(st.integers(0, 300), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 1),
)
requests = st.builds(Request, id=st.text(), prompt_token_ids=ids.filter(len), params=params)
start = Start(config=control.WorkerConfig(vocab_size=264), ring="/r")
BY_TYPE = {int: st.integers(0, 2**32 - 1), bool: st.booleans(), str: st.text()}
PLAIN = (Release, Shutdown, control.Evict, control.Advance, control.Prepare, control.Commit,
         control.Discard)  # fmt: skip


def of_plain_fields(kind, **others):
    """Commands of a kind whose other fields are numbers, truth values or texts."""
    plain = {field.name: BY_TYPE.get(field.type) for field in fields(kind)}
    return st.builds(kind, **plain | others)


served = st.lists(params, max_size=2).map(Serves.of)
configs = of_plain_fields(control.WorkerConfig, serves=served)
commands = st.one_of(
    of_plain_fields(Admit, request=requests, draft_token_ids=ids), *map(of_plain_fields, PLAIN)
)


@given(commands)
def test_every_command_survives_its_bytes(command):
    assert from_bytes(to_bytes(command)) == command


@given(
    of_plain_fields(
        Start, config=configs, local_devices=ids, control=st.none() | st.builds(control.Connection),
        member=st.none() | st.builds(control.Member), resumes=st.none() | served,
    )
)  # fmt: skip
def test_a_start_survives_its_line(start):
    line = control.to_line(start)
    assert line.find("\n") == len(line) - 1
    assert control.from_line(line) == start


def admission(**changes):
    """The parts of an admission as they are sent, some of them replaced."""
    whole = Admit(slot=0, generation=1, request=Request(id="r", prompt_token_ids=(1,)))
    names = ("name", "slot", "generation", "id", "prompt", "drafts", "params", "num_emitted")
    values = dict(zip(names, msgpack.unpackb(to_bytes(whole)), strict=True))
    return msgpack.packb(list((values | changes).values()))


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"\x90", b"\xc1", msgpack.packb({}), msgpack.packb(["dance"]),
     msgpack.packb(["release", 1]), msgpack.packb(["evict", 1]), msgpack.packb(["evict", 1, "", 1]),
     msgpack.packb(["shutdown", True]), msgpack.packb([["release"], 1, 2]),
     to_bytes(Release(slot=1, generation=2))[:-1], to_bytes(Shutdown()) * 2,
     admission(slot="0"), admission(prompt=b""), admission(prompt=b"123"),
     admission(prompt=b"\xff" * 4), admission(drafts=b"1"), admission(params=[]),
     admission(params=[0] * 13)],
)  # fmt: skip
def test_garbage_is_refused(data):
    assert from_bytes(admission()).request.id == "r"  # as it is before it is changed
    with pytest.raises(ControlError, match="not a command"):
        from_bytes(data)


LINE = control.to_line(start)


@pytest.mark.parametrize(
    "line", ["", "x", "[]", "1", "{}", LINE[:20], LINE.replace("drafter", "drafters")]
)
def test_what_is_no_start_is_refused(line):
    control.from_line(LINE)
    with pytest.raises(ControlError, match="not a start"):
        control.from_line(line)


def sent(request):
    """The request that a worker gets."""
    return from_bytes(to_bytes(Admit(slot=0, generation=1, request=request))).request


NUMBERS = [
    *(("must be a whole number", name, value, np.int64(5))
      for name in ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
      for value in (True, "5", 2.5)),  # OpenAI's chat format has logprobs = true
    *(("must be a Python number", name, value, np.float64(0.5))
      for name in ("temperature", "top_p", "min_p")
      for value in (True, "0.5", np.float32(0.5), None)),
]  # fmt: skip


@pytest.mark.parametrize(("said", "name", "value", "fine"), NUMBERS)
def test_numbers_no_command_can_carry_are_refused_by_name(said, name, value, fine):
    with pytest.raises(RequestError, match=rf"^{name} = .* {said}"):
        SamplingParams(**{name: value})
    for number in (fine, 1):
        asks = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(**{name: number}))
        assert getattr(sent(asks).params, name) == number


@pytest.mark.parametrize("sequence", [list, np.array])
def test_ids_in_any_sequence_are_kept_as_tuples_of_ints(sequence):
    def asking(made):
        ids = {"stop_token_ids": made([7]), "extra_token_ids": made([8, 9]),
               "stop_sequences": [made([1, 2])]}  # fmt: skip
        params = SamplingParams(logprobs=0, **ids)
        return Request(id="r", prompt_token_ids=made([3, 1, 4]), params=params)

    asks = asking(sequence)
    assert asks == asking(tuple) == sent(asks)
    assert {type(id) for id in (*asks.prompt_token_ids, *asks.params.extra_token_ids)} == {int}


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
    with pytest.raises(RequestError, match="empty prompt"):
        Request(id="r", prompt_token_ids=())

"""Messages and drafts, where no other test pins a line of docs/semantics.md."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.control import Admit, Release
from jax_specdec.device.drafting.drafters import no_drafts
from jax_specdec.device.loop.host_slots import Slot, asked_of_slots, widths_of_slots
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages import step_messages
from jax_specdec.device.worker.worker import Worker
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.requests import SamplingParams
from tests.support import decoding
from tests.support.decoding import mixed_requests, request, run
from tests.support.processor_messages import drafts


@pytest.mark.fast
def test_one_message_byte_by_byte():
    """The layout as numbers: whoever changes it has to change the version too."""
    slots = [
        SlotContents(
            generation=2**32 - 1, mode=LogprobsMode.SCALED, num_drafts=3, columns=2, num_chosen=1,
            token_ids=[5, 6], token_ranks=[1, 4], topk_ids=[[5], [9]],
            logprobs=[[-0.5, -0.5, -3], [-2, -0.25, -4]],
        ),
        SlotContents(state=SlotState.RECOVERY_STOP, generation=7),
        SlotContents(generation=8, token_ids=[1]),
    ]  # fmt: skip
    data = encode(
        Kind.TARGET, (9 << 32) + 4, slots, running=True, draft_follows=True, process_rank=2
    )
    header = [0x4C53 << 16 | 1, 3 | 1 << 8, 1 | 2, 3, 33, 4, 9, 2]
    slot_words = [
        *(0 | 1 << 8 | 2 << 16, 2 | 2 << 16, 3 | 1 << 16, 2**32 - 1),
        *(4, 0, 0, 7),
        *(0, 1, 0, 8),
    ]
    payload = struct.pack("<3i2i6f2i", 5, 6, 1, 1, 4, -0.5, -0.5, -3, -2, -0.25, -4, 5, 9)
    assert data == struct.pack("<20I", *header, *slot_words) + payload
    assert wire.VERSION == 1
    decode(data)


@pytest.mark.fast
def test_header_and_slots_are_as_small_as_promised():
    empty = encode(Kind.TARGET, 0, [])
    assert len(empty) <= 64
    assert len(encode(Kind.TARGET, 0, [SlotContents(state=SlotState.STOPPED)])) - len(empty) <= 16
    bits = {name: field.bits for name, field in (wire.HEADER | wire.SLOT).items()}
    assert (bits["kind"], bits["max_num_logprobs"], bits["generation"]) == (8, 16, 32)
    kind, k = wire.HEADER["kind"], wire.HEADER["max_num_logprobs"]
    assert kind.word == k.word  # they share one word


@pytest.mark.fast
def test_kinds_states_and_modes_have_their_numbers():
    assert {kind.name: int(kind) for kind in Kind} == {"TARGET": 3, "DRAFT": 4, "PROMPT": 5}
    assert [mode.name for mode in sorted(LogprobsMode)] == ["RAW", "SCALED", "PROCESSED"]
    assert [state.name for state in sorted(SlotState)] == [
        "TOKENS", "NOTHING", "STOPPED", "PREEMPTED", "RECOVERY_STOP", "PREFILL_FIRST_TOKEN",
    ]  # fmt: skip


@pytest.mark.fast
def test_every_other_kind_and_version_is_refused():
    good = encode(Kind.TARGET, 0, [SlotContents(state=SlotState.STOPPED)])
    words = np.frombuffer(good, np.uint32).copy()
    for kind in range(256):
        words[1] = kind
        if kind in (3, 4, 5):
            assert decode(words.tobytes()).kind == kind
        else:
            with pytest.raises(MessageError, match=f"kind {kind} is none of"):
                decode(words.tobytes())
    words[1] = 3
    for version in (0, 2, 3, 255, 65535):
        words[0] = wire.MAGIC << 16 | version
        with pytest.raises(MessageError, match=f"version {version};"):
            decode(words.tobytes())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("field", "value"),
    [("num_drafts", 65536), ("num_chosen", 65536), ("columns", 65536), ("generation", 2**32),
     ("generation", -1), ("state", 256), ("mode", 256)],
)  # fmt: skip
def test_a_slot_value_that_does_not_fit_is_refused_where_it_is_made(field, value):
    contents = SlotContents(state=SlotState.STOPPED)
    encode(Kind.TARGET, 0, [contents])
    with pytest.raises(wire.WireError, match=rf"{field} = {value} does not fit"):
        encode(Kind.TARGET, 0, [SlotContents(**{"state": SlotState.STOPPED, field: value})],
               max_num_logprobs=0)  # fmt: skip


@pytest.mark.fast
def test_a_draft_message_has_all_the_drafts_of_its_step_or_none():
    whole = drafts(7, 8, 9, columns=2)
    assert decode(encode(Kind.DRAFT, 4, [whole])).num_tokens.tolist() == [3]
    assert decode(encode(Kind.DRAFT, 4, [SlotContents(num_drafts=3)])).num_tokens.tolist() == [0]
    for ids in ((7, 8), (7, 8, 9, 10)):
        with pytest.raises(MessageError, match=f"num_tokens = {len(ids)}"):
            decode(encode(Kind.DRAFT, 4, [SlotContents(num_drafts=3, token_ids=ids)]))


@pytest.mark.parametrize("name", ["mtp", "ngram"])
def test_a_step_sends_one_target_message_with_every_slot(name):
    """Steps are numbered one by one, `running` falls with the last request, no draft follows."""
    result = run(mixed_requests(5, max_tokens=(6, 12)), name)
    messages = result.messages
    assert [message.step for message in messages] == list(range(len(messages)))
    assert {message.kind for message in messages} == {Kind.TARGET}
    assert {message.num_slots for message in messages} == {3}
    assert not any(message.draft_follows for message in messages)
    ends = [records[-1].step for records in result.records.values()]
    assert messages[-1].step >= max(ends)
    alone = run([request("alone", [1, 2, 3], max_tokens=9)], name)
    end = alone.records["alone"][-1].step
    assert [message.running for message in alone.messages] == [
        message.step < end for message in alone.messages
    ]


def test_a_message_carries_the_generation_of_its_launch():
    """A slot that is given away while its step is under way: that step is still of the old one."""
    params, config = decoding.random_model()
    settings = LoopConfig(
        model=config, drafter=decoding.drafter("ngram", config), num_slots=3, max_length=96
    )
    sent = decoding.Sent()
    worker = Worker(settings, params, sent, compiled=decoding.compiled(settings), fused=False)
    for generation, name in ((41, "old"), (42, "new")):
        item = request(name, [1, 2, 3], max_tokens=20)
        worker.apply(Admit(slot=1, generation=generation, request=item))
        worker.advance()
        worker.apply(Release(slot=1, generation=generation))
    worker.finish()
    messages = [decode(words.tobytes()) for words in sent]
    assert [message.generation.tolist() for message in messages] == [[0, 41, 0], [0, 42, 0]]
    assert all(message.state[1] == SlotState.TOKENS for message in messages)


@pytest.mark.fast
def test_only_columns_that_a_slot_asked_for_reach_its_message():
    """K of the batch is 20 here, and the slot that asked for 2 sends 3 columns."""
    output = step_messages.StepOutput(
        logits=jnp.arange(2 * 30, dtype=jnp.float32).reshape(2, 1, 30) % 7,
        token_ids=jnp.array([[3], [4]], jnp.int32),
        num_tokens=jnp.ones(2, jnp.int32),
        num_rows=jnp.ones(2, jnp.int32),
        num_drafts=jnp.zeros(2, jnp.int32),
        drafts=no_drafts(2, 0),
        state=jnp.zeros(2, jnp.int32),
        running=jnp.bool_(True),
        greedy_rows=None,
    )
    slots = [Slot(params=SamplingParams(logprobs=k), most_tokens=1) for k in (2, 20)]
    widths = widths_of_slots(slots, 30)
    words = np.asarray(
        jax.jit(step_messages.target_message, static_argnames="widths")(
            output, asked_of_slots(slots, widths), jnp.zeros(2, jnp.uint32), widths=widths
        )
    )
    message = decode(words[: int(wire.HEADER["num_words"].get(words))])
    assert message.max_num_logprobs == 20
    assert [message.slot(b).logprobs.shape for b in range(2)] == [(1, 3), (1, 21)]
    assert [message.slot(b).topk_ids.shape for b in range(2)] == [(1, 2), (1, 20)]
    fixed = wire.HEADER_WORDS + 2 * wire.SLOT_WORDS
    assert message.num_bytes == 4 * (fixed + 2 + 2 + (3 + 21) + (2 + 20))

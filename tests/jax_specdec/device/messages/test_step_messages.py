"""The messages of a step: one with every slot, as the slots were when the step was launched."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from ipc import wire
from ipc.wire import Kind, SlotState
from jax_specdec.control import Admit, Release
from jax_specdec.device.drafting.drafters import no_drafts
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.batch_options import Widths, options_of_requests, widths_of
from jax_specdec.device.messages.step_messages import StepOutput, step_output, target_message
from jax_specdec.device.worker.worker import Worker
from jax_specdec.records.decode import decode
from jax_specdec.requests import SamplingParams
from pallas_kernels.sampling.types import Verified
from tests.support import decoding, quick_compile
from tests.support.decoding import mixed_requests, request, run


@pytest.mark.fast
def test_slots_that_do_not_decode_emit_nothing():
    logits, count = jnp.zeros((2, 3, 7)), jnp.array([2, 3], jnp.int32)
    drafts = no_drafts(2, 2)._replace(num=jnp.array([2, 2], jnp.int32))
    verified = Verified(jnp.ones((2, 3), jnp.int32), count)
    active, running = jnp.array([True, False]), jnp.bool_(True)
    output = step_output(logits, drafts, verified, active=active, running=running)
    said = output.num_tokens, output.num_rows, output.num_drafts, output.drafts.num, output.state
    assert [x.tolist() for x in said] == [[2, 0], [2, 0], [2, 0], [2, 0],
                                          [SlotState.TOKENS, SlotState.STOPPED]]  # fmt: skip


def two_slots():
    """A step without drafts in which each of two slots emitted one token."""
    return StepOutput(
        logits=jnp.arange(2 * 30, dtype=jnp.float32).reshape(2, 1, 30) % 7,
        token_ids=jnp.array([[3], [4]], jnp.int32),
        num_tokens=jnp.ones(2, jnp.int32),
        num_rows=jnp.ones(2, jnp.int32),
        num_drafts=jnp.zeros(2, jnp.int32),
        drafts=no_drafts(2, 0),
        state=jnp.zeros(2, jnp.int32),
        running=jnp.bool_(True),
    )


@pytest.mark.fast
def test_shapes_that_do_not_go_together_are_noticed():
    params = [SamplingParams()] * 2
    arguments = options_of_requests(params, Widths()), jnp.zeros(2, jnp.uint32)
    good = two_slots()
    assert jax.eval_shape(partial(target_message, widths=Widths()), good, *arguments).ndim == 1
    for wrong in (
        good._replace(num_rows=jnp.ones(3, jnp.int32)),
        good._replace(state=jnp.zeros(2, jnp.float32)),
        good._replace(drafts=no_drafts(3, 0)),
    ):
        with pytest.raises(TypeCheckError, match="output"):
            target_message(wrong, *arguments, widths=Widths())


@pytest.mark.fast
def test_only_columns_that_a_slot_asked_for_reach_its_message():
    """K of the batch is 20 here, and the slot that asked for 2 sends 3 columns."""
    params = [SamplingParams(logprobs=k) for k in (2, 20)]
    widths = widths_of(params, 30)
    packed = quick_compile.jit(target_message, static_argnames="widths")
    words = packed(
        two_slots(), options_of_requests(params, widths), jnp.zeros(2, jnp.uint32), widths=widths
    )
    words = np.asarray(words)
    message = decode(words[: int(wire.HEADER["num_words"].get(words))])
    assert message.max_num_logprobs == 20
    assert [message.slot(b).logprobs.shape for b in range(2)] == [(1, 3), (1, 21)]
    assert [message.slot(b).topk_ids.shape for b in range(2)] == [(1, 2), (1, 20)]
    fixed = wire.HEADER_WORDS + 2 * wire.SLOT_WORDS
    assert message.num_bytes == 4 * (fixed + 2 + 2 + (3 + 21) + (2 + 20))


@pytest.mark.parametrize("name", [pytest.param("mtp", marks=pytest.mark.slow), "ngram"])
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
    """A slot that is given away while its step is under way: that step is still the old one's."""
    params, config = decoding.random_model()
    settings = LoopConfig(
        model=config, drafter=decoding.drafter("ngram", config), num_slots=3, max_length=96
    )
    sent, programs = decoding.Sent(), decoding.compiled(settings)
    worker = Worker(settings, params, sent, prefill_chunk=8, compiled=programs)
    for generation, name in ((41, "old"), (42, "new")):
        item = request(name, [1, 2, 3], max_tokens=20)
        worker.apply(Admit(slot=1, generation=generation, request=item))
        worker.advance()
        worker.apply(Release(slot=1, generation=generation))
    worker.finish()
    messages = [decode(words.tobytes()) for words in sent]
    assert [message.generation.tolist() for message in messages] == [[0, 41, 0], [0, 42, 0]]
    assert all(message.state[1] == SlotState.TOKENS for message in messages)

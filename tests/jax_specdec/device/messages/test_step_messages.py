"""The messages of a step: one with every slot, as the slots were when the step was launched."""

import jax.numpy as jnp
import pytest

from ipc.wire import SlotState
from jax_specdec.control import Admit, Release
from jax_specdec.device.drafting.drafters import no_drafts
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.step_messages import step_output
from jax_specdec.device.worker.worker import Worker
from jax_specdec.records.decode import decode
from pallas_kernels.sampling.types import Verified
from tests.support import decoding
from tests.support.decoding import request


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


def test_a_message_carries_the_generation_of_its_launch():
    """A slot that is given away while its step is under way: that step is still the old one's.

    Generations are on a circle: the one after 2**32 - 1 is 0.
    """
    params, config = decoding.random_model()
    settings = LoopConfig(
        model=config, drafter=decoding.drafter("ngram", config), num_slots=3, max_length=96
    )
    sent, programs = decoding.Sent(), decoding.compiled(settings)
    worker = Worker(settings, params, sent, prefill_chunk=8, compiled=programs)
    for generation, name in ((2**32 - 1, "old"), (0, "new")):
        item = request(name, [1, 2, 3], max_tokens=20)
        worker.apply(Admit(slot=1, generation=generation, request=item))
        worker.advance()
        worker.apply(Release(slot=1, generation=generation))
    worker.finish()
    messages = [decode(words.tobytes()) for words in sent]
    assert [message.generation.tolist() for message in messages] == [[0, 2**32 - 1, 0], [0, 0, 0]]
    assert all(message.state[1] == SlotState.TOKENS for message in messages)

"""A worker and its reader in one process, without a ring: for learners and for measurements."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_specdec.device import Worker
from jax_specdec.engine import Records, Request, control, decode
from jax_specdec.engine import output_processor as processor


class Outbox(list):
    """A list in place of a ring."""

    send = list.append


class Message(NamedTuple):
    """What a message brought, and the reader's state after it."""

    state: processor.ProcessorState
    records: Records


def messages(config, params, requests: Sequence[Request], compiled=None) -> Iterator[Message]:
    """Decode requests, one in each slot.

    Args:
      config: the loop's, a `LoopConfig` of as many slots.
      params: the model's weights.
      compiled: its programs, where they are kept for several calls.
    """
    worker = Worker(config, params, Outbox(), compiled=compiled)
    state = processor.ProcessorState.empty(num_slots=len(requests))
    for slot, request in enumerate(requests):
        worker.apply(control.Admit(slot=slot, generation=1, request=request))
        state = processor.admit(state, slot=slot, generation=1, request=request)
    while worker.busy:
        worker.advance()
        for words in worker.sender:
            state, records = processor.step(state, decode(words.tobytes()))
            yield Message(state, records)
        worker.sender.clear()

"""The worker by itself: the order of its calls, the size of its copies, what compiles, and when."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc import wire
from ipc.wire import SlotState
from jax_specdec.control import Admit, Release, Shutdown
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.worker.worker import Worker
from jax_specdec.records.decode import decode
from tests.support.compiled_here import compiled_here
from tests.support.decoding import Functions, compiled, random_model, request

D, SLOTS, CHUNK, LENGTH = 3, 3, 8, 64
COMPILED = (
    "admit", "release", "prefill_chunk", "score_chunk", "step",
    "prompt_message", "target_message", "draft_message", "leading",
)  # fmt: skip


@dataclass(frozen=True)
class Eager(NoDrafter):
    """Drafts as many tokens as there is room for, beyond any limit."""

    def propose(self, params, state, context):
        drafts, state = super().propose(params, state, context)
        return drafts._replace(num=jnp.full_like(drafts.num, self.num_drafts)), state


class Words:
    """The words of one step on the device; says when they are copied and when they are read."""

    def __init__(self, words, step, log):
        self.words, self.step, self.log, self.size = words, step, log, words.size

    def copy_to_host_async(self):
        self.log.append(("copy", self.step))
        self.words.copy_to_host_async()

    def __array__(self, dtype=None, copy=None):
        self.log.append(("read", self.step))
        return np.asarray(self.words)


class Watched:
    """A worker, and in `log` everything that it did: (what, step)."""

    def __init__(self):
        params, model = random_model()
        config = LoopConfig(model, Eager(D), num_slots=SLOTS, max_length=LENGTH)
        self.functions = compiled(config)
        self.log, self.messages, self.copied, self.launches = [], [], [], 0
        watched = {"step": self.step, "leading": self.leading}
        self.worker = Worker(
            config, params, self, prefill_chunk=CHUNK,
            compiled=Functions(**vars(self.functions) | watched),
        )  # fmt: skip

    def step(self, params, state, *asked, **options):
        self.log.append(("launch", self.launches))
        self.launches += 1
        return self.functions.step(params, state, *asked, **options)

    def leading(self, words, count):
        slots = self.worker.slots
        tokens = [0 if slot.prefill_at is not None else slot.most_tokens for slot in slots]
        columns = [slot.params.num_columns for slot in slots]
        bound = wire.words_bound(tokens, columns, [0] * len(slots))
        cut = self.functions.leading(words, count)
        self.copied.append(SimpleNamespace(bound=bound, size=cut.size, largest=words.size))
        return Words(cut, self.launches - 1, self.log)

    def send(self, data, /):
        message = decode(np.array(data))
        self.log.append(("send", message.step))
        self.messages.append(message)

    def admit(self, slot, generation, prompt=(1, 2, 3), **params):
        item = request(f"{slot}.{generation}", prompt, **params)
        self.worker.apply(Admit(slot=slot, generation=generation, request=item))

    def drain(self, most=60):
        for _ in range(most):
            if not self.worker.busy:
                return
            self.worker.advance()
        raise AssertionError(f"still busy after {most} steps")

    def tokens(self, slot, generation):
        return [
            token
            for message in self.messages
            if message.generation[slot] == generation
            for token in message.slot(slot).token_ids.tolist()
        ]


@pytest.fixture
def watched():
    return Watched()


def test_a_step_is_launched_and_its_copy_started_before_the_last_one_is_read(watched):
    watched.admit(0, 1, max_tokens=9)
    for _ in range(3):
        watched.worker.advance()
    watched.worker.finish()
    assert watched.log == [
        ("launch", 0), ("copy", 0),
        ("launch", 1), ("copy", 1), ("read", 0), ("send", 0),
        ("launch", 2), ("copy", 2), ("read", 1), ("send", 1),
        ("read", 2), ("send", 2),
    ]  # fmt: skip


def test_a_copy_holds_its_message_and_little_more_than_the_slots_can_fill(watched):
    watched.admit(0, 1, max_tokens=12)
    watched.admit(1, 1, max_tokens=5, logprobs=20)
    watched.admit(2, 1, np.arange(3 * CHUNK), max_tokens=7, logprobs=2)
    watched.drain()
    assert len(watched.copied) == len(watched.messages) >= 12
    for copied, message in zip(watched.copied, watched.messages, strict=True):
        assert message.num_bytes / wire.WORD_BYTES <= copied.size <= 1.5 * copied.bound
    # The largest message of these shapes would have been much longer.
    assert any(copied.largest > 3 * copied.bound for copied in watched.copied)


def run_batch(watched, asked, generation, lengths=(2, 9, 17)):
    for slot, k in enumerate(asked):
        prompt = [slot] * lengths[slot]
        watched.admit(slot, generation, prompt, max_tokens=3 + slot, logprobs=k)
    watched.drain()


def test_batches_of_changing_size_do_not_compile_again(watched):
    """K and the number of slots pick the programs; a new bucket costs one cut, the first time."""

    def sizes():
        return {name: getattr(watched.functions, name)._cache_size() for name in COMPILED}

    def others(generation):
        batches = ([3, 17], [0, None, 5], [20, 20, 20], [2], [None, None, None], [None, 6])
        for number, asked in enumerate(batches):
            run_batch(watched, asked, generation + number, lengths=(11, 1, 24))

    for generation, asked in enumerate([[None], [0], [2], [20], [None, 2, 20]], 1):
        run_batch(watched, asked, generation)
    watched.admit(0, 6, max_tokens=9)
    watched.worker.apply(Release(slot=0, generation=6))
    before, buckets = sizes(), {(c.largest, c.size) for c in watched.copied}
    others(10)
    new = {(c.largest, c.size) for c in watched.copied} - buckets
    after = sizes()
    assert after == before | {"leading": after["leading"]}
    assert after["leading"] - before["leading"] <= len(new)
    assert len(buckets | new) < len({c.bound for c in watched.copied})
    with compiled_here() as names:
        others(20)
        assert names == []
        jax.jit(lambda x: x + 7)(np.zeros(3))
        assert names == ["jit(<lambda>)"]


def test_a_release_in_time_stops_its_request_alone_and_a_late_one_nothing(watched):
    watched.admit(0, 1, max_tokens=20)
    watched.admit(1, 1, max_tokens=8)
    watched.worker.advance()
    watched.worker.apply(Release(slot=0, generation=1))
    watched.drain()
    watched.admit(0, 2, max_tokens=6)
    watched.worker.apply(Release(slot=0, generation=1))
    watched.drain()
    # Of the first, the step that was under way.
    assert [len(watched.tokens(*x)) for x in ((0, 1), (1, 1), (0, 2))] == [1, 8, 6]


def test_the_end_of_an_old_request_does_not_free_its_slot(watched):
    """The step after a request's last says STOPPED; the slot may have been given away by then."""
    watched.admit(0, 1, max_tokens=1)
    watched.worker.advance()  # launches the only step with tokens
    watched.worker.advance()  # publishes it; the step under way will say STOPPED
    assert watched.tokens(0, 1)
    watched.admit(0, 2, max_tokens=6)
    watched.worker.advance()
    stopped = watched.messages[-1]
    assert (stopped.state[0], stopped.generation[0]) == (SlotState.STOPPED, 1)
    assert watched.worker.slots[0].generation == 2
    watched.drain()
    assert len(watched.tokens(0, 2)) == 6


def test_every_step_drafts_up_to_the_length_limit_and_no_further(watched):
    lengths = [1, 2, 3, 4, 5, 9]
    for generation, max_tokens in enumerate(lengths, 1):
        watched.admit(0, generation, max_tokens=max_tokens)
        watched.drain()
        emitted = 0
        for message in watched.messages:
            if message.generation[0] == generation and message.num_tokens[0]:
                room = max_tokens - emitted - 1  # one token comes without a draft
                assert message.num_drafts[0] == (min(D, room) if emitted else 0)
                emitted += int(message.num_tokens[0])
        assert emitted == max_tokens


def test_a_shutdown_says_so(watched):
    assert watched.worker.apply(Release(slot=0, generation=1)) is True
    assert watched.worker.apply(Shutdown()) is False

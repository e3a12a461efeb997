"""The cache finds all chunks that a slot holds of a prompt, and never one with other entries."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_specdec.device.worker.prefix_cache import PrefixCache

pytestmark = pytest.mark.fast

SLOTS, LENGTH = 3, 16
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, SLOTS - 1), PROMPT, st.booleans()),
        st.tuples(st.just("chunk"), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("chunk"), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("step")),
    ),
    max_size=40,
)


class Model:
    """Caches whose entries name what they were made of, used as a worker uses them."""

    def __init__(self, chunk):
        self.chunk, self.cache = chunk, PrefixCache(SLOTS, chunk)
        self.entries = [[None] * LENGTH for _ in range(SLOTS)]
        self.prompts = [((), False)] * SLOTS  # token ids, and whether they are shared
        self.at = [None] * SLOTS  # the next position to run; None: decoding, or empty
        self.run, self.reused = 0, 0

    def needed(self, slot, count):
        """The entries of the first positions of the prompt in `slot`, as prefill makes them."""
        prompt, shared = self.prompts[slot]
        return [(prompt[: position + 2], shared) for position in range(count)]

    def admit(self, slot, prompt, shared):
        self.prompts[slot] = (prompt, shared)
        held = self.held(slot)
        start = self.cache.admit(slot, prompt if shared else ())
        assert start == held
        assert self.entries[slot][:start] == self.needed(slot, start)
        self.entries[slot][start:] = ["of an earlier prompt"] * (LENGTH - start)
        self.at[slot] = start
        self.reused += start

    def held(self, slot):
        """How much of its prompt a slot may take from its own caches, by looking at them."""
        return self.common(slot, slot)

    def common(self, source, slot):
        prompt, shared = self.prompts[slot]
        most = (len(prompt) - 2) // self.chunk * self.chunk if shared else 0
        for count in range(most, 0, -self.chunk):
            if self.entries[source][:count] == self.needed(slot, count):
                return count
        return 0

    def run_chunk(self, slot):
        if self.at[slot] is None:
            return
        start, prompt = self.at[slot], self.prompts[slot][0]
        source, held = self.cache.longest(slot)
        assert held <= max(len(prompt) - 2, 0)
        assert held % self.chunk == 0
        if self.prompts[slot][1]:
            assert held == max([start] + [self.common(other, slot) for other in range(SLOTS)])
        if held > start:
            rest = ["of another prompt"] * (LENGTH - held)
            self.entries[slot] = self.entries[source][:held] + rest
            self.cache.hold(slot, held, reused=True)
            self.reused += held - start
            start = held
        end = min(start + self.chunk, len(prompt) - 1)
        self.entries[slot][start:end] = self.needed(slot, end)[start:]
        self.run += end - start
        self.cache.hold(slot, start + self.chunk)
        self.at[slot] = start + self.chunk if start + self.chunk < len(prompt) - 1 else None
        if self.at[slot] is None:
            count = len(prompt) - 1
            assert self.entries[slot][:count] == self.needed(slot, count)

    def step(self):
        """Decode: everything behind the prompts is overwritten."""
        for slot, (prompt, _) in enumerate(self.prompts):
            if prompt and self.at[slot] is None:
                self.entries[slot][len(prompt) - 1 :] = ["decoded"] * (LENGTH - len(prompt) + 1)


def follow(actions, chunk):
    model = Model(chunk)
    for name, *arguments in actions:
        {"admit": model.admit, "chunk": model.run_chunk, "step": model.step}[name](*arguments)
    assert model.cache.reused == model.reused
    return model


@settings(max_examples=300)
@given(ACTIONS, st.integers(1, 5))
def test_what_is_said_to_be_held_is_there_and_nothing_more_could_be_had(actions, chunk):
    follow(actions, chunk)


EQUAL = [("admit", 0, (0, 1, 1, 0, 0, 1), True)] + [("chunk", 0)] * 3


def test_what_no_slot_holds_any_more_is_forgotten():
    model = follow([*EQUAL, ("admit", 0, (1, 1, 1, 1), True)], 2)
    assert model.cache._holders == {}

"""Prompts that begin alike are run once: fewer chunks, and every value is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop.state import LoopConfig, copy_prefix, init_state
from jax_specdec.device.worker.prefix_cache import PrefixCache
from tests.support import in_mode
from tests.support.decoding import VOCAB, Local, random_model, request, run

CHUNK = 8
SHARED = np.random.default_rng(4).integers(0, VOCAB, 60).tolist()


def requests():
    """Three that come together, and others after them; lengths at chunk borders."""
    asks = [{"logprobs": 5}, {"logprobs": 5, "temperature": 0.8, "seed": 3}]
    ids = SHARED
    prompts = [
        ids[:42], ids[:42], [*ids[:30], 1, 2], ids[:33], ids[:34], ids, [*ids[:16], *ids[:9]],
        ids[:9], ids[:10], [3, *ids[:20]], ids[:42],
    ]  # fmt: skip
    return [
        request(f"r{n}", prompt, max_tokens=7 + n % 4, **asks[n % 2])
        for n, prompt in enumerate(prompts)
    ]


def test_every_value_is_right_and_work_is_saved_and_counted():
    reusing, alone = (run(requests(), "mtp", prefix_reuse=reuse) for reuse in (True, False))
    seen, without = (in_mode.check_records(one, requests()) for one in (reusing, alone))
    assert seen == without  # as many drafts are accepted
    every = [max(-(-(len(item.prompt_token_ids) - 1) // CHUNK), 1) for item in requests()]
    assert len(alone.chunks) == sum(every)
    assert alone.worker.prefixes.reused == 0
    saved = len(alone.chunks) - len(reusing.chunks)
    assert saved >= len(alone.chunks) / 3
    assert reusing.worker.prefixes.reused == saved * CHUNK


def test_a_preempted_request_finds_its_prompt_again():
    """Its emitted tokens run again, and its prompt's last chunk."""
    item = request("r", SHARED[:42], max_tokens=24, logprobs=5)

    def evicted_thrice(reuse):
        """The prefill chunks that were run, and what was delivered."""
        local = Local("mtp", chunk=CHUNK, prefix_reuse=reuse)
        records = local.decode_evicted(item, [6, 12, 18])
        return local.chunks, [
            np.asarray(value).tobytes()
            for record in records
            if record.num_tokens
            for value in (record.token_ids, record.logprobs, record.topk_ids, record.num_accepted)
        ]

    (chunks, values), (every, expected) = evicted_thrice(True), evicted_thrice(False)
    assert values == expected
    assert sum(start == 0 for _, start in every) == 4
    # From one free slot to the next, and at last into the first one again.
    first = [(0, start) for start in range(0, 41, CHUNK)]
    assert chunks == [*first, (1, 40), (2, 48), (0, 48), (0, 56)]


def test_copying_changes_one_slot():
    _, config = random_model()
    state = init_state(LoopConfig(config, MtpDrafter(config, 1), num_slots=3, max_length=16))
    random = np.random.default_rng(0)

    def filled(cache):
        return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), cache)

    state = state._replace(cache=filled(state.cache), drafter=filled(state.drafter))
    after = jax.jit(copy_prefix)(state, jnp.int32(2), jnp.int32(0))
    moved = jax.tree.map(lambda x: x[:, [2, 1, 2]], (state.cache, state.drafter))
    expected = state._replace(cache=moved[0], drafter=moved[1])
    jax.tree.map(np.testing.assert_array_equal, after, expected)


# The cache's decisions: all chunks that a slot holds, and never one with other entries -----------

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

    def __init__(self, size):
        self.size, self.cache, self.reused = size, PrefixCache(SLOTS, size), 0
        self.entries = [[None] * LENGTH for _ in range(SLOTS)]
        self.prompts = [((), False)] * SLOTS  # token ids, and whether they are shared
        self.at = [None] * SLOTS  # the next position to run; None: decoding, or empty

    def needed(self, slot, count):
        """The entries of the first positions of the prompt in `slot`, as prefill makes them."""
        prompt, shared = self.prompts[slot]
        return [(prompt[: position + 2], shared) for position in range(count)]

    def common(self, source, slot):
        """How much of its prompt a slot may take from a slot's caches, by looking at them."""
        prompt, shared = self.prompts[slot]
        most = (len(prompt) - 2) // self.size * self.size if shared else 0
        counts = range(most, 0, -self.size)
        return next((n for n in counts if self.entries[source][:n] == self.needed(slot, n)), 0)

    def admit(self, slot, prompt, shared):
        self.prompts[slot] = (prompt, shared)
        start = self.cache.admit(slot, prompt if shared else ())
        assert start == self.common(slot, slot)
        assert self.entries[slot][:start] == self.needed(slot, start)
        self.entries[slot][start:] = ["of an earlier prompt"] * (LENGTH - start)
        self.at[slot] = start
        self.reused += start

    def chunk(self, slot):
        if self.at[slot] is None:
            return
        start, prompt = self.at[slot], self.prompts[slot][0]
        source, held = self.cache.longest(slot)
        assert held <= max(len(prompt) - 2, 0)
        assert held % self.size == 0
        if self.prompts[slot][1]:
            assert held == max([start] + [self.common(other, slot) for other in range(SLOTS)])
        if held > start:
            rest = ["of another prompt"] * (LENGTH - held)
            self.entries[slot] = self.entries[source][:held] + rest
            self.cache.hold(slot, held, reused=True)
            self.reused += held - start
            start = held
        last, following = len(prompt) - 1, start + self.size
        end = min(following, last)
        self.entries[slot][start:end] = self.needed(slot, end)[start:]
        self.cache.hold(slot, following)
        self.at[slot] = following if following < last else None
        if self.at[slot] is None:
            assert self.entries[slot][:last] == self.needed(slot, last)

    def step(self):
        """Decode: everything behind the prompts is overwritten."""
        for slot, (prompt, _) in enumerate(self.prompts):
            if prompt and self.at[slot] is None:
                self.entries[slot][len(prompt) - 1 :] = ["decoded"] * (LENGTH - len(prompt) + 1)


def follow(actions, chunk):
    model = Model(chunk)
    for name, *arguments in actions:
        getattr(model, name)(*arguments)
    assert model.cache.reused == model.reused
    return model


@pytest.mark.fast
@settings(max_examples=300)
@given(ACTIONS, st.integers(1, 5))
def test_the_cache_holds_what_it_says_and_the_most(actions, chunk):
    follow(actions, chunk)


@pytest.mark.fast
def test_what_no_slot_holds_any_more_is_forgotten():
    first = [("admit", 0, (0, 1, 1, 0, 0, 1), True), *3 * [("chunk", 0)]]
    assert follow([*first, ("admit", 0, (1, 1, 1, 1), True)], 2).cache.holders == {}

"""Prompts that begin alike are run once: fewer chunks, and every value is right."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop.state import LoopConfig, copy_prefix, init_state
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

"""Prompts that begin alike are run once: fewer chunks, and not a bit of any value is another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec import loop, sharding
from jax_specdec.adaptive import Adaptive
from jax_specdec.control import Admit
from jax_specdec.drafters import MtpDrafter, NgramDrafter
from tests.collectives import collectives
from tests.decoding import VOCAB, Local, compiled, random_model, request, run

CHUNK = 8
SHARED = np.random.default_rng(4).integers(0, VOCAB, 60).tolist()
FIELDS = (
    "token_ids", "logprobs", "token_ranks", "topk_ids", "chosen_logprobs", "cumulative_logprob",
    "num_drafts", "num_accepted", "draft_token_ids", "draft_logprobs", "finish_reason",
)  # fmt: skip


def requests(plain=False):
    """Three that come together, and others after them; lengths at chunk borders.

    All modes are among them; with `plain`, fewer programs have to be compiled for them.
    """
    asks = [
        {"logprobs": 5, "draft_logprobs": True},
        {"logprobs": 5, "draft_logprobs": True},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "logprobs": 3, "draft_logprobs": True,
         "logprobs_mode": LogprobsMode.PROCESSED, "extra_token_ids": (7, 1)},
        {},
        {"logprobs": 2, "prompt_logprobs": 3},
        {"temperature": 1.1, "seed": 4, "logprobs": 0},
    ]  # fmt: skip
    if plain:
        asks = [{"logprobs": 5}, {"logprobs": 5, "temperature": 0.8, "seed": 3}]
    ids = SHARED
    prompts = [
        ids[:42], ids[:42], [*ids[:30], 1, 2], ids[:33], ids[:34], ids, [*ids[:16], *ids[:9]],
        ids[:9], ids[:10], [3, *ids[:20]], ids[:42],
    ]  # fmt: skip
    return [
        request(f"r{n}", prompt, max_tokens=7 + n % 4, **asks[n % len(asks)])
        for n, prompt in enumerate(prompts)
    ]


def delivered(result, name):
    """All values of a request, as comparable bytes; those of its steps, then its prompt's."""
    records = result.records[name]
    steps = [
        {field: np.asarray(getattr(record, field)).tobytes() for field in FIELDS}
        for record in records
        if record.num_tokens
    ]
    prompts = [record.prompt for record in records if record.prompt is not None]
    return steps, [
        np.asarray(getattr(rows, field)).tobytes()
        for rows in prompts
        for field in ("token_ids", "logprobs", "token_ranks", "topk_ids")
    ]


def assert_same_bits(items, one, other):
    assert items
    for item in items:
        ours, theirs = delivered(one, item.id), delivered(other, item.id)
        assert ours == theirs, f"{item.id} was delivered with other values"
        assert (item.params.prompt_logprobs is not None) == bool(ours[1])


def prompt_entries(worker):
    """What all caches, the drafter's too, hold of the prompts that came last into each slot."""
    is_cache = {"is_leaf": lambda x: isinstance(x, loop.KVCache)}
    state = (worker.state.cache, worker.state.drafter)
    caches = [x for x in jax.tree.leaves(state, **is_cache) if isinstance(x, loop.KVCache)]
    return [
        np.asarray(x[:, index, : slot.prompt_length - 1])
        for cache in caches
        for x in (cache.k, cache.v)
        for index, slot in enumerate(worker.slots)
    ]


@functools.cache
def ran(items, name, reuse, dtype="float32", shards=1):
    """float32: the tests' model; bfloat16: one with Qwen's biases and norms."""
    changes = {} if dtype == "float32" else {"dtype": dtype, "qkv_bias": True, "qk_norm": True}
    params, config = random_model(**changes)
    parallel = sharding.tensor_parallel(config, shards)
    drafter = MtpDrafter(config, 3, parallel) if name == "mtp" else Adaptive(NgramDrafter(3))
    return run(items, drafter, model=(params, config), chunk=CHUNK, parallel=parallel,
               prefix_reuse=reuse)  # fmt: skip


def chunks_of(items):
    """How many chunks there are, each prompt run whole."""
    return sum(max(-(-(len(item.prompt_token_ids) - 1) // CHUNK), 1) for item in items)


@pytest.mark.parametrize(
    ("name", "dtype", "shards"),
    [
        ("mtp", "float32", 1),
        pytest.param("adaptive", "float32", 1, marks=pytest.mark.fast),
        ("mtp", "bfloat16", 1),
        ("mtp", "float32", 2),
    ],
)
def test_every_value_has_the_bits_that_it_has_without(name, dtype, shards):
    items = tuple(requests(plain=(name, dtype, shards) != ("mtp", "float32", 1)))
    reusing, alone = (ran(items, name, reuse, dtype, shards) for reuse in (True, False))
    assert_same_bits(items, reusing, alone)
    # Work is saved, and what is saved is counted.
    assert len(alone.chunks) == chunks_of(items)
    assert len(reusing.chunks) <= len(alone.chunks) * 2 / 3
    assert alone.worker.prefixes.reused == 0
    saved = len(alone.chunks) - len(reusing.chunks)
    assert reusing.worker.prefixes.reused == saved * CHUNK

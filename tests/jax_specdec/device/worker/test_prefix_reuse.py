"""Prompts that begin alike are run once: fewer chunks, and every value is the same.

Requests are in other company then. A step reads its rows once or twice, by how many slots want
logprobs, and the last bits of a logprob differ with it: these are compared as numbers.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.control import WorkerConfig, from_line
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter
from jax_specdec.device.loop.state import LoopConfig, copy_prefix, init_state
from jax_specdec.device.model import sharding
from jax_specdec.device.worker.worker import Worker
from jax_specdec.device.worker.worker_process import make_worker
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.worker_client import WorkerProcess
from tests.support.collectives import collectives
from tests.support.decoding import VOCAB, Local, Sent, compiled, random_model, request, run

pytestmark = pytest.mark.slow  # the programs of a whole worker, twice

CHUNK = 8
SHARED = np.random.default_rng(4).integers(0, VOCAB, 60).tolist()
ROWS = ("token_ids", "token_ranks", "topk_ids")
COUNTS = ("num_drafts", "num_accepted", "finish_reason")
ROUNDED = ("logprobs", "chosen_logprobs", "cumulative_logprob")
ROUNDING = 2e-6  # of a sum of 16 logprobs


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
        {"temperature": 1.1, "seed": 4, "logprobs": 5},
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
    """All values of a request: its steps' and its prompt's as comparable bytes, and logprobs."""
    records = result.records[name]

    def values(rows, fields=ROWS):
        return [np.asarray(getattr(rows, field, None)).tobytes() for field in fields]

    steps = [values(r, ROWS + COUNTS) + values(r.draft) for r in records if r.num_tokens]
    prompts = [r.prompt for r in records if r.prompt is not None]
    rows = [r for r in records if r.num_tokens] + [r.draft for r in records] + prompts
    rounded = [np.ravel(getattr(r, field, None)) for r in rows for field in ROUNDED]
    numbers = np.concatenate([x for x in rounded if x.dtype.kind == "f"] or [np.zeros(0)])
    return steps, [values(prompt) for prompt in prompts], numbers


def assert_same(items, one, other):
    assert items
    for item in items:
        ours, theirs = delivered(one, item.id), delivered(other, item.id)
        same = ours[:2] == theirs[:2] and ours[2].shape == theirs[2].shape
        same = same and np.allclose(ours[2], theirs[2], rtol=0, atol=ROUNDING, equal_nan=True)
        assert same, f"{item.id} was delivered with other values"
        assert (item.params.prompt_logprobs is not None) == bool(ours[1])


@functools.cache
def ran(items, name, reuse, dtype="float32", shards=1):
    params, config = random_model()
    if dtype != config.dtype:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        config = dataclasses.replace(config, dtype=dtype)
    parallel = sharding.tensor_parallel(config, shards)
    num_drafts = 3 if (dtype, shards) == ("float32", 1) else 1
    drafter = NgramDrafter(3) if name == "ngram" else MtpDrafter(config, num_drafts, parallel)
    return run(items, drafter, model=(params, config), chunk=CHUNK, parallel=parallel,
               prefix_reuse=reuse)  # fmt: skip


def chunks_of(items):
    """How many chunks there are, each prompt run whole."""
    return sum(max(-(-(len(item.prompt_token_ids) - 1) // CHUNK), 1) for item in items)


@pytest.mark.parametrize(
    ("name", "dtype", "shards"),
    [
        ("mtp", "float32", 1),
        ("ngram", "float32", 1),
        ("mtp", "bfloat16", 1),
        ("mtp", "float32", 2),
    ],
)
def test_every_value_is_what_it_is_without(name, dtype, shards):
    items = tuple(requests(plain=(name, dtype, shards) != ("mtp", "float32", 1)))
    reusing, alone = (ran(items, name, reuse, dtype, shards) for reuse in (True, False))
    assert_same(items, reusing, alone)
    # Work is saved, and what is saved is counted.
    assert len(alone.chunks) == chunks_of(items)
    assert len(reusing.chunks) <= len(alone.chunks) * 2 / 3
    assert alone.worker.prefixes.reused == 0
    saved = len(alone.chunks) - len(reusing.chunks)
    assert reusing.worker.prefixes.reused == saved * CHUNK


def test_entries_are_taken_from_slots_that_are_live(monkeypatch):
    """No slot waits: a source may have a step under way, or its prompt half through."""
    sources, reuse = set(), Worker._reuse

    def watched(self, index, start):
        source, held = self.prefixes.longest(index)
        if held > start:
            sources.add((self.slots[source].decoding, self.launched is not None))
        return reuse(self, index, start)

    monkeypatch.setattr(Worker, "_reuse", watched)
    again = ran.__wrapped__(tuple(requests()), "mtp", True)
    assert {(True, True), (False, True)} <= sources
    assert_same(requests(), again, ran(tuple(requests()), "mtp", False))


@pytest.mark.parametrize("part", ["cache", "drafter"])
def test_one_poisoned_entry_is_noticed(monkeypatch, part):
    poisoned, reuse = [], Worker._reuse

    def poison(self, index, start):
        held = reuse(self, index, start)
        if held > start and not poisoned:
            poisoned.append((index, held))
            cache = getattr(self.state, part)
            # The last one taken over, by more than rounding hides.
            cache = dataclasses.replace(cache, v=cache.v.at[:, index, held - 1].add(0.01))
            self.state = self.state._replace(**{part: cache})
        return held

    monkeypatch.setattr(Worker, "_reuse", poison)
    bad = ran.__wrapped__(tuple(requests()), "mtp", True)
    assert poisoned
    with pytest.raises(AssertionError, match="was delivered with other values"):
        assert_same(requests(), bad, ran(tuple(requests()), "mtp", False))


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


def test_a_copy_stays_on_its_device():
    _, config = random_model()
    parallel = sharding.tensor_parallel(config, 2)
    settings = LoopConfig(
        config, MtpDrafter(config, 1, parallel), num_slots=3, max_length=16, parallel=parallel
    )
    state = init_state(settings)
    assert len(state.cache.k.sharding.device_set) == 2
    assert state.cache.k.addressable_shards[0].data.shape[-2] == config.num_kv_heads // 2
    program = compiled(settings).copy_prefix.lower(state, jnp.int32(0), jnp.int32(1)).compile()
    assert collectives(program) == []


def test_the_setting_reaches_the_worker(tmp_path, capfd):
    """The engine's configuration is in the first command, and a worker takes it from there."""
    told = tmp_path / "told"
    program = (sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write(input())", str(told))
    for reuse in (True, False):
        config = EngineConfig(vocab_size=264, prefix_reuse=reuse)
        process = WorkerProcess(config, program=program)
        try:
            assert process._process.wait(20)
        finally:
            process.stop(drain=False)
        start = from_line(told.read_text())
        assert start.config == config.worker == WorkerConfig(vocab_size=264, prefix_reuse=reuse)
        small = dataclasses.replace(start.config, num_slots=1, max_length=8, drafter="none")
        small = dataclasses.replace(start, config=small)
        assert make_worker(small, Sent()).prefix_reuse is reuse
    # Here too as it loads the model: what the engine takes for known, the model must know.
    unknown = dataclasses.replace(small.config, vocab_size=265)
    with pytest.raises(SystemExit):
        make_worker(dataclasses.replace(small, config=unknown), Sent())
    assert "vocab_size = 265, but the model has 264 tokens" in capfd.readouterr().err

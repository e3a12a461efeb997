"""Logprobs of prompt tokens: chunk by chunk, the same for all chunk sizes, in little memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.model.params import init_params, named_arrays
from jax_specdec.engine.config import EngineConfig
from jax_specdec.requests import SamplingParams
from pallas_kernels.testing import oracle
from tests.support import in_mode, reference_model
from tests.support.decoding import VOCAB, Local, compiled, random_model, request

LENGTH = 96
CLOSE = 1e-4  # float32 forward passes of other shapes
ROWS = ("token_ids", "token_ranks", "topk_ids", "logprobs")


def messages_of(items, chunk=12):
    """All messages of a run in which slot b decodes items[b]."""
    local = Local("none", chunk=chunk)
    for item in items:
        local.admit(item)
    local.drain()
    return local.messages


def prompt_of(messages, slot):
    """Ids, ranks, top ids, logprobs [n, K + 1 + C] of a slot's prompt, its chunks joined."""
    views = [m.slot(slot) for m in messages if m.kind is Kind.PROMPT and m.num_tokens[slot]]
    return [np.concatenate([getattr(view, name) for view in views]) for name in ROWS]


def prompts():
    random = np.random.default_rng(3)
    ids = [random.integers(0, VOCAB, length).tolist() for length in (41, 17, 6)]
    return [
        request("raw", ids[0], max_tokens=2, prompt_logprobs=5),
        request("scaled", ids[1], max_tokens=3, prompt_logprobs=3, temperature=0.7,
                logprobs_mode=LogprobsMode.SCALED, logprobs=0, extra_token_ids=(4, 4, 1)),
        request("greedy", ids[2], max_tokens=9, prompt_logprobs=1),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def by_chunk():
    return {chunk: messages_of(prompts()[:count], chunk) for chunk, count in ((12, 3), (5, 1))}


@functools.cache
def exact_rows(ids):
    params, config = random_model()
    return reference_model.logits(named_arrays(params), config.to_dict(), ids)[:-1]


@pytest.mark.parametrize("chunk", [12, 5])
def test_every_prompt_token_but_the_first_has_its_logprobs(by_chunk, chunk):
    """Against a forward pass over the whole prompt in float64, in the request's own mode."""
    for slot, item in enumerate(prompts()[: 1 if chunk == 5 else 3]):
        ids, ranks, top, got = prompt_of(by_chunk[chunk], slot)
        params, k = item.params, item.params.prompt_logprobs
        assert ids.tolist() == list(item.prompt_token_ids[1:])
        assert got.shape == (len(ids), k + 1 + len(params.extra_token_ids))
        for n, row in enumerate(exact_rows(item.prompt_token_ids)):
            table = in_mode.logprobs(row, params)
            expected = [
                table[ids[n]],
                *np.sort(table)[::-1][:k],
                *table[list(params.extra_token_ids)],
            ]
            np.testing.assert_allclose(got[n], expected, atol=CLOSE)
            best = [t for t in oracle.top_ids(row, k) if table[t] > -np.inf]
            assert top[n].tolist() == best + [-1] * (k - len(best))
            assert ranks[n] == oracle.token_rank(row, ids[n])


def test_prompt_messages_precede_their_step_and_speak_of_one_slot(by_chunk):
    for chunk, messages in by_chunk.items():
        steps = [m.step for m in messages if m.kind is Kind.TARGET]
        assert steps == list(range(len(steps)))
        following = 0
        for message in messages:
            if message.kind is Kind.TARGET:
                following = message.step + 1
                continue
            assert message.step == following
            (slot,) = np.flatnonzero(message.num_tokens)
            params = prompts()[slot].params
            assert message.num_tokens[slot] <= chunk
            assert (message.num_rows == message.num_tokens).all()
            assert message.state[slot] == SlotState.TOKENS
            assert message.columns[slot] == params.prompt_logprobs + 1
            assert message.mode[slot] == params.logprobs_mode
            assert message.num_chosen[slot] == len(params.extra_token_ids)
            assert message.generation[slot] == 1
            assert message.running
        run = prompts()[: 1 if chunk == 5 else 3]
        chunks = sum(-(-(len(item.prompt_token_ids) - 1) // chunk) for item in run)
        assert sum(message.kind is Kind.PROMPT for message in messages) == chunks


def test_a_prompt_of_one_token_has_no_message():
    messages = messages_of([request("one", [3], max_tokens=2, prompt_logprobs=5)])
    assert {message.kind for message in messages} == {Kind.TARGET}


def test_a_prompt_that_is_preempted_is_run_again_and_delivered_once(by_chunk):
    """From the worker through the engine's processor, with an eviction between two chunks."""
    local, item = Local("none", chunk=12), prompts()[0]
    records = local.decode_evicted(item, [0])
    rows = [record.prompt for record in records if record.prompt is not None]
    assert len(rows) == -(-40 // 12)
    for name, expected in zip(ROWS, prompt_of(by_chunk[12], 0), strict=True):
        np.testing.assert_array_equal(np.concatenate([getattr(r, name) for r in rows]), expected)
    kinds = [message.kind for message in local.messages]
    assert kinds[:2] == [Kind.PROMPT, Kind.TARGET]  # a chunk, and the eviction before another
    assert kinds.count(Kind.PROMPT) == 1 + len(rows)
    assert sum(record.num_tokens for record in records) == item.params.max_tokens


@pytest.mark.fast
@pytest.mark.parametrize("chosen", [0, 128])
@pytest.mark.parametrize("k", [0, 128])
@pytest.mark.parametrize(("num_slots", "num_drafts"), [(1, 0), (64, 3)])
@pytest.mark.parametrize("most", [8, 64, 1024])
def test_a_prompt_message_has_room_in_the_ring(most, num_slots, num_drafts, k, chosen):
    """One more step of tokens would not have; few columns leave room for all that may be run."""
    model = ModelConfig.tiny(vocab_size=4096)
    config = LoopConfig(model, NoDrafter(num_drafts), num_slots=num_slots, max_length=LENGTH)
    settings = EngineConfig(
        vocab_size=4096, num_slots=num_slots, num_drafts=num_drafts, prefill_chunk=most
    )
    params = SamplingParams(logprobs=0, prompt_logprobs=k, extra_token_ids=(1,) * chosen)
    slot = Slot(params=params, most_tokens=1, prefill_at=0, score_from=0)
    size = host_slots.chunk_size(slot, config, most)

    def needed(tokens):
        slots = [slot] + [Slot()] * (num_slots - 1)
        words = host_slots.prompt_bound(slots, host_slots.for_prompt(slot), tokens)
        return words * wire.WORD_BYTES

    assert needed(size) <= settings.message_bytes
    if size < most:
        assert needed(size + host_slots.CHUNK_STEP) > settings.message_bytes
    assert size == most or k == 128
    assert host_slots.chunk_size(Slot(params=SamplingParams(logprobs=3)), config, most) == most


def test_scoring_takes_little_memory_beyond_one_chunk():
    """At most one chunk's logits and 3 % of those of a whole prompt, besides what prefill takes."""
    vocab, chunk, length = 32_768, 64, 2048
    model = ModelConfig.tiny(vocab_size=vocab)
    config = LoopConfig(model, NoDrafter(0), num_slots=1, max_length=length)
    functions = compiled(config)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    state = jax.eval_shape(lambda: init_state(config))
    slot = host_slots.for_prompt(Slot(params=SamplingParams(logprobs=0, prompt_logprobs=20)))
    widths = host_slots.widths_of_slots([slot], vocab)
    place = jax.ShapeDtypeStruct((), jnp.int32)

    def temporaries(function, *args, **static):
        compiled = function.lower(params, state, place, place, *args, **static).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain = temporaries(functions.prefill_chunk, chunk=chunk)
    asked = host_slots.options_of_slots([slot], widths)
    scored = temporaries(functions.score_chunk, asked, chunk=chunk, widths=widths)
    logits = jnp.dtype(model.dtype).itemsize * vocab
    assert chunk * logits < scored  # the measure sees the logits
    assert scored - plain <= chunk * logits + 0.03 * length * logits

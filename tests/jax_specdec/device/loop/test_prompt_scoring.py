"""Logprobs of prompt tokens: chunk by chunk, the same for all chunk sizes, in little memory."""

import dataclasses
import functools
import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.declaration import EVERYTHING, Serves
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.loop import host_slots, prompt_rows
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.messages.batch_options import options_of_requests, widths_of
from jax_specdec.device.model import llama
from jax_specdec.device.model.params import init_params, named_arrays
from jax_specdec.engine.config import EngineConfig
from jax_specdec.requests import SamplingParams
from pallas_kernels.linear import schedule as schedules
from pallas_kernels.testing import oracle
from tests.support import in_mode, quick_compile, reference_model
from tests.support.decoding import VOCAB, Local, compiled, random_model, request

SCORES = Serves(
    max_logprobs=0, max_logprobs_of_prompts=128, max_extra_token_ids=128, kept_token_ids=False
)
CLOSE = 1e-4  # float32 forward passes of other shapes
ROWS = ("token_ids", "token_ranks", "topk_ids", "logprobs")


def messages_of(items, chunk=12, model=None):
    """All messages of a run in which slot b decodes items[b]."""
    local = Local("none", chunk=chunk, model=model)
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
        request("processed", ids[1], max_tokens=2, prompt_logprobs=4, temperature=0.7, top_p=0.8,
                logprobs_mode=LogprobsMode.PROCESSED),
    ]  # fmt: skip


# Which prompts and which model, by the size of chunks: with heads [V, E] and [E, V].
RUNS = {12: ((0, 1, 2), {}), 5: ((0, 3), {"tie_embeddings": False, "logit_softcap": 4.0})}


def items_of(chunk):
    return [prompts()[number] for number in RUNS[chunk][0]]


@functools.cache
def by_chunk(chunk):
    """Where logits are needed, those of three positions at a time."""
    with mock.patch.object(prompt_rows, "PROMPT_LOGITS_BYTES", 4 * VOCAB * 3):
        return messages_of(items_of(chunk), chunk, random_model(**RUNS[chunk][1]))


@pytest.mark.long
@pytest.mark.parametrize("chunk", RUNS)
def test_every_prompt_token_but_the_first_has_its_logprobs(chunk):
    """Against a forward pass over the whole prompt in float64, in the request's own mode."""
    params, config = random_model(**RUNS[chunk][1])
    weights = named_arrays(params)
    for slot, item in enumerate(items_of(chunk)):
        ids, ranks, top, got = prompt_of(by_chunk(chunk), slot)
        params, k = item.params, item.params.prompt_logprobs
        exact = reference_model.logits(weights, config.to_dict(), item.prompt_token_ids)[:-1]
        assert ids.tolist() == list(item.prompt_token_ids[1:])
        assert got.shape == (len(ids), k + 1 + len(params.extra_token_ids))
        for n, row in enumerate(exact):
            table, chosen = in_mode.logprobs(row, params), list(params.extra_token_ids)
            expected = [table[ids[n]], *np.sort(table)[::-1][:k], *table[chosen]]
            np.testing.assert_allclose(got[n], expected, atol=CLOSE)
            best = [t for t in oracle.top_ids(row, k) if table[t] > -np.inf]
            assert top[n].tolist() == best + [-1] * (k - len(best))
            assert ranks[n] == oracle.token_rank(row, ids[n])


@pytest.mark.parametrize("start", [1, 2, 12, 13, 14, 40])
def test_rows_from_a_start_on_are_those_of_the_whole_prompt(start):
    """Of equally large chunks, at the same places: the same bits. Fewer rows are sent."""
    item = prompts()[0]
    asked = dataclasses.replace(item.params, prompt_logprobs_start=start)
    messages = messages_of([dataclasses.replace(item, params=asked)])
    for rows, every in zip(prompt_of(messages, 0), prompt_of(by_chunk(12), 0), strict=True):
        assert len(rows) == 41 - start
        np.testing.assert_array_equal(rows, every[start - 1 :])
    scored = [message for message in messages if message.kind is Kind.PROMPT]
    assert len(scored) == 4 - (start - 1) // 12


@pytest.mark.long
@pytest.mark.parametrize("mode", LogprobsMode)
@pytest.mark.parametrize(("start", "width"), [(0, 1), (14, 20), (5, 200)])
def test_each_row_has_the_logprobs_of_its_own_ids(mode, start, width):
    """Also behind an eviction; against float64, more of them than a list for all rows may have."""
    item, first = prompts()[0], max(start, 1)
    named = np.random.default_rng(start).integers(0, VOCAB, (41 - first, width))
    params = dataclasses.replace(
        item.params, prompt_logprobs=1, prompt_logprobs_start=start, logprobs_mode=mode,
        prompt_extra_token_ids=named, extra_token_ids=(3,), logprobs=0, temperature=0.7, top_p=0.9,
    )  # fmt: skip
    local = Local("none", chunk=12, num_slots=2)
    item = dataclasses.replace(item, params=params)
    records = local.decode_evicted(item, [0])
    rows = np.concatenate([r.prompt.chosen_logprobs for r in records if r.prompt is not None])
    assert rows.shape == named.shape
    weights, config = random_model()
    exact = reference_model.logits(named_arrays(weights), config.to_dict(), item.prompt_token_ids)
    for found, ids, row in zip(rows, named, exact[first - 1 : -1], strict=True):
        np.testing.assert_allclose(found, in_mode.logprobs(row, params)[ids], atol=2 * CLOSE)
    assert all(r.chosen_logprobs.shape[1] == 1 for r in records if r.num_tokens)


def test_rows_before_the_start_come_from_the_prefix_cache():
    """Whole chunks of it: of a request before, and for one after; no row has other bits."""
    prompt, start = list(prompts()[0].prompt_token_ids), 30
    params = {"max_tokens": 2, "prompt_logprobs": 5}
    started = request("started", prompt, prompt_logprobs_start=start, **params)
    plain = request("plain", prompt, max_tokens=2)
    for first, second in ((plain, started), (started, plain)):
        local = Local("none", chunk=12, num_slots=2)
        for item in (first, second):
            local.admit(item)
            local.drain()
        assert local.worker.prefixes.reused == 24
        assert next(place for place in local.chunks if place[0] == 1) == (1, 24)
        rows = prompt_of(local.messages, 0 if first is started else 1)
        for some, every in zip(rows, prompt_of(by_chunk(12), 0), strict=True):
            np.testing.assert_array_equal(some, every[start - 1 :])


@pytest.mark.parametrize("chunk", RUNS)
def test_prompt_messages_precede_their_step(chunk):
    steps = [m.step for m in by_chunk(chunk) if m.kind is Kind.TARGET]
    assert steps == list(range(len(steps)))
    following, names = 0, ("state", "columns", "mode", "num_chosen", "generation")
    for message in by_chunk(chunk):
        if message.kind is Kind.TARGET:
            following = message.step + 1
            continue
        assert (message.step, message.running) == (following, True)
        (slot,) = np.flatnonzero(message.num_tokens)
        params = items_of(chunk)[slot].params
        assert message.num_tokens[slot] <= chunk
        assert (message.num_rows == message.num_tokens).all()
        columns, chosen = params.prompt_logprobs + 1, len(params.extra_token_ids)
        expected = [SlotState.TOKENS, columns, params.logprobs_mode, chosen, 1]
        assert [getattr(message, name)[slot] for name in names] == expected
    lengths = [len(item.prompt_token_ids) - 1 for item in items_of(chunk)]
    chunks = sum(-(-length // chunk) for length in lengths)
    assert sum(message.kind is Kind.PROMPT for message in by_chunk(chunk)) == chunks


def test_a_prompt_of_one_token_has_no_message():
    messages = messages_of([request("one", [3], max_tokens=2, prompt_logprobs=5)])
    assert {message.kind for message in messages} == {Kind.TARGET}


@pytest.mark.parametrize("start", [0, 5])
def test_a_preempted_prompt_is_delivered_once(start):
    """From the worker through the engine's processor, with an eviction between two chunks."""
    local, item = Local("none", chunk=12), prompts()[0]
    item = dataclasses.replace(
        item, params=dataclasses.replace(item.params, prompt_logprobs_start=start)
    )
    records = local.decode_evicted(item, [0])
    rows = [record.prompt for record in records if record.prompt is not None]
    assert len(rows) == -(-40 // 12)
    assert [part.start for part in rows] == [max(start, 1), 13, 25, 37]
    for name, expected in zip(ROWS, prompt_of(by_chunk(12), 0), strict=True):
        found = np.concatenate([getattr(r, name) for r in rows])
        np.testing.assert_array_equal(found, expected[max(start, 1) - 1 :])
    kinds = [message.kind for message in local.messages]
    assert kinds[:2] == [Kind.PROMPT, Kind.TARGET]  # a chunk, and the eviction before another
    assert kinds.count(Kind.PROMPT) == 1 + len(rows)
    assert sum(record.num_tokens for record in records) == item.params.max_tokens


@pytest.mark.fast
@pytest.mark.parametrize("chosen", [0, 128])
@pytest.mark.parametrize("k", [0, 128])
@pytest.mark.parametrize(("num_slots", "num_drafts"), [(1, 0), (64, 3)])
@pytest.mark.parametrize("most", [8, 64, 1024])
@pytest.mark.parametrize("serves", [EVERYTHING, SCORES], ids=["everything", "what is asked"])
def test_a_prompt_message_has_room_in_the_ring(serves, most, num_slots, num_drafts, k, chosen):
    """One more step of tokens would not have; few columns leave room for all that may be run."""
    model = ModelConfig.tiny(vocab_size=4096)
    config = LoopConfig(model, NoDrafter(num_drafts), num_slots=num_slots, max_length=96)
    settings = EngineConfig(
        vocab_size=4096, num_slots=num_slots, num_drafts=num_drafts, prefill_chunk=most,
        serves=serves,
    )  # fmt: skip
    params = SamplingParams(logprobs=0, prompt_logprobs=k, extra_token_ids=(1,) * chosen)
    slot = Slot(params=params, most_tokens=1, prefill_at=0, score_from=0)
    size = host_slots.chunk_size(slot, config, most, serves)

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
    named = jax.ShapeDtypeStruct((chunk, widths.chosen), jnp.int32)
    scored = temporaries(functions.score_chunk, place, named, asked, chunk=chunk, widths=widths)
    logits = jnp.dtype(model.dtype).itemsize * vocab
    assert chunk * logits < scored  # the measure sees the logits
    assert scored - plain <= chunk * logits + 0.03 * length * logits


def program_of(call, count, model, *arrays):
    """The compiled program's text."""
    hidden = jax.ShapeDtypeStruct((count, model.hidden_size), model.dtype)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    lowered = jax.jit(call).lower(params, hidden, ids, jax.ShapeDtypeStruct((), jnp.int32), *arrays)
    return lowered.compile(quick_compile.UNOPTIMIZED).as_text()


def copies(text, *shape):
    """Arrays of the shape, or transposed, that are no parameter of the program and alias none."""
    axes = "|".join((",".join(map(str, shape)), ",".join(map(str, shape[::-1]))))
    made = rf"= \w+\[({axes})\]\S* (?!parameter|get-tuple-element|bitcast)\w"
    return re.findall(made, text)


def test_neither_the_chunks_logits_nor_another_head_is_made():
    """Of a chunk whose float32 logits are more than 48 MiB."""
    count, vocab = 520, 32_768
    model = ModelConfig.tiny(vocab_size=vocab, tie_embeddings=False)
    assert 4 * count * vocab > schedules.FEW_BYTES
    asking = SamplingParams(logprobs=20)
    widths = widths_of([asking], vocab)
    config = LoopConfig(model, NoDrafter(0), num_slots=1, max_length=32)
    named = jnp.zeros((count, 0), jnp.int32)
    call = partial(prompt_rows.prompt_rows, config, widths=widths, extra_token_ids=named)
    asked = jax.eval_shape(lambda: options_of_requests([asking], widths))
    text = program_of(lambda *arrays: call(*arrays[:-1], options=arrays[-1]), count, model, asked)
    assert not copies(text, count, vocab)
    assert not copies(text, vocab, model.hidden_size)

    def plain(params, hidden, ids, num):
        """Negative control: what the check would see."""
        return llama.logits(params, model, hidden)[:, :5] * 2

    assert copies(program_of(plain, count, model), count, vocab)

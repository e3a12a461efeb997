"""The worker by itself: the order of its calls, the size of its copies, what compiles, and when."""

import functools
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc import wire
from ipc.wire import LogprobsMode, SlotState
from jax_specdec.control import Admit, Release, Shutdown
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.loop.programs import cuts_messages
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import decode
from tests.support import in_mode
from tests.support.compiled_here import compiled_here
from tests.support.decoding import VOCAB, Local, request, run, tokens_of
from tests.support.near_ties import NEAR_TIE, margins

D, CHUNK, LENGTH = 3, 8, 64


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


class Watched(Local):
    """A worker, and in `log` everything that it did: (what, step)."""

    def __init__(self):
        super().__init__(Eager(D), max_length=LENGTH, cuts=True)
        self.log, self.copied, self.launches = [], [], 0
        self.worker.compiled.leading, self.worker.sender = self.leading, self

    def step(self, *arguments, **options):
        self.log.append(("launch", self.launches))
        self.launches += 1
        return super().step(*arguments, **options)

    def leading(self, words, count):
        slots = self.worker.slots
        tokens = [0 if slot.prefill_at is not None else slot.most_tokens for slot in slots]
        columns = [slot.params.num_columns for slot in slots]
        bound = wire.words_bound(tokens, columns, [0] * len(slots))
        cut = self.shared.leading(words, count)
        self.copied.append(SimpleNamespace(bound=bound, size=cut.size, largest=words.size))
        return Words(cut, self.launches - 1, self.log)

    def send(self, data, /):
        message = decode(np.array(data))
        self.log.append(("send", message.step))
        self.messages.append(message)

    def admit(self, slot, generation, prompt=(1, 2, 3), **params):
        item = request(f"{slot}.{generation}", prompt, **params)
        self.worker.apply(Admit(slot=slot, generation=generation, request=item))

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


def test_a_step_is_launched_before_the_last_one_is_read(watched):
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


def test_a_copy_is_little_larger_than_its_message(watched):
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
        programs = vars(watched.shared).items()
        return {name: one._cache_size() for name, one in programs if hasattr(one, "_cache_size")}

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


def test_a_release_stops_its_request_alone_or_nothing(watched):
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
    """The step after a request's last says STOPPED; the slot may have been given away by then.

    Its message carries the generation of its launch. The one after 2**32 - 1 is 0.
    """
    last = 2**32 - 1
    watched.admit(0, last, max_tokens=1)
    watched.worker.advance()  # launches the only step with tokens
    watched.worker.advance()  # publishes it; the step under way will say STOPPED
    assert watched.tokens(0, last)
    watched.admit(0, 0, max_tokens=6)
    watched.worker.advance()
    stopped = watched.messages[-1]
    assert (stopped.state[0], stopped.generation[0]) == (SlotState.STOPPED, last)
    assert watched.worker.slots[0].generation == 0
    watched.drain()
    assert len(watched.tokens(0, 0)) == 6


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


# Overlap: random admissions, aborts and evictions meet ends that only the host sees --------------

STOPS = {"stop_sequences", "stop_token_ids"}
ENDS = FinishReason.STOP_SEQUENCE, FinishReason.STOP_TOKEN


@functools.cache
def expected():
    """Greedy requests, of which only the host sees some ends; by id the tokens that each gives."""
    random = np.random.default_rng(11)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (1, 4, 9, 20, 33, 6)]
    plain = [request(f"r{i}", ids, max_tokens=18) for i, ids in enumerate(prompts)]
    result = run(plain, "mtp")
    assert all(min(margins(result, item.id)) > NEAR_TIE for item in plain)  # whatever the company
    ids = [result.token_ids(item.id) for item in plain]
    counts = [record.num_tokens for record in result.records["r3"]]
    [cut, *_] = [sum(counts[:n]) for n in range(1, len(counts)) if counts[n] > 1]
    late = [max(one[:14], key=one.index) for one in ids]  # for the first time as late as possible
    ends = [
        {"stop_sequences": [tuple(ids[0][8:10])], "logprobs": 20},
        {},
        {"stop_token_ids": (late[2],), "logprobs": 19, "draft_logprobs": True},
        # Ends with the first of a step's tokens: those behind it are cut.
        {"stop_sequences": [tuple(ids[3][cut - 1 : cut + 1])], "draft_logprobs": True},
        {"logprobs": 8, "logprobs_mode": LogprobsMode.SCALED},
        # More stop ids than the device watches for: the last one is the host's.
        {"stop_token_ids": (*range(VOCAB, VOCAB + 8), late[5])},
    ]
    ended = [
        request(item.id, item.prompt_token_ids, max_tokens=18, **end)
        for item, end in zip(plain, ends, strict=True)
    ]
    alone = [run([item], "mtp").token_ids(item.id) for item in ended]
    assert [len(one) < 18 for one in alone] == [bool(e.keys() & STOPS) for e in ends]
    return {item.id: (item, one) for item, one in zip(ended, alone, strict=True)}


def follow_schedule(seed):
    """One random schedule; checks every record and returns the run and what was met."""
    random, local = np.random.default_rng(seed), Local("mtp")
    items = [item for item, _ in expected().values()]
    random.shuffle(items)
    waiting, live = [QueuedRequest(request=item) for item in items], set()
    records, met = {item.id: [] for item in items}, Counter()

    def take(record):
        name, whole = record.request_id, expected()[record.request_id][1]
        records[name].append(record)
        tokens = tokens_of(records[name])
        assert tokens == whole[: len(tokens)]
        if not (record.reschedule or record.finish_reason):
            return
        live.remove(name)
        job = local.rank.leave(name)
        if record.reschedule:
            waiting.insert(0, job)
            met["preempted"] += 1
        elif record.finish_reason is FinishReason.ABORT:
            met["aborted"] += 1
        else:
            assert tokens == whole
            assert (record.finish_reason in ENDS) == (len(whole) < 18)
            met["finished"] += 1

    for _ in range(400):
        if not waiting and not live:
            break
        while waiting and local.rank.num_free and random.random() < 0.8:
            job = waiting.pop(0)
            local.rank.admit(job)
            live.add(job.request.id)
        if live and random.random() < 0.15:
            name = random.choice(sorted(live))
            if random.random() < 0.3:
                for record in local.rank.abort(name):
                    take(record)
            else:
                local.rank.evict(name, reschedule=True)
        for record in local.advance():
            take(record)
    assert not waiting
    assert not live
    local.drain()
    begun = [item for item in items if tokens_of(records[item.id])]
    in_mode.check_records(SimpleNamespace(records=records, outputs=local.outputs), begun)
    return local.rank.state.counters, met


@pytest.mark.slow
def test_nothing_that_is_learned_late_corrupts_a_step_under_way():
    """Random schedules, which meet what they are about."""
    total, counters = Counter(), []
    for seed in range(15):
        counted, met = follow_schedule(seed)
        assert met["finished"] + met["aborted"] == 6
        assert counted.preempted == met["preempted"]
        counters.append(counted)
        total.update(met)
    assert len(total) == 3
    # Tokens that were computed behind an end which only the host saw: none was delivered.
    assert sum(c.surplus_tokens for c in counters) > 0
    assert sum(c.cut_tokens for c in counters) > 0


@pytest.mark.parametrize("cuts", [True, False])
def test_a_message_is_cut_only_where_it_is_copied(cuts):
    """One CPU's memory is the host's: a program that cuts would save nothing there."""
    local = Local("ngram", cuts=cuts)
    assert not cuts_messages(local.worker.config)
    local.admit(request("r0", [1, 2, 3], max_tokens=5, logprobs=2))
    local.worker.advance()
    (words,) = local.worker.launched.words
    local.drain()
    bound = wire.words_bound([1 + D] * 3, [3] * 3, [0] * 3)
    assert (words.size <= 1.5 * bound) == cuts
    assert sum(record.num_tokens for record in local.records["r0"]) == 5

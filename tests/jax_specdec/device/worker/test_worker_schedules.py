"""Overlap: every step is launched before the last one's results are known.

Random admissions, aborts and evictions meet requests that end where only the host can see it. What
is delivered of each request is what it gives alone, up to where it was given up.
"""

import functools
from collections import Counter

import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind, LogprobsMode
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import SamplingParams
from tests.support import in_mode
from tests.support.decoding import VOCAB, Local, request, run
from tests.support.near_ties import NEAR_TIE, margins


def requests():
    """Greedy, so that their tokens are known beforehand; only the host sees stop sequences."""
    random = np.random.default_rng(11)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (1, 4, 9, 20, 33, 6)]
    plain = [request(f"p{i}", ids, max_tokens=18) for i, ids in enumerate(prompts)]
    emitted = [run_alone(item)[0] for item in plain]
    within = run_alone(plain[0])[2]  # an end among the tokens of one step: those behind it are cut

    def late(ids):
        """The id that occurs for the first time as late as possible."""
        return max(ids[:14], key=ids.index)

    ends = [
        {"stop_sequences": (tuple(emitted[0][within - 1 : within + 1]),), "logprobs": 20},
        {},
        {"stop_token_ids": (late(emitted[2]),), "logprobs": 19, "draft_logprobs": True},
        {"stop_sequences": (tuple(emitted[3][8:10]),), "draft_logprobs": True},
        {"logprobs": 8, "logprobs_mode": LogprobsMode.SCALED},
        # More stop ids than the device watches for: the last one is the host's.
        {"stop_token_ids": (*range(VOCAB, VOCAB + 8), late(emitted[5]))},
    ]
    return [
        request(f"r{i}", ids, max_tokens=18, **end)
        for i, (ids, end) in enumerate(zip(prompts, ends, strict=True))
    ]


@functools.cache
def run_alone(item):
    """(ids, finish reason, a place before the end of a step) of a request without any company."""
    result = run([item], "mtp")
    assert min(margins(result, item.id)) > NEAR_TIE  # so that other batch shapes give its ids too
    records, done, within = result.records[item.id], 0, 1
    for record in records:
        within = done if record.num_tokens > 1 and done else within
        done += record.num_tokens
    return result.token_ids(item.id), records[-1].finish_reason, within


def follow_schedule(seed):
    """One random schedule; checks every record and returns the run and what was met."""
    random, local = np.random.default_rng(seed), Local("mtp")
    items = requests()
    random.shuffle(items)
    waiting, live = [QueuedRequest(request=item) for item in items], set()
    delivered = {item.id: [] for item in items}
    met = {"preempted": 0, "aborted": 0, "finished": 0}

    def take(record):
        name, tokens = record.request_id, delivered[record.request_id]
        expected, reason, _ = run_alone(record.request)
        tokens += record.token_ids.tolist()
        assert tokens == expected[: len(tokens)]
        if record.num_tokens and record.request.params.logprobs is not None:
            output = local.outputs[record.step]
            in_mode.check_rows(
                output.logits[record.slot][: record.num_tokens], record.request.params,
                record.token_ids, record.logprobs, record.topk_ids, record.token_ranks,
                record.chosen_logprobs,
            )  # fmt: skip
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
            assert (tokens, record.finish_reason) == (expected, reason)
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
    assert not local.worker.busy
    return local, met


@pytest.mark.slow
def test_nothing_that_is_learned_late_corrupts_a_step_under_way():
    """Random schedules, which meet what they are about."""
    total, counters = Counter(), []
    for seed in range(15):
        local, met = follow_schedule(seed)
        assert met["finished"] + met["aborted"] == 6
        counters.append(local.rank.state.counters)
        assert counters[-1].preempted == met["preempted"]
        total.update(met)
    assert min(total.values()) > 0
    # Tokens that were computed behind an end which only the host saw: none was delivered.
    assert sum(c.surplus_tokens for c in counters) > 0
    assert sum(c.cut_tokens for c in counters) > 0


@pytest.mark.fast
def test_the_bounds_of_the_next_messages_by_hand():
    def slot(most_tokens, prefill_at=None, **params):
        return Slot(params=SamplingParams(**params), most_tokens=most_tokens, prefill_at=prefill_at)

    batch = [
        slot(4, logprobs=2, draft_logprobs=True),
        slot(3, logprobs=0, extra_token_ids=(1, 2)),
        slot(4, prefill_at=8, logprobs=20, draft_logprobs=True),  # nothing before its prompt is run
        slot(2, draft_logprobs=True),
        Slot(),
    ]
    fixed = wire.HEADER_WORDS + 5 * wire.SLOT_WORDS
    # A token's id, its rank, K + 1 logprobs, K ids, and the chosen ones.
    assert host_slots.target_bound(batch) == fixed + 4 * (1 + 6) + 3 * (1 + 2 + 2) + 2
    assert host_slots.draft_bound(batch) == fixed + 3 * (1 + 6) + 1


@pytest.mark.slow
def test_messages_of_both_kinds_are_copied_in_buckets_of_their_bound():
    local, copied = Local("mtp"), []
    inner = local.worker.compiled.leading

    def leading(words, count):
        copied.append((count, host_slots.target_bound(local.worker.slots),
                       host_slots.draft_bound(local.worker.slots)))  # fmt: skip
        return inner(words, count)

    local.worker.compiled.leading = leading
    for index in range(3):
        asked = [{}, {"logprobs": 8}, {"logprobs": 20}][index]
        local.admit(request(f"r{index}", [1, 2, 3, 1], max_tokens=6 + 3 * index,
                            draft_logprobs=index > 0, **asked))  # fmt: skip
    local.drain()
    assert {message.kind for message in local.messages} == {Kind.TARGET, Kind.DRAFT}
    for message, (count, target, draft) in zip(local.messages, copied, strict=True):
        bound = target if message.kind is Kind.TARGET else draft
        assert message.num_bytes // wire.WORD_BYTES <= min(bound, count) <= count <= 1.5 * bound

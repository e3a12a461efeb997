"""Overlap: every step is launched before the last one's results are known.

Random admissions, aborts and evictions meet requests that end where only the host can see it. What
is delivered of each request is what it gives alone, up to where it was given up.
"""

import functools
from collections import Counter

import numpy as np
import pytest

from ipc import wire
from ipc.wire import LogprobsMode
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import SamplingParams
from tests.support import in_mode
from tests.support.decoding import VOCAB, Local, request, run
from tests.support.near_ties import NEAR_TIE, margins

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
    found = {}
    for item, one, end in zip(plain, ids, ends, strict=True):
        places = [one.index(token) + 1 for token in end.get("stop_token_ids", ()) if token in one]
        places += [next(n for n in range(2, 19) if tuple(one[n - 2 : n]) == stop)
                   for stop in end.get("stop_sequences", ())]  # fmt: skip
        ended = request(item.id, item.prompt_token_ids, max_tokens=18, **end)
        found[item.id] = ended, one[: min([18, *places])]
    return found


def follow_schedule(seed):
    """One random schedule; checks every record and returns the run and what was met."""
    random, local = np.random.default_rng(seed), Local("mtp")
    items = [item for item, _ in expected().values()]
    random.shuffle(items)
    waiting, live = [QueuedRequest(request=item) for item in items], set()
    delivered = {item.id: [] for item in items}
    met = {"preempted": 0, "aborted": 0, "finished": 0}

    def take(record):
        name, tokens = record.request_id, delivered[record.request_id]
        whole = expected()[name][1]
        tokens += record.token_ids.tolist()
        assert tokens == whole[: len(tokens)]
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

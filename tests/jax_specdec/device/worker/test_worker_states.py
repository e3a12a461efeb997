"""Slots that are evicted, handed over, or freed on a process that publishes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import Kind, SlotState
from jax_specdec.control import Admit, Advance, Evict, Release
from jax_specdec.device.loop.host_slots import admission
from jax_specdec.device.loop.state import start_slot
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import decode
from tests.support.decoding import VOCAB, Local, request, tokens_of

TOKENS, NOTHING, STOPPED = SlotState.TOKENS, SlotState.NOTHING, SlotState.STOPPED
PREEMPTED, RECOVERY_STOP = SlotState.PREEMPTED, SlotState.RECOVERY_STOP


def states(local, slot):
    return [SlotState(int(m.state[slot])) for m in local.messages if m.kind is Kind.TARGET]


@pytest.mark.parametrize("reschedule", [True, False])
def test_an_eviction_is_told_once_even_where_nothing_else_runs(reschedule):
    local = Local("ngram")
    local.admit(request("r", [1, 2, 3], max_tokens=40, logprobs=5))
    slot = local.rank.slots["r"]
    before = local.advance(4)
    local.rank.evict("r", reschedule=reschedule)
    assert local.worker.busy
    *during, last = local.drain()
    verdict = PREEMPTED if reschedule else RECOVERY_STOP
    # The step that was under way still has its tokens, and nothing comes after the verdict.
    assert states(local, slot) == [TOKENS] * 4 + [verdict]
    assert [message.running for message in local.messages] == [True] * 4 + [False]
    assert (last.num_tokens, last.reschedule) == (0, reschedule)
    assert last.finish_reason is (None if reschedule else FinishReason.RECOVERY_ERROR)
    job = local.rank.leave("r")
    emitted = tokens_of(before + during)
    assert job.progress.token_ids == tuple(emitted)
    assert 4 <= len(emitted) < 40
    # The slot is as good as new: its next request is not told about an eviction.
    local.rank.free_slots.sort(key=lambda free: free != slot)  # it would be given away last
    local.admit(request("next", [1, 2], max_tokens=3))
    records = local.drain()
    assert states(local, slot)[5:][0] is TOKENS
    assert set(states(local, slot)[5:]) <= {TOKENS, STOPPED}
    assert sum(record.num_tokens for record in records) == 3


def test_evictions_in_prefill_and_of_ended_requests():
    local = Local("ngram")
    local.admit(request("long", np.arange(60) % VOCAB, max_tokens=5))
    local.admit(request("short", [1, 2], max_tokens=2))
    long, short = (local.rank.slots[name] for name in ("long", "short"))
    local.advance()
    local.rank.evict("long", reschedule=True)
    local.advance(2)
    assert states(local, long)[:2] == [NOTHING, PREEMPTED]
    local.drain()
    ended = len(local.messages)
    local.rank.evict("short", reschedule=True)  # its end has been published
    local.worker.apply(Evict(slot=long, generation=99))
    assert not local.worker.busy
    local.drain()
    assert len(local.messages) == ended
    assert PREEMPTED not in states(local, short)


def test_a_slot_is_not_given_away_before_its_eviction_was_told():
    local = Local("ngram")
    local.admit(request("r", [1, 2, 3], max_tokens=9))
    local.advance()
    local.worker.apply(Evict(slot=0, generation=1))
    following = Admit(slot=0, generation=2, request=request("next", [1], max_tokens=2))
    with pytest.raises(ValueError, match="slot 0 was evicted and no message has said so yet"):
        local.worker.apply(following)
    # An engine that gives the request up does not wait for the answer.
    local.worker.apply(Release(slot=0, generation=1))
    local.worker.apply(following)
    local.worker.advance()
    local.worker.finish()
    assert len(local.sent) == 2


@pytest.mark.parametrize("temperature", [1e-4, 0.7, 1e4])
def test_handed_over_drafts_are_certain_whatever_the_sampling(temperature):
    local = Local("mtp")
    item = request("r", [1, 2], max_tokens=9, temperature=temperature, top_p=0.5, min_p=0.1)
    given = admission(item, 96, 3, (9, 4))
    state = start_slot(local.worker.state, jnp.int32(0), given)
    state = local.shared.prefill_chunk(
        local.worker.params, state, jnp.int32(0), jnp.int32(0), chunk=8
    )
    assert state.drafts.token_ids[0, :2].tolist() == [9, 4]
    assert (state.drafts.num.tolist(), state.certain.tolist()) == ([2, 0, 0], [True, False, False])
    q = jax.tree.map(np.asarray, state.drafts.q)
    np.testing.assert_array_equal(q.ids[0, :2, 0], [9, 4])
    assert (q.ids[0, :, 1:] == -1).all()
    np.testing.assert_array_equal(np.exp(q.logprobs[0, :2]).sum(axis=1), 1.0)


@pytest.mark.fast
def test_drafts_taken_over_fit_the_first_step():
    def taken(drafts, length=96, **params):
        found = admission(request("r", [1, 2], **params), length, 3, drafts)
        return found.draft_token_ids.tolist()

    assert taken((5, 6), max_tokens=9) == [5, 6, -1]
    assert taken((5, 6, 7, 8), max_tokens=9) == [5, 6, 7]
    assert taken((5, 6, 7), max_tokens=2) == [5, -1, -1]
    assert taken((5, 6, 7), max_tokens=1) == [-1, -1, -1]
    assert taken((5, 6, 7), length=5, max_tokens=3) == [5, 6, -1]
    local = Local("mtp")
    wrong = Admit(slot=0, generation=1, request=request("r", [1]), draft_token_ids=(3, VOCAB))
    with pytest.raises(ValueError, match=rf"draft token id {VOCAB} is outside .*0 to {VOCAB - 1}"):
        local.worker.apply(wrong)
    assert not local.worker.busy


@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_silent_rank_takes_every_step(prefill_only):
    """The seed system returned early on such ranks, and left preempted flags behind."""
    random = np.random.default_rng(5)
    speaking, silent = both = [
        Local("mtp", prefill_only=prefill_only, publish=publish) for publish in (True, False)
    ]
    generations, told = [0, 0, 0], 0
    for number in range(60):
        slot, kind, commands = int(random.integers(3)), random.integers(4), [Advance()]
        place = {"slot": slot, "generation": generations[slot]}
        if not speaking.worker.slots[slot].occupied and not speaking.worker.slots[slot].verdict:
            generations[slot] += 1
            item = request(str(number), random.integers(0, VOCAB, 1 + number % 12).tolist(),
                           max_tokens=int(random.integers(1, 9)), logprobs=5,
                           prompt_logprobs=1 if number % 3 == 0 else None)  # fmt: skip
            commands.insert(0, Admit(slot=slot, generation=generations[slot], request=item))
        elif kind < 2:
            command = Release(**place) if kind else Evict(**place, reschedule=bool(number % 2))
            commands.insert(0, command)
        for local in both:
            for command in commands:
                local.worker.apply(command)
        assert speaking.worker.slots == silent.worker.slots
        messages = [decode(words.tobytes()) for words in speaking.sent]
        told += sum(int(np.isin(m.state, [PREEMPTED, RECOVERY_STOP]).sum()) for m in messages)
        speaking.sent.clear()
    for local in both:
        while local.worker.busy:
            local.worker.advance()
        assert not any(slot.verdict or slot.occupied for slot in local.worker.slots)
    assert told > (0 if prefill_only else 5)
    assert silent.sent == []
    assert len(speaking.outputs) == len(silent.outputs) > 40
    for ours, theirs in zip(speaking.outputs, silent.outputs, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.state, theirs.state)

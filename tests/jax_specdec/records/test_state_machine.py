"""The processor against its slow reference, driven through random lives of its slots.

The same machine, given a processor with one deliberate fault, must notice.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ipc.wire import Kind, SlotState
from jax_specdec.records import output_processor
from jax_specdec.records.batch import FinishReason, Statistics
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorError, ProcessorState, Progress
from jax_specdec.requests import Request
from tests.support import random_messages
from tests.support.reference_processor import Occupant, ReferenceProcessor, Refused
from tests.support.reference_values import as_dict, marginals, marginals_of, plain

SLOTS = 4


class Machine:
    """Both processors, fed the same; `LIFE` says how often each of its methods is called."""

    product = output_processor

    def __init__(self, first_step):
        self.state = ProcessorState.empty(SLOTS, first_step=first_step)
        self.reference = ReferenceProcessor(SLOTS, first_step)
        self.asked = [{} for _ in range(SLOTS)]  # requests by slot and generation
        self.names = 0
        self.preempted = []  # (request, progress, its statistics as the reference has them)

    def admit(self, rng):
        slot, again = rng.randrange(SLOTS), rng.random() < 0.5
        if self.reference.slots[slot] is not None:
            return
        progress, earlier = Progress(), []
        if again and self.preempted:
            request, progress, earlier = self.preempted.pop()
        else:
            self.names += 1
            request = random_messages.random_request(rng, str(self.names))
            if rng.random() < 0.3 and request.params.max_tokens > 1:
                earlier = [(3, 1, 1), (0, 0, 0)]
                brought = (random_messages.VOCABULARY + 1,)  # in no stop rule
                sums = {"cumulative_logprob": -0.75, "statistics": Statistics(*marginals(earlier))}
                progress = Progress(token_ids=brought, **sums)
            elif rng.random() < 0.3:  # preempted while its prompt was run
                progress = Progress(num_prompt_rows=rng.randrange(len(request.prompt_token_ids)))
        prefill = rng.random() < 0.15
        generation = self.reference.last_generation[slot] + rng.randint(1, 3)
        self.asked[slot][generation] = request
        self.state = self.product.admit(
            self.state, slot, generation, request, prefill=prefill, handed_over=progress
        )
        brought = [*progress.token_ids], progress.cumulative_logprob or 0.0, earlier
        occupant = Occupant(request, slot, generation, prefill, *brought, progress.num_prompt_rows)
        self.reference.admit(occupant)

    def release(self, rng):
        slot, ended_only = rng.randrange(SLOTS), rng.random() < 0.9
        occupant = self.reference.slots[slot]
        if ended_only and (occupant is None or occupant.phase == "running"):
            return
        self.state = self.product.release(self.state, slot)
        self.reference.release(slot)

    def abort(self, rng):
        if rng.random() < 0.5:  # so that a record waits
            self.send_target(rng, True, self.reference.next_step)
        name = str(rng.randint(1, self.names + 1))  # perhaps unknown, or ended long ago
        occupants = [occupant for occupant in self.reference.slots if occupant is not None]
        if occupants and rng.random() < 0.8:
            name = rng.choice(occupants).request.id
        self.state, records = self.product.abort(self.state, name)
        self.compare(records, self.reference.abort(name))

    def target(self, rng):
        draft_follows = rng.random() < 0.5
        for _ in range(rng.randint(1, 4)):  # some steps in a row, so that requests grow old
            self.send_target(rng, draft_follows, self.reference.next_step)

    def target_out_of_order(self, rng):
        step = self.reference.next_step + rng.choice((-2, -1, 1, 3))
        self.send_target(rng, False, max(step, 0))

    def draft(self, rng):
        step = self.reference.next_step + rng.choice((-1, -1, -1, 0, 0, -2, 1))
        if step < 0:
            return
        slots = [
            random_messages.random_draft_slot(rng, request.params, generation)
            for request, generation, _ in (self.subject(rng, slot) for slot in range(SLOTS))
        ]
        data = encode(Kind.DRAFT, step, slots)
        self.both(data, lambda: self.reference.draft(step, slots))

    def prompt(self, rng):
        slots = []
        for slot in range(SLOTS):
            request, generation, occupant = self.subject(rng, slot)
            came = occupant.prompt_came if occupant is not None else 0
            wanted = request.params.prompt_logprobs is not None and rng.random() < 0.8
            if not wanted and rng.random() < 0.98:
                slots.append(SlotContents(generation=generation, state=SlotState.NOTHING))
                continue
            first = 1 + came + (rng.random() < 0.02)  # at times, a row is lost
            tokens = request.prompt_token_ids[first : first + rng.randint(1, 3)]
            asked = rng, request.params, generation, list(tokens)
            slots.append(random_messages.random_prompt_slot(*asked))
        data = encode(Kind.PROMPT, self.reference.next_step, slots)
        self.both(data, lambda: self.reference.prompt(slots))

    def flush(self, rng):
        reason = rng.choice((None, None, FinishReason.WORKER_LOST))
        self.state, records = self.product.flush(self.state, reason)
        self.compare(records, self.reference.flush(None if reason is None else reason.name))

    def counters_agree(self):
        counters, reference = self.state.counters, self.reference
        for name in ("cut_tokens", "surplus_tokens", "late_slots", "late_drafts", "preempted"):
            assert getattr(counters, name) == getattr(reference, name), name
        expected = tuple(reference.finished.count(reason.name) for reason in FinishReason)
        assert counters.finished == expected
        assert marginals_of(self.state.statistics) == marginals(reference.statistics())

    def subject(self, rng, slot):
        """The request that a slot of a message is about: its last one, or at times an older one.

        With its generation, and whoever the reference has in the slot.
        """
        generations = sorted(self.asked[slot])
        if not generations:
            return Request(id="none", prompt_token_ids=(0,)), 0, None
        generation = rng.choice(generations[-2:]) if rng.random() < 0.3 else generations[-1]
        return self.asked[slot][generation], generation, self.reference.slots[slot]

    def send_target(self, rng, draft_follows, step):
        slots = []
        for slot in range(SLOTS):
            request, generation, occupant = self.subject(rng, slot)
            if not self.asked[slot]:  # never admitted: the worker has nothing to say
                slots.append(SlotContents(state=SlotState.STOPPED))
                continue
            prefilling = occupant is not None and occupant.prompt_came < occupant.prompt_due
            if prefilling and rng.random() < 0.98:
                state = rng.choice((SlotState.NOTHING, SlotState.NOTHING, SlotState.PREEMPTED))
                slots.append(SlotContents(generation=generation, state=state))
                continue
            fresh = occupant is None or not occupant.token_ids or rng.random() < 0.02
            slot = random_messages.random_target_slot(rng, request.params, generation, fresh=fresh)
            slots.append(slot)
        data = encode(Kind.TARGET, step, slots, draft_follows=draft_follows)
        self.both(data, lambda: self.reference.target(step, draft_follows, slots))

    def both(self, data, reference_call):
        try:
            expected = reference_call()
        except Refused:
            with pytest.raises(ProcessorError):
                self.product.step(self.state, decode(data))
            return
        self.state, records = self.product.step(self.state, decode(data))
        self.compare(records, expected)

    def compare(self, records, expected):
        expected = [
            {**{k: plain(v) for k, v in e.items()}, "statistics": marginals(e["statistics"])}
            for e in expected
        ]
        assert len(records) == len(list(records)) == len(expected)
        actual = [as_dict(record, expected[0]) for record in records] if expected else []
        # Requests are independent of each other: each one's own records come in order.
        expected.sort(key=lambda record: record["request_id"])
        actual.sort(key=lambda record: record["request_id"])
        for one, other in zip(actual, expected, strict=True):
            assert one == other, [name for name in one if one[name] != other[name]]
        for record in records.events():
            if record.reschedule:
                self.schedule_again(record)

    def schedule_again(self, record):
        occupant = self.reference.slots[record.slot]
        if occupant is not None and occupant.generation == record.generation:
            progress = Progress(
                token_ids=tuple(occupant.token_ids),
                cumulative_logprob=record.cumulative_logprob,
                statistics=record.statistics,
                num_prompt_rows=max(occupant.prompt_before, occupant.prompt_came),
            )
            self.preempted.append((record.request, progress, occupant.statistics()))
            self.state = self.product.release(self.state, record.slot)
            self.reference.release(record.slot)


LIFE = {
    "admit": 8, "release": 3, "abort": 3, "target": 10, "target_out_of_order": 1, "draft": 8,
    "prompt": 4, "flush": 0.5,
}  # fmt: skip


def live(machine, seed, steps=60):
    """Put a new machine of this class through random calls; raises what it raises."""
    rng = random.Random(seed)
    one = machine(first_step=rng.choice((0, 2**40)))
    for name in rng.choices([*LIFE], [*LIFE.values()], k=steps):
        if name != "flush" or one.names:
            getattr(one, name)(rng)
            one.counters_agree()


@pytest.mark.parametrize("lives", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_lives_of_the_slots(lives):
    for seed in range(lives):
        live(Machine, seed)


# --- The negative control. ---


def ignoring_generations(state, message):
    """A `step` that takes whatever a message says for the slots' last requests."""
    current = state.admitted.generation[: message.num_slots]
    return output_processor.step(state, replace(message, generation=np.maximum(current, 0)))


def test_the_machine_notices_a_fault():
    """Within the very lives in which the product and the reference agree."""

    class Faulty(Machine):
        product = SimpleNamespace(**{**vars(output_processor), "step": ignoring_generations})

    with pytest.raises((AssertionError, ProcessorError, pytest.fail.Exception)):
        [live(Faulty, seed) for seed in range(100)]

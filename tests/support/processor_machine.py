"""The processor and its slow reference, driven side by side through random lives of their slots.

`Machine` has the rules, for Hypothesis. `live` calls the same rules at fixed weights without it: it
cannot shrink a failure, but takes a fifth of the time.
"""

import random
from types import SimpleNamespace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipc.wire import Kind, SlotState
from jax_specdec.records import output_processor
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorError, ProcessorState, Progress
from jax_specdec.records.statistics import Statistics
from jax_specdec.requests import Request
from tests.support.random_messages import (
    VOCABULARY,
    random_draft_slot,
    random_prompt_slot,
    random_request,
    random_target_slot,
)
from tests.support.reference_processor import Occupant, ReferenceProcessor, Refused
from tests.support.reference_values import as_dict, marginals, marginals_of, plain

SLOTS = 4
PRODUCT = SimpleNamespace(
    **{name: getattr(output_processor, name) for name in ("admit", "release", "abort", "step")},
    flush=output_processor.flush,
)
SEEDS = st.integers(0, 2**32 - 1)


class Machine(RuleBasedStateMachine):
    """Both processors, fed the same."""

    product = PRODUCT

    @initialize(first_step=st.sampled_from((0, 2**40)))
    def begin(self, first_step):
        self.state = ProcessorState.empty(SLOTS, first_step=first_step)
        self.reference = ReferenceProcessor(SLOTS, first_step)
        self.asked = [{} for _ in range(SLOTS)]  # requests by slot and generation
        self.names = 0
        self.preempted = []  # (request, progress, its statistics as the reference has them)

    @rule(seed=SEEDS, slot=st.integers(0, SLOTS - 1), again=st.booleans())
    def admit(self, seed, slot, again):
        if self.reference.slots[slot] is not None:
            return
        rng = random.Random(seed)
        progress, earlier = Progress(), {"steps": [], "num_tokens": 0}
        if again and self.preempted:
            request, progress, earlier = self.preempted.pop()
        else:
            self.names += 1
            request = random_request(rng, str(self.names))
            if rng.random() < 0.3 and request.params.max_tokens > 1:
                brought = (VOCABULARY + 1,)  # in no stop rule
                earlier = {"steps": [(3, 1), (0, 0)], "num_tokens": 1}
                progress = Progress(
                    token_ids=brought,
                    cumulative_logprob=-0.75,
                    statistics=Statistics(*marginals(earlier)),
                )
            elif rng.random() < 0.3:  # preempted while its prompt was run
                came = rng.randrange(len(request.prompt_token_ids))
                progress = Progress(num_prompt_rows=came)
        prefill = rng.random() < 0.15
        generation = self.reference.last_generation[slot] + rng.randint(1, 3)
        self.asked[slot][generation] = request
        self.state = self.product.admit(
            self.state, slot, generation, request, prefill=prefill, handed_over=progress
        )
        brought = [*progress.token_ids], progress.cumulative_logprob or 0.0, earlier
        occupant = Occupant(request, slot, generation, prefill, *brought, progress.num_prompt_rows)
        self.reference.admit(occupant)

    @rule(
        slot=st.integers(0, SLOTS - 1), ended_only=st.sampled_from((True, True, True, True, False))
    )
    def release(self, slot, ended_only):
        occupant = self.reference.slots[slot]
        if ended_only and (occupant is None or occupant.phase == "running"):
            return
        self.state = self.product.release(self.state, slot)
        self.reference.release(slot)

    @rule(seed=SEEDS)
    def abort(self, seed):
        rng = random.Random(seed)
        if rng.random() < 0.5:  # so that a record waits
            self.send_target(seed, True, self.reference.next_step)
        name = str(rng.randint(1, self.names + 1))  # perhaps unknown, or ended long ago
        occupants = [occupant for occupant in self.reference.slots if occupant is not None]
        if occupants and rng.random() < 0.8:
            name = rng.choice(occupants).request.id
        self.state, records = self.product.abort(self.state, name)
        self.compare(records, self.reference.abort(name))

    @rule(seed=SEEDS, draft_follows=st.booleans(), more=st.integers(0, 3))
    def target(self, seed, draft_follows, more):
        for n in range(more):  # some steps in a row, so that requests grow old
            self.send_target(seed + 1 + n, draft_follows, self.reference.next_step)
        self.send_target(seed, draft_follows, self.reference.next_step)

    @rule(seed=SEEDS, off=st.sampled_from((-2, -1, 1, 3)))
    def target_out_of_order(self, seed, off):
        self.send_target(seed, False, max(self.reference.next_step + off, 0))

    @rule(seed=SEEDS, off=st.sampled_from((-1, -1, -1, 0, 0, -2, 1)))
    def draft(self, seed, off):
        step = self.reference.next_step + off
        if step < 0:
            return
        rng = random.Random(seed)
        slots = [
            random_draft_slot(rng, request.params, generation)
            for request, generation in (self.subject(rng, slot) for slot in range(SLOTS))
        ]
        data = encode(Kind.DRAFT, step, slots)
        self.both(data, lambda: self.reference.draft(step, slots))

    @rule(seed=SEEDS)
    def prompt(self, seed):
        rng = random.Random(seed)
        slots = []
        for slot in range(SLOTS):
            request, generation = self.subject(rng, slot)
            occupant = self.reference.slots[slot]
            came = occupant.prompt_came if occupant is not None else 0
            wanted = request.params.prompt_logprobs is not None and rng.random() < 0.8
            if not wanted and rng.random() < 0.98:
                slots.append(SlotContents(generation=generation, state=SlotState.NOTHING))
                continue
            first = 1 + came + (rng.random() < 0.02)  # at times, a row is lost
            tokens = request.prompt_token_ids[first : first + rng.randint(1, 3)]
            slots.append(random_prompt_slot(rng, request.params, generation, list(tokens)))
        data = encode(Kind.PROMPT, self.reference.next_step, slots)
        self.both(data, lambda: self.reference.prompt(slots))

    @precondition(lambda self: self.names > 0)
    @rule(reason=st.sampled_from((None, None, FinishReason.WORKER_LOST)))
    def flush(self, reason):
        self.state, records = self.product.flush(self.state, reason)
        self.compare(records, self.reference.flush(None if reason is None else reason.name))

    @invariant()
    def counters_agree(self):
        if not hasattr(self, "state"):
            return
        counters, reference = self.state.counters, self.reference
        for name in ("cut_tokens", "surplus_tokens", "late_slots", "late_drafts", "preempted"):
            assert getattr(counters, name) == getattr(reference, name), name
        expected = tuple(reference.finished.count(reason.name) for reason in FinishReason)
        assert counters.finished == expected
        assert marginals_of(self.state.statistics) == marginals(reference.statistics())

    def subject(self, rng, slot):
        """The request that a slot of a message is about: its last one, or at times an older one."""
        generations = sorted(self.asked[slot])
        if not generations:
            return Request(id="none", prompt_token_ids=(0,)), 0
        generation = rng.choice(generations[-2:]) if rng.random() < 0.3 else generations[-1]
        return self.asked[slot][generation], generation

    def send_target(self, seed, draft_follows, step):
        rng = random.Random(seed)
        slots = []
        for slot in range(SLOTS):
            request, generation = self.subject(rng, slot)
            occupant = self.reference.slots[slot]
            if not self.asked[slot]:  # never admitted: the worker has nothing to say
                slots.append(SlotContents(state=SlotState.STOPPED))
                continue
            prefilling = occupant is not None and occupant.prompt_came < occupant.prompt_due
            if prefilling and rng.random() < 0.98:
                state = rng.choice((SlotState.NOTHING, SlotState.NOTHING, SlotState.PREEMPTED))
                slots.append(SlotContents(generation=generation, state=state))
                continue
            fresh = occupant is None or not occupant.token_ids or rng.random() < 0.02
            slots.append(random_target_slot(rng, request.params, generation, fresh=fresh))
        data = encode(Kind.TARGET, step, slots, draft_follows=draft_follows)
        self.both(data, lambda: self.reference.target(step, draft_follows, slots))

    def both(self, data, reference_call):
        try:
            expected = reference_call()
        except Refused:
            assert self.refuses(data), "the reference refuses this message"
            return
        self.state, records = self.product.step(self.state, decode(data))
        self.compare(records, expected)

    def refuses(self, data):
        try:
            self.product.step(self.state, decode(data))
        except ProcessorError:
            return True
        return False

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


def seeded(rng):
    return {"seed": rng.getrandbits(32)}


def slotted(rng):
    return {"slot": rng.randrange(SLOTS)}


# What `live` calls: each rule's weight, and its arguments.
LIFE = {
    "admit": (
        8,
        lambda rng: seeded(rng) | {"slot": rng.randrange(SLOTS), "again": rng.random() < 0.5},
    ),
    "release": (3, lambda rng: slotted(rng) | {"ended_only": rng.random() < 0.9}),
    "abort": (1, seeded),
    "target": (
        10,
        lambda rng: seeded(rng) | {"draft_follows": rng.random() < 0.5, "more": rng.randint(0, 3)},
    ),
    "target_out_of_order": (1, lambda rng: seeded(rng) | {"off": rng.choice((-2, -1, 1, 3))}),
    "draft": (8, lambda rng: seeded(rng) | {"off": rng.choice((-1, -1, -1, 0, 0, -2, 1))}),
    "prompt": (4, seeded),
    "flush": (0.5, lambda rng: {"reason": rng.choice((None, None, FinishReason.WORKER_LOST))}),
}


def live(machine, seed, steps=60):
    """Put a new `Machine` through random rules; raises what it raises."""
    rng = random.Random(seed)
    machine.begin(first_step=rng.choice((0, 2**40)))
    weights = [weight for weight, _ in LIFE.values()]
    for name in rng.choices([*LIFE], weights, k=steps):
        if name != "flush" or machine.names:
            getattr(machine, name)(**LIFE[name][1](rng))
            machine.counters_agree()

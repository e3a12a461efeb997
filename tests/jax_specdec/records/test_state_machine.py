"""The processor against its slow reference, driven through random lives of its slots.

The same machine, given a processor with one deliberate fault, must notice: each fault below is a
trap that the seed system fell into, or a way to get the contract wrong.
"""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.records import apply_target, output_processor, prompt_logprobs
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorError, ProcessorState, Progress
from jax_specdec.records.statistics import Statistics
from jax_specdec.requests import Request, SamplingParams
from tests.support.reference_processor import ReferenceProcessor, Refused

SLOTS = 4
VOCABULARY = 5
PRODUCT = SimpleNamespace(
    **{name: getattr(output_processor, name) for name in ("admit", "release", "abort", "step")},
    flush=output_processor.flush,
)
SEEDS = st.integers(0, 2**32 - 1)


def random_params(rng):
    logprobs = rng.choice((None, 0, 1, 3))
    return SamplingParams(
        max_tokens=rng.choice((1, 2, 5, 12, 30)),
        stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 1)))),
        stop_sequences=tuple(
            tuple(rng.choices(range(VOCABULARY), k=rng.choice((1, 2, 2, 3, 4))))
            for _ in range(rng.choice((0, 1, 3)))
        ),
        logprobs=logprobs,
        logprobs_mode=rng.choice(list(LogprobsMode)),
        extra_token_ids=tuple(range(rng.randint(0, 2))) if logprobs is not None else (),
        draft_logprobs=rng.random() < 0.5,
        prompt_logprobs=rng.choice((None, None, None, None, 0, 2)),
    )


def random_request(rng, name):
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2, 5))))
    return Request(id=name, prompt_token_ids=prompt, params=random_params(rng))


def random_rows(rng, params, n, **fields):
    """Slot fields for n tokens, rows included, some of them invalid."""
    columns, chosen = params.num_columns, len(params.extra_token_ids)
    rows = n if columns else 0
    if fields["state"] is SlotState.PREFILL_FIRST_TOKEN:
        rows = min(rows, 1)
    invalid = [rng.random() < 0.05 for _ in range(rows)]
    values = [0.0, -0.125, -1.5, -3.25, -math.inf]
    return SlotContents(
        token_ids=[rng.randrange(VOCABULARY) for _ in range(n)],
        mode=params.logprobs_mode,
        columns=columns,
        num_chosen=chosen,
        token_ranks=[0 if bad else rng.randint(1, 9) for bad in invalid],
        logprobs=[
            [math.nan if bad else rng.choice(values) for _ in range(columns + chosen)]
            for bad in invalid
        ],
        topk_ids=[
            [-1 if bad else rng.randrange(VOCABULARY) for _ in range(columns - 1)]
            for bad in invalid
        ],
        **fields,
    )


def random_target_slot(rng, params, generation, *, fresh):
    states = [SlotState.TOKENS] * 30 + list(SlotState)
    state = rng.choice(states)
    if state is SlotState.PREFILL_FIRST_TOKEN and not fresh:
        state = SlotState.TOKENS
    drafts = rng.choice((0, 0, 1, 2, 4))
    if state is SlotState.TOKENS:
        n = rng.randint(1, drafts + 1)
    elif state is SlotState.PREFILL_FIRST_TOKEN:
        n = drafts + 1
    else:
        return SlotContents(state=state, generation=generation, num_drafts=drafts)
    return random_rows(rng, params, n, state=state, generation=generation, num_drafts=drafts)


def random_draft_slot(rng, params, generation):
    n = rng.choice((0, 1, 2, 4))
    if rng.random() < 0.02:
        params = perhaps_other_rows(rng, params)
    return random_rows(rng, params, n, state=SlotState.TOKENS, generation=generation, num_drafts=n)


def perhaps_other_rows(rng, params):
    """Parameters with the rows of some request: another K, mode or number of chosen ids."""
    other = random_params(rng)
    names = ("logprobs", "logprobs_mode", "extra_token_ids")
    return replace(params, **{name: getattr(other, name) for name in names})


def random_prompt_slot(rng, params, generation, tokens):
    """What a chunk's message says: `tokens` with the columns of the prompt's own K."""
    asked = replace(params, logprobs=params.prompt_logprobs or 0)
    fields = {"state": SlotState.TOKENS, "generation": generation}
    if not tokens:
        return SlotContents(generation=generation, state=SlotState.NOTHING)
    return replace(random_rows(rng, asked, len(tokens), **fields), token_ids=tokens)


def plain(value):
    """NumPy values as Python's; NaN as a string, so that it equals itself."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value


def as_dict(record, reference_names):
    """A record of the product in the words of the reference."""
    values = {name: plain(value_of(record, name)) for name in reference_names}
    reason, statistics = record.finish_reason, record.statistics
    values["finish_reason"] = None if reason is None else reason.name
    values["prompt"] = prompt_rows(record.prompt)
    values["statistics"] = None if statistics is None else marginals_of(statistics)
    return values


def value_of(record, name):
    """The record's value of a name of the reference, which has the drafts' side by side."""
    part, _, rest = name.partition("draft_")
    if part or not rest:
        return getattr(record, name)
    return None if record.draft is None else getattr(record.draft, rest)


def prompt_rows(rows):
    """The rows one by one, each with its place in the prompt."""
    if rows is None:
        return None
    columns = (rows.token_ids, rows.logprobs, rows.chosen_logprobs, rows.token_ranks, rows.topk_ids)
    each = zip(*(plain(column) for column in columns), strict=True)
    return [[rows.start + n, *row] for n, row in enumerate(each)]


def marginals_of(statistics):
    return (
        statistics.steps_by_drafts,
        statistics.rejected_at,
        statistics.all_accepted,
        statistics.num_tokens,
    )


def marginals(reference):
    """The reference's list of (drafts, accepted) as the three histograms of the product."""
    if reference is None:
        return None
    steps = reference["steps"]
    return (
        histogram([drafts for drafts, _ in steps]),
        histogram([accepted for drafts, accepted in steps if accepted < drafts]),
        histogram([accepted for drafts, accepted in steps if accepted == drafts]),
        reference["num_tokens"],
    )


def histogram(values):
    return tuple(values.count(n) for n in range(max(values, default=-1) + 1))


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
        self.reference.admit(
            slot,
            generation,
            request,
            prefill,
            progress.token_ids,
            progress.cumulative_logprob,
            earlier,
            progress.num_prompt_rows,
        )

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
        """Whom a slot of a message is about: usually its last generation, at times an older one."""
        generations = sorted(self.asked[slot])
        if not generations:
            return Request(id="nobody", prompt_token_ids=(0,)), 0
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


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


# --- Negative controls: the machine must catch each of these processors. ---


def wrap_step(change):
    """A processor whose `step` sees `change(state, message)` in place of the message."""

    def step(state, message):
        return output_processor.step(state, change(state, message))

    return {"step": step}


def ignores_generations(monkeypatch):
    def change(state, message):
        current = state.admitted.generation[: message.num_slots]
        return replace(message, generation=np.maximum(current, 0))

    return wrap_step(change)


def joins_drafts_of_any_step(monkeypatch):
    def change(state, message):
        if message.kind is Kind.DRAFT and state.waiting is not None:
            return replace(message, step=state.waiting.step)
        return message

    return wrap_step(change)


def joins_drafts_by_list_position(monkeypatch):
    original = output_processor._join

    def join(batch, draft):
        positions = np.arange(len(batch))
        generation = draft.generation.copy()
        generation[positions] = batch.generation
        moved, late = original(
            replace(batch, slots=positions), replace(draft, generation=generation)
        )
        return replace(moved, slots=batch.slots), late

    monkeypatch.setattr(output_processor, "_join", join)
    return {}


def drops_the_drafts_of_a_step_in_which_a_request_finished(monkeypatch):
    original = output_processor._join

    def join(batch, draft):
        joined, late = original(batch, draft)
        return (batch, late) if batch.finish_reason.any() else (joined, late)

    monkeypatch.setattr(output_processor, "_join", join)
    return {}


def takes_any_rows_of_drafts(monkeypatch):
    original = apply_target.check_rows

    def check_rows(message, *rest):
        if message.kind is Kind.TARGET:
            original(message, *rest)

    monkeypatch.setattr(apply_target, "check_rows", check_rows)
    return {}


def adds_up_the_logprobs_of_cut_tokens(monkeypatch):
    original = apply_target.cumulative

    def cumulative(before, message, slots, kept):
        return original(before, message, slots, message.num_rows[slots])

    monkeypatch.setattr(apply_target, "cumulative", cumulative)
    return {}


def forgets_earlier_steps_in_stop_sequences(monkeypatch):
    monkeypatch.setattr(apply_target, "tail", lambda state, *_: state.columns.tail)
    return {}


def delivers_what_comes_after_the_end(monkeypatch):
    def step(state, message):
        ended = state.columns.phase == output_processor.Phase.ENDED
        phase = np.where(ended, output_processor.Phase.RUNNING, state.columns.phase)
        return output_processor.step(
            replace(state, columns=replace(state.columns, phase=phase)), message
        )

    return {"step": step}


def admitting(change):
    """A processor that admits `change(request, handed_over)` in place of the two."""

    def admit(state, slot, generation, request, *, prefill, handed_over):
        request, handed_over = change(request, handed_over)
        return output_processor.admit(
            state, slot, generation, request, prefill=prefill, handed_over=handed_over
        )

    return {"admit": admit}


def counts_the_handed_over_tokens_for_nothing(monkeypatch):
    def longer(request, handed_over):
        most = request.params.max_tokens + len(handed_over.token_ids)
        return replace(request, params=replace(request.params, max_tokens=most)), handed_over

    return admitting(longer)


def forgets_the_statistics_before_a_preemption(monkeypatch):
    return admitting(lambda request, over: (request, replace(over, statistics=Statistics())))


def counts_the_steps_before_a_preemption_twice(monkeypatch):
    def release(state, slot):
        earlier = state.admitted.earlier[slot]
        after = output_processor.release(state, slot)
        return replace(after, past=after.past + earlier)

    return {"release": release}


def delivers_a_prompts_logprobs_again(monkeypatch):
    return admitting(lambda request, over: (request, replace(over, num_prompt_rows=0)))


def takes_lost_rows_of_a_prompt_for_granted(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "check_complete", lambda *_: None)
    return {}


def takes_any_rows_for_the_prompts_next_ones(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "_check", lambda *_: None)
    return {}


def leaves_the_waiting_record_behind_on_abort(monkeypatch):
    def abort(state, request_id):
        after, records = output_processor.abort(replace(state, waiting=None), request_id)
        return replace(after, waiting=state.waiting), records

    return {"abort": abort}


def takes_lost_steps_for_granted(monkeypatch):
    return wrap_step(
        lambda state, message: (
            replace(message, step=state.next_step) if message.kind is Kind.TARGET else message
        )
    )


def counts_accepted_drafts_after_the_cut(monkeypatch):
    original = apply_target.acceptance

    def acceptance(columns, slots, emitted):
        return original(columns, slots, replace(emitted, count=np.minimum(emitted.count, 2)))

    monkeypatch.setattr(apply_target, "acceptance", acceptance)
    return {}


@pytest.mark.parametrize(
    "fault",
    [
        ignores_generations,
        joins_drafts_of_any_step,
        joins_drafts_by_list_position,
        drops_the_drafts_of_a_step_in_which_a_request_finished,
        takes_any_rows_of_drafts,
        adds_up_the_logprobs_of_cut_tokens,
        forgets_earlier_steps_in_stop_sequences,
        delivers_what_comes_after_the_end,
        counts_the_handed_over_tokens_for_nothing,
        forgets_the_statistics_before_a_preemption,
        counts_the_steps_before_a_preemption_twice,
        delivers_a_prompts_logprobs_again,
        pytest.param(takes_lost_rows_of_a_prompt_for_granted, marks=pytest.mark.slow),
        takes_any_rows_for_the_prompts_next_ones,
        leaves_the_waiting_record_behind_on_abort,
        takes_lost_steps_for_granted,
        counts_accepted_drafts_after_the_cut,
    ],
    ids=lambda fault: fault.__name__,
)
def test_the_machine_notices_a_processor_that(fault, monkeypatch):
    parts = fault(monkeypatch)

    class Faulty(Machine):
        product = SimpleNamespace(**{**vars(PRODUCT), **parts})

    until_noticed = settings(
        max_examples=3000,
        stateful_step_count=50,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    with pytest.raises((AssertionError, ProcessorError)):
        run_state_machine_as_test(Faulty, settings=until_noticed)

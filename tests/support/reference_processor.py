"""A second output processor: slow, obvious, one token at a time, without code of the product.

Slots of a message are any objects with the attributes of a slot's contents (`state`, `generation`,
`token_ids`, ...), as nested Python lists; states and reasons are compared by name. Records are
plain dictionaries.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.random_kept import as_lists

ROW = ("logprobs", "chosen_logprobs", "token_ranks", "topk_ids")
VALUES = ("entropy", "log_sum_exp")  # in the order in which a row has them
DIGEST = 0b1100  # the bits of the two halves behind them


class Refused(Exception):
    """A message that the reference refuses."""


@dataclass
class Occupant:
    """One request's stay in one slot; `earlier` has the statistics of its stays before."""

    request: Any
    slot: int
    generation: int
    prefill: bool
    token_ids: list
    cumulative_logprob: float
    earlier: list
    prompt_before: int  # rows of the prompt delivered in earlier stays
    prompt_came: int = 0
    phase: str = "running"
    steps: list = field(default_factory=list)  # (proposed, accepted, delivered), each with tokens

    def __post_init__(self):
        asked = self.request.params.prompt_logprobs is not None and not self.token_ids
        self.prompt_first = max(1, self.request.params.prompt_logprobs_start)
        length = len(self.request.prompt_token_ids)
        self.prompt_due = length - self.prompt_first if asked else 0

    def statistics(self):
        return self.earlier + self.steps

    def stop_after_newest_token(self):
        """(reason, what stopped it) when the newest token ends the request, else None."""
        params = self.request.params
        if self.token_ids[-1] in params.stop_token_ids:
            return "STOP_TOKEN", self.token_ids[-1]
        for sequence in params.stop_sequences:
            ends = tuple(self.token_ids[-len(sequence) :]) == tuple(sequence)
            if ends and len(self.token_ids) > params.min_tokens:
                return "STOP_SEQUENCE", tuple(sequence)
        if len(self.token_ids) == params.max_tokens:
            return "LENGTH", None
        if self.prefill:
            return "PREFILL_HANDOVER", None
        return None


def row_of(contents, j):
    """Row j, by the names of a record."""
    row, columns = contents.logprobs[j], contents.columns
    chosen = row[columns : columns + contents.num_chosen]
    values = row[:columns], chosen, contents.token_ranks[j], contents.topk_ids[j]
    return dict(zip(ROW, values, strict=True))


class ReferenceProcessor:
    def __init__(self, num_slots, first_step=0):
        self.slots = [None] * num_slots
        self.last_generation = [-1] * num_slots
        self.asked = {}  # (slot, generation) to the parameters of the request admitted there
        self.next_step = first_step
        self.waiting = []  # records of step next_step - 1
        self.early_draft = None  # slots of the draft message of step next_step
        self.past_steps = []
        self.cut_tokens = self.surplus_tokens = self.late_slots = self.late_drafts = 0
        self.preempted = 0
        self.finished = []

    def admit(self, occupant):
        slot, generation = occupant.slot, occupant.generation
        assert self.slots[slot] is None
        self.slots[slot] = occupant
        self.last_generation[slot] = generation
        self.asked[slot, generation] = occupant.request.params

    def release(self, slot):
        if self.slots[slot] is not None:
            self.past_steps += self.slots[slot].steps
            self.slots[slot] = None

    def abort(self, request_id):
        found = [one for one in self.slots if one is not None and one.request.id == request_id]
        return self.end(found[0], "ABORT") if found else []

    def flush(self, reason):
        left = [one for one in self.slots if one is not None and reason is not None]
        ended = [record for one in left for record in self.end(one, reason)]
        released, self.waiting = self.waiting, []
        if self.early_draft is not None:
            self.late_drafts += sum(len(slot.token_ids) > 0 for slot in self.early_draft)
            self.early_draft = None
        return released + ended

    def end(self, occupant, reason):
        """The record with the reason: one that waits for a draft message, or an empty one."""
        if occupant.phase not in ("running", "preempted"):
            return []
        occupant.phase = "ended"
        self.finished.append(reason)
        place = occupant.slot, occupant.generation
        mine = [one for one in self.waiting if (one["slot"], one["generation"]) == place]
        self.waiting = [one for one in self.waiting if one not in mine]
        (record,) = mine or [self.empty_record(occupant, self.next_step - 1)]
        ends = {"reschedule": False, "finish_reason": reason, "statistics": occupant.statistics()}
        return [record | ends | {"handover_draft_ids": None}]  # no decode node goes on

    def target(self, step, draft_follows, slots):
        if step != self.next_step:
            raise Refused("steps are lost or came twice")
        self.check(slots)
        found = [self.slot_record(step, slot, contents) for slot, contents in enumerate(slots)]
        records = [record for record in found if record is not None]
        released, self.waiting = self.waiting, []
        self.next_step += 1
        if self.early_draft is not None:
            self.join(records, self.early_draft)
            self.early_draft = None
            return released + records
        if draft_follows:
            self.waiting = records
            return released
        return released + records

    def draft(self, step, slots):
        if step == self.next_step - 1 and self.waiting:
            for record in self.waiting:
                self.check_drafts(record["slot"], record["generation"], slots)
            released, self.waiting = self.waiting, []
            self.join(released, slots)
            return released
        if step < self.next_step:
            self.late_drafts += sum(len(slot.token_ids) > 0 for slot in slots)
            return []
        if step > self.next_step or self.early_draft is not None:
            raise Refused("targets are lost, or the draft came twice")
        self.early_draft = slots
        released, self.waiting = self.waiting, []
        return released

    def prompt(self, slots):
        """One record for each slot with rows that were not delivered before."""
        spoken = [
            (slot, contents)
            for slot, contents in enumerate(slots)
            if contents.state.name == "TOKENS" and contents.token_ids
        ]
        for slot, contents in spoken:
            self.check_generation(slot, contents)
            occupant = self.slots[slot]
            if self.is_about(contents, occupant):
                if not occupant.prompt_due or occupant.token_ids:
                    raise Refused("rows that were not asked for")
                prompt = list(occupant.request.prompt_token_ids)
                ahead = prompt[occupant.prompt_first + occupant.prompt_came :]
                if ahead[: len(contents.token_ids)] != contents.token_ids:
                    raise Refused("other tokens than the prompt's next ones")
        records = []
        for slot, contents in spoken:
            occupant = self.slots[slot]
            if not self.is_about(contents, occupant):
                self.count_unasked(slot, contents, len(contents.token_ids))
                continue
            record = self.empty_record(occupant, self.next_step) | {"prompt": []}
            for j, token_id in enumerate(contents.token_ids):
                occupant.prompt_came += 1
                if occupant.prompt_came > occupant.prompt_before:
                    values = row_of(contents, j).values()
                    place = occupant.prompt_first + occupant.prompt_came - 1
                    record["prompt"].append([place, token_id, *values])
            if record["prompt"]:
                records.append(record)
        return records

    def check_generation(self, slot, contents):
        if contents.generation > self.last_generation[slot]:
            raise Refused("a generation that was never admitted")

    def count_unasked(self, slot, contents, num_tokens):
        """Tokens behind their request's end, or about an earlier one."""
        if contents.generation == self.last_generation[slot]:
            self.surplus_tokens += num_tokens
        else:
            self.late_slots += 1

    def check(self, slots):
        for slot, contents in enumerate(slots):
            if contents.state.name in ("NOTHING", "STOPPED"):
                continue
            self.check_generation(slot, contents)
            occupant = self.slots[slot]
            if not self.is_about(contents, occupant):
                continue
            if contents.token_ids and occupant.prompt_came < occupant.prompt_due:
                raise Refused("a token before the last of its prompt's rows")
            if contents.state.name == "PREFILL_FIRST_TOKEN" and occupant.token_ids:
                raise Refused("a first token after other tokens")
            if contents.token_ids:
                self.check_rows(slot, contents)
                params = self.asked[slot, contents.generation]
                due = sum(getattr(params, v) << n for n, v in enumerate(VALUES))
                if contents.values != due + DIGEST * params.row_digest:
                    raise Refused("other values of rows than were asked for")
            if self.early_draft is not None:
                self.check_drafts(slot, contents.generation, self.early_draft)

    def check_drafts(self, slot, generation, draft_slots):
        drafts = draft_slots[slot]
        if drafts.token_ids and drafts.generation == generation:
            self.check_rows(slot, drafts)

    def check_rows(self, slot, contents):
        params = self.asked[slot, contents.generation]
        chosen = len(params.extra_token_ids)
        asked = (0, 0) if params.logprobs is None else (params.logprobs + 1, chosen)
        if (contents.columns, contents.num_chosen, contents.mode) != (*asked, params.logprobs_mode):
            raise Refused("other rows than were asked for")

    @staticmethod
    def is_about(contents, occupant):
        running = contents.generation, "running"
        return occupant is not None and (occupant.generation, occupant.phase) == running

    def slot_record(self, step, slot, contents):
        kind, occupant = contents.state.name, self.slots[slot]
        if kind in ("NOTHING", "STOPPED"):
            return None
        first = kind == "PREFILL_FIRST_TOKEN"
        token_ids = contents.token_ids[:1] if first else contents.token_ids
        if not self.is_about(contents, occupant):
            self.count_unasked(slot, contents, len(token_ids))
            return None
        record = self.empty_record(occupant, step)
        if kind == "PREEMPTED":
            occupant.phase = "preempted"
            self.preempted += 1
            return record | {"reschedule": True, "statistics": occupant.statistics()}
        if kind == "RECOVERY_STOP":
            self.finish(occupant, record, "RECOVERY_ERROR")
            return record | {"statistics": occupant.statistics()}
        record["num_drafts"] = 0 if first else contents.num_drafts
        record["num_accepted"] = len(token_ids) - 1
        for j in range(len(token_ids)):
            if occupant.phase == "ended":
                self.cut_tokens += 1
            else:
                self.deliver(occupant, record, contents, j)
        if first and record["finish_reason"] in (None, "PREFILL_HANDOVER"):
            record["handover_draft_ids"] = contents.token_ids[1:]
        counts = record["num_drafts"], record["num_accepted"], len(record["token_ids"])
        occupant.steps.append(counts)
        if occupant.phase == "ended":
            record["statistics"] = occupant.statistics()
        return record

    def deliver(self, occupant, record, contents, j):
        """Token j of this step, with its row."""
        record["token_ids"].append(contents.token_ids[j])
        occupant.token_ids.append(contents.token_ids[j])
        if contents.columns:
            for name, value in row_of(contents, j).items():
                record[name].append(value)
            record["valid"].append(contents.token_ranks[j] != 0)
            values = list(contents.logprobs[j][contents.columns + contents.num_chosen :])
            for name in VALUES:
                if record[name] is not None:
                    record[name].append(values.pop(0))
            if record["row_digest"] is not None:
                record["row_digest"].append(np.float32(values).view("<u8")[0])
            occupant.cumulative_logprob += contents.logprobs[j][0]
            record["cumulative_logprob"] = occupant.cumulative_logprob
        if contents.kept is not None:
            record["kept"].append(as_lists(contents.kept)[j])
        stop = occupant.stop_after_newest_token()
        if stop is not None:
            reason, what = stop
            self.finish(occupant, record, reason)
            record["stop_token_id"] = what if reason == "STOP_TOKEN" else None
            record["stop_sequence"] = what if reason == "STOP_SEQUENCE" else None

    def finish(self, occupant, record, reason):
        occupant.phase = "ended"
        self.finished.append(reason)
        record["finish_reason"] = reason

    def join(self, records, draft_slots):
        joined = 0
        for record in records:
            contents = draft_slots[record["slot"]]
            if contents.generation == record["generation"] and contents.token_ids:
                joined += 1
                record["draft_token_ids"] = contents.token_ids
                if contents.columns:
                    rows = [row_of(contents, j) for j in range(len(contents.token_ids))]
                    for name in rows[0]:
                        record[f"draft_{name}"] = [row[name] for row in rows]
        self.late_drafts += sum(len(slot.token_ids) > 0 for slot in draft_slots) - joined

    def empty_record(self, occupant, step):
        asked = occupant.request.params.logprobs is not None
        ends = ("finish_reason", "stop_token_id", "stop_sequence", "handover_draft_ids")
        drafts = (f"draft_{name}" for name in ("token_ids", *ROW))
        return {
            **dict.fromkeys((*ends, *drafts, "prompt", "statistics")),
            **{name: [] if asked else None for name in (*ROW, "valid")},
            **{name: [] if getattr(occupant.request.params, name) else None for name in VALUES},
            "row_digest": [] if occupant.request.params.row_digest else None,
            "request_id": occupant.request.id,
            "slot": occupant.slot,
            "generation": occupant.generation,
            "step": step,
            "token_ids": [],
            "kept": [] if occupant.request.params.kept_token_ids else None,
            "cumulative_logprob": occupant.cumulative_logprob if asked else None,
            "num_drafts": 0,
            "num_accepted": 0,
            "reschedule": False,
        }

    def statistics(self):
        """Of all stays, past and present; each counts once, where it was."""
        return self.past_steps + [
            step for one in self.slots if one is not None for step in one.steps
        ]

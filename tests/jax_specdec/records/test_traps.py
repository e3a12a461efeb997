"""The traps that the seed system (FastDeploy's logprob path) fell into, on the engine's side.

The numbers are those of its list of traps. Traps 2 and 6 in the packer are in test_pack_traps, trap
3 end to end in test_delivery, trap 7 in test_pack and test_wire.
"""

import subprocess
import sys

import numpy as np
import pytest

from jax_specdec.records.batch import FinishReason
from jax_specdec.records.output_processor import (
    ProcessorState,
    StepLost,
    abort,
    admit,
    release,
    step,
)
from tests.support.import_rules import PACKAGES, is_engine_side, modules
from tests.support.processor_messages import draft, drafts, request, target, tokens

pytestmark = pytest.mark.fast


def test_trap_1_the_kind_is_not_the_slot_count_and_row_0_is_not_every_row():
    """Kinds are 3 and 4; batches of 1, 3, 4 and 5 slots keep every slot's own columns."""
    for num_slots in (1, 3, 4, 5):
        state = ProcessorState.empty(num_slots)
        for slot in range(num_slots):
            state = admit(state, slot, 1, request(str(slot), logprobs=1, draft_logprobs=True))
        slots = [tokens(10 * slot, 10 * slot + 1, columns=2) for slot in range(num_slots)]
        state, _ = step(state, target(0, *slots, draft_follows=True))
        _, records = step(state, draft(0, *(drafts(slot, columns=2) for slot in range(num_slots))))
        assert len(records) == num_slots
        for slot, record in enumerate(records):
            ids = [10 * slot, 10 * slot + 1]
            assert record.token_ids.tolist() == ids
            assert record.topk_ids.tolist() == [[id] for id in ids]
            assert record.logprobs[:, 0].tolist() == [-(id + 1) / 8 for id in ids]
            assert record.draft.token_ids.tolist() == [slot]
            assert record.draft.logprobs[:, 0].tolist() == [-(slot + 1) / 8]


def test_trap_2_every_slot_has_its_own_row_width():
    widths = [(None, 0), (0, 0), (20, 0), (1, 3), (128, 128), (None, 0), (5, 1)]
    state, slots = ProcessorState.empty(len(widths)), []
    for slot, (k, chosen) in enumerate(widths):
        extra = tuple(range(chosen))
        state = admit(state, slot, 1, request(str(slot), logprobs=k, extra_token_ids=extra))
        columns = 0 if k is None else k + 1
        slots.append(tokens(slot, slot + 1, columns=columns, chosen=chosen))
    _, records = step(state, target(0, *slots))
    for slot, (record, (k, chosen)) in enumerate(zip(records, widths, strict=True)):
        if k is None:
            assert record.logprobs is None
            continue
        assert record.logprobs.shape == (2, k + 1)
        assert record.topk_ids.shape == (2, k)
        assert record.chosen_logprobs.shape == (2, chosen)
        expected = [-(slot + 1) / 8, -(slot + 2) / 8]
        assert record.logprobs[:, 0].tolist() == expected
        assert record.cumulative_logprob == sum(expected)


def test_trap_3_a_lost_step_is_an_error_and_not_a_gap_in_the_text():
    state = admit(ProcessorState.empty(1), 0, 1, request())
    state, _ = step(state, target(0, tokens(5)))
    with pytest.raises(StepLost, match=r"steps 1 to 1 \(1\) are lost"):
        step(state, target(2, tokens(7)))


def three_requests():
    """Requests a, b, c in the slots 3, 1, 0; each step's drafts of a slot are [slot, slot + 1]."""
    state = ProcessorState.empty(4)
    for slot, name in ((3, "a"), (1, "b"), (0, "c")):
        params = {"stop_token_ids": (9,), "draft_logprobs": True, "logprobs": 0}
        state = admit(state, slot, 1, request(name, **params))
    return state


def step_of_three(n, *ids):
    by_slot = dict(zip((3, 1, 0), ids, strict=True))
    slots = [
        tokens(by_slot[slot], drafts=2, columns=1) if slot in by_slot else tokens(generation=0)
        for slot in range(4)
    ]
    slots[2] = tokens(generation=0, state=2)  # stopped
    return target(n, *slots, draft_follows=True)


def drafts_of_three(n):
    slots = [drafts(slot, slot + 1, columns=1) for slot in range(4)]
    slots[2] = drafts(generation=0)  # none
    return draft(n, *slots)


def test_trap_4_a_finished_request_neither_drops_nor_shifts_the_drafts_of_others():
    state, _ = step(three_requests(), step_of_three(0, 5, 9, 6))  # b finishes
    state, records = step(state, drafts_of_three(0))
    assert {r.request_id: r.draft.token_ids.tolist() for r in records} == {
        "a": [3, 4],
        "b": [1, 2],
        "c": [0, 1],
    }
    state, _ = step(release(state, 1), step_of_three(1, 5, 5, 6))
    state, records = step(state, drafts_of_three(1))
    assert {r.request_id: r.draft.token_ids.tolist() for r in records} == {
        "a": [3, 4],
        "c": [0, 1],
    }


def test_trap_4_an_aborted_request_shifts_no_other():
    state, _ = step(three_requests(), step_of_three(0, 5, 5, 6))
    state, aborted = abort(state, "c")  # the first of the list
    assert [r.finish_reason for r in aborted] == [FinishReason.ABORT]
    _, records = step(state, drafts_of_three(0))
    assert {r.request_id: r.draft.token_ids.tolist() for r in records} == {
        "a": [3, 4],
        "b": [1, 2],
    }


def test_trap_5_a_late_message_never_reaches_the_slots_new_request():
    state, _ = step(three_requests(), step_of_three(0, 9, 5, 6))  # a finishes in slot 3
    state, _ = step(state, drafts_of_three(0))
    new = request("new", stop_token_ids=(5,), draft_logprobs=True, logprobs=0)
    state = admit(release(state, 3), 3, 2, new)
    # Launched before the slot was given away: its tokens would stop the new request.
    state, _ = step(state, step_of_three(1, 5, 5, 6))
    state, records = step(state, drafts_of_three(1))
    assert [r.request_id for r in records] == ["c", "b"]
    assert "new" in state.live_request_ids
    assert state.slot_statistics(3).steps == 0
    assert state.columns.cumulative_logprob[3] == 0
    assert (state.counters.late_slots, state.counters.late_drafts) == (1, 1)


def test_trap_6_slots_keep_their_order_whatever_the_order_of_admission():
    _, records = step(
        three_requests(),
        target(
            0,
            tokens(6, columns=1),
            tokens(7, columns=1),
            tokens(generation=0, state=2),
            tokens(8, columns=1),
        ),
    )
    assert [(r.slot, r.request_id, r.token_ids.tolist()) for r in records] == [
        (0, "c", [6]),
        (1, "b", [7]),
        (3, "a", [8]),
    ]


REFUSE_JAX = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "pallas_kernels"):
            raise ModuleNotFoundError(f"No module named {name!r}: refused", name=name)

sys.meta_path.insert(0, Refuse())
"""

MESSAGE_TO_JSON = """
import json
from ipc import RingReader, RingWriter
from ipc.wire import Kind
from jax_specdec.engine import output_processor as op
from jax_specdec.export import openai
from jax_specdec.records.decode import decode
from jax_specdec.text.detokenize import TokenTable
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.requests import Request, SamplingParams

request = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=2, logprobs=1))
state = op.admit(op.ProcessorState.empty(1), 0, 1, request)
slot = SlotContents(generation=1, num_drafts=1, columns=2, token_ids=[65, 66], token_ranks=[1, 1],
                    logprobs=[[-0.5, -0.5], [-0.25, -0.25]], topk_ids=[[65], [66]])
with RingReader.create(2, 4096) as reader, RingWriter.attach(reader.name) as writer:
    writer.send(encode(Kind.TARGET, 0, [slot]))
    state, records = op.step(state, decode(reader.receive(5).data))
table = TokenTable(lambda id: bytes([id]))
print(json.dumps(openai.completion_logprobs(records, table)["token_logprobs"]))
"""


def without_jax(code):
    """Run `code` in a process where jax cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", REFUSE_JAX + code], capture_output=True, text=True, check=False
    )


def test_trap_8_the_engine_side_works_on_a_machine_without_jax():
    names = [name for name in modules(*PACKAGES) if is_engine_side(name)]
    assert {
        "jax_specdec.engine.engine",
        "jax_specdec.cli.main",
        "jax_specdec.cli.demo_command",
        "ipc.reader",
    } <= set(names)
    done = without_jax(f"import {', '.join(names)}\n{MESSAGE_TO_JSON}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[-0.5, -0.25]\n"


def test_trap_8_that_check_can_fail():
    done = without_jax("import jax_specdec.device.loop.step")
    assert done.returncode != 0
    assert "No module named 'jax': refused" in done.stderr


def test_an_invalid_row_stays_with_its_neighbor_untouched():
    state = admit(ProcessorState.empty(1), 0, 1, request(logprobs=1))
    slot = tokens(4, 5, columns=2, logprobs=[[np.nan, np.nan], [-0.5, -0.25]], ranks=[0, 2])
    slot.topk_ids[0] = [-1]
    _, records = step(state, target(0, slot))
    assert records[0].valid.tolist() == [False, True]
    assert records[0].logprobs[1].tolist() == [-0.5, -0.25]
    assert records[0].topk_ids.tolist() == [[-1], [5]]

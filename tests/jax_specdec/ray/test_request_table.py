"""A fleet's requests: delivered once and in order, whichever replica they are on."""

import random

import numpy as np
import pytest

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.export.step_rows import step_rows
from jax_specdec.ray.batch import arrow_bytes, unpacked
from jax_specdec.ray.request_table import BatchError, Entry, RequestTable, end_rows
from jax_specdec.ray.routes import Load, Routes
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.processor_state import Progress
from tests.support.delivered_batches import check
from tests.support.requests import request as request_of
from tests.support.scene import Scene, long_requests, make_requests
from tests.support.scripted_worker import continuation


def table_of(*replicas, requests=()):
    table = RequestTable(Routes(4))
    for replica in replicas:
        table.join(replica, Load(slots=2, ahead=1))
    for request in requests:
        table.add(Entry(request, None))
    return table


def table_with(request):
    """A table with one replica, which has the request; the table and the replica's entries."""
    table = table_of(0, requests=[request])
    ((_, entries),) = table.assigned().items()
    return table, entries


def rows_of(submissions, seed=0):
    """What a replica brings of its submissions, a batch a step, as it arrives here."""
    emitted, queued = {}, []
    for submission in submissions:
        progress = submission.progress or Progress()
        queued.append(QueuedRequest(request=submission.request, progress=progress))
        emitted[submission.request.id] = len(progress.token_ids)
    scheduler = Scene(num_slots=4, seed=seed).scheduler
    scheduler.enqueue(queued)
    while scheduler.busy:
        for update in (*scheduler.prepare(), *scheduler.receive()):
            yield unpacked(arrow_bytes(step_rows(update.records.batches, emitted)))


def submissions_of(entries):
    return [entry.submission(0.0) for entry in entries]


@pytest.mark.parametrize("seed", range(6))
def test_losses_at_any_moment_leave_every_position_once(seed):
    rng = random.Random(seed)
    requests = make_requests(8, seed)
    table, batches, lost = table_of(0, 1, requests=requests), [], 0
    while table.entries:
        for replica, entries in table.assigned().items():
            dies = rng.randint(0, 8)
            for number, rows in enumerate(rows_of(submissions_of(entries))):
                if number == dies and lost < 5:
                    lost += 1
                    assert table.lose(replica, number=1, resume=True, max_attempts=99) == []
                    table.join(replica, Load(2, 1))
                    stale = table.take(rows, replica)
                    assert (len(stale[0]), stale[1]) == (0, [])
                    break
                batches.append(table.take(rows, replica)[0])
    assert lost
    check(requests, batches)
    assert {(load.open, load.tokens) for load in table.routes.loads.values()} == {(0, 0)}


def test_a_batch_that_skips_tokens_or_comes_twice_is_refused():
    table, entries = table_with(long_requests(1)[0])
    rows = [one for one in rows_of(submissions_of(entries)) if len(one.column("token_id").values)]
    table.take(rows[0], 0)
    for wrong in (rows[0], rows[2]):
        with pytest.raises(BatchError, match="begins at position"):
            table.take(wrong, 0)
    batch, owners = table.take(rows[1], 0)
    assert owners == entries
    assert batch.requests[0].id == "r0"


@pytest.mark.parametrize("start", [0, 11])
def test_lost_and_double_prompt_rows_are_refused(start):
    asked = {"logprobs": 0, "prompt_logprobs": 2, "extra_token_ids": (4, 9)}
    asked["prompt_logprobs_start"] = start
    scored = request_of("s", (*range(32), *[1] * 20), max_tokens=3, **asked)
    table, entries = table_with(scored)
    brought = rows_of(submissions_of(entries), seed=2)  # with it, the prompt comes in several parts
    rows = [one for one in brought if "prompt_start" in one.schema.names]
    assert len(rows) > 2
    first = table.take(rows[0], 0)[0]
    for wrong in (rows[0], rows[2]):
        with pytest.raises(BatchError, match=r"'s': logprobs of its prompt begin at token"):
            table.take(wrong, 0)
    ((part,),) = [first]
    assert part.prompt.start == max(start, 1)
    assert part.prompt.chosen_logprobs.shape == (len(part.prompt.token_ids), 2)
    column = first.rows.column("prompt_logprobs").values.values
    assert np.shares_memory(part.prompt.logprobs, column.to_numpy())
    # Another replica goes on behind the rows that came.
    assert table.lose(0, number=1, resume=True, max_attempts=9) == []
    table.join(0, Load(2, 1))
    ((_, entries),) = table.assigned().items()
    assert entries[0].progress.num_prompt_rows == len(part.prompt.token_ids)
    batches = [first, *(table.take(one, 0)[0] for one in rows_of(submissions_of(entries)))]
    assert not table.entries
    check([scored], batches)


def test_requests_not_resumed_or_tried_too_often_end():
    table = table_of(0, requests=long_requests(3))
    assert len(table.assigned()[0]) == 3
    ends = table.lose(0, number=1, resume=False, max_attempts=9)
    assert not table.entries
    last = end_rows(ends)
    assert last.finish_reasons.tolist() == [FinishReason.WORKER_LOST] * 3
    assert ([part.position for part in last], last.num_tokens) == ([1, 1, 1], 0)
    table.add(Entry(long_requests(1)[0], None))
    for attempt in range(2):
        table.join(0, Load(2, 1))
        table.assigned()
        ends = table.lose(0, number=attempt, resume=True, max_attempts=2)
        assert len(ends) == attempt
    assert ends[0][1] is FinishReason.ATTEMPTS_EXHAUSTED


def test_priorities_and_the_first_of_a_loss_come_first():
    table = table_of()
    for n, request in enumerate(long_requests(4)):
        table.add(Entry(request, None, priority=[1, 0, 1, 0][n]))
    assert table.num_waiting == 4
    table.join(0, Load(1, 0))
    order = []
    while table.num_waiting:
        ((_, (entry,)),) = table.assigned().items()
        order.append(entry.request.id)
        table.drop(entry)
    assert order == ["r1", "r3", "r0", "r2"]


def test_parts_are_views_of_their_batch():
    (request,) = long_requests(1)
    table, entries = table_with(request)
    batches = [table.take(rows, 0)[0] for rows in rows_of(submissions_of(entries))]
    parts = [part for batch in batches for part in batch if part.num_tokens]
    assert np.shares_memory(parts[0].token_ids, parts[0].batch.token_ids)
    assert [t for part in parts for t in part.token_ids.tolist()] == continuation(request)[0]
    assert parts[-1].cumulative_logprob == sum(continuation(request)[1])
    assert parts[-1].finish_reason is FinishReason.LENGTH
    assert {int(v) for part in parts for v in part.weights_versions} == {0}
    assert parts[0].columns().request_id.tolist() == ["r0"]
    assert parts[0].logprobs is not None

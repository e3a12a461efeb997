"""Records that are looked up together: each has what its slot of the message has, and no more."""

from dataclasses import fields

import numpy as np
import pytest

from ipc.wire import Kind, SlotState
from jax_specdec.records import slot_fields
from jax_specdec.records.batch import RecordBatch
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorState, admit, step
from jax_specdec.records.record import Records, TokenRows
from tests.support.processor_messages import request

ARRAYS = ("token_ids", "token_ranks", "logprobs", "chosen_logprobs", "topk_ids")
MORE = {0: (), 2: (5, 6)}  # chosen ids


def slot(rng, n, k, chosen=0):
    """A slot of n tokens; k None: no logprobs."""
    columns = 0 if k is None else k + 1
    rows = n if columns else 0
    return SlotContents(
        state=SlotState.TOKENS if n else SlotState.NOTHING,
        generation=1,
        num_drafts=max(n - 1, 0),
        columns=columns if n else 0,
        num_chosen=chosen if rows else 0,
        token_ids=rng.integers(0, 99, n),
        token_ranks=rng.integers(1, 9, rows),
        logprobs=-rng.exponential(size=(rows, columns + chosen * (rows > 0))).astype(np.float32),
        topk_ids=rng.integers(0, 99, (rows, max(columns - 1, 0))),
    )


def batch_of(shapes, counts):
    """The records of all slots, of which stops left `counts` tokens."""
    rng = np.random.default_rng(0)
    message = decode(encode(Kind.TARGET, 0, [slot(rng, *shape) for shape in shapes]))
    requests = tuple(
        request(str(at), logprobs=k, extra_token_ids=MORE[chosen[0] if chosen else 0])
        for at, (_, k, *chosen) in enumerate(shapes)
    )
    slots = np.array([at for at, shape in enumerate(shapes) if shape[0]])
    zeros = np.zeros(len(slots), np.int64)
    return RecordBatch(
        step=0, requests=requests, slots=slots, generation=zeros + 1, num_tokens=np.array(counts),
        num_drafts=zeros, num_accepted=zeros, cumulative_logprob=zeros.astype(np.float64),
        finish_reason=zeros.astype(np.int8), stop_index=zeros - 1,
        reschedule=zeros.astype(np.bool_), message=message,
    )  # fmt: skip


def assert_as_the_slots_own(batch, counts):
    for record, n in zip(Records((batch,)), counts, strict=True):
        own = TokenRows(batch.message, record.slot, n, record.request.params)
        for name in ARRAYS:
            expected, array = getattr(own, name), getattr(record, name)
            assert (array is None) == (expected is None), name
            if expected is not None:
                assert (array.shape, array.dtype) == (expected.shape, expected.dtype), name
                np.testing.assert_array_equal(array, expected)
                assert not array.flags.writeable or not array.size
                assert not array.size or np.shares_memory(array, expected)


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 2), (1, 2), (2, 2)],
        [(2, 0), (3, 0)],
        [(2, 2), (2, 2), (2, 2)],
        [(1, 0), (1, 0)],
        [(3, None), (3, None)],
        [(2, 2), (3, 5), (1, 0)],
        [(2, None), (1, None)],
        [(3, 2), (2, None), (0, None), (2, 2)],
        [(0, None), (2, 2), (0, None), (1, 2)],
        [(2, 2, 2), (1, 2, 2)],
        [(2, 2, 2), (3, 2, 0), (1, None)],
    ],
    ids=str,
)
def test_records_have_the_arrays_of_their_slots(shapes):
    counts = [shape[0] for shape in shapes if shape[0]]
    assert_as_the_slots_own(batch_of(shapes, counts), counts)
    stopped = [max(count - 1, 0) for count in counts]
    assert_as_the_slots_own(batch_of(shapes, stopped), stopped)


def test_part_of_the_records_is_looked_up_anew():
    batch = batch_of([(3, 2), (2, 2), (1, 2)], [3, 2, 1])
    assert len(batch.views.token_ids) == 3
    part = batch.take(np.array([2]))
    (ids,) = part.views.token_ids
    np.testing.assert_array_equal(ids, batch.views.token_ids[2])
    assert_as_the_slots_own(part, [1])


@pytest.mark.parametrize(
    "shapes", [[(2, 3), (1, 3)], [(2, 0)] * 3, [(1, None), (3, None)]], ids=str
)
@pytest.mark.parametrize("limit", [9, 2])
def test_slots_that_are_alike_make_the_records_of_others(shapes, limit, monkeypatch):
    """A full worker's usual message is taken by a shorter way: it gives what the long one does."""
    rng = np.random.default_rng(0)
    data = encode(Kind.TARGET, 0, [slot(rng, *shape) for shape in shapes])
    state = ProcessorState.empty(len(shapes))
    for at, (_, k) in enumerate(shapes):
        asked = request(str(at), logprobs=k, max_tokens=limit, stop_token_ids=(3,))
        state = admit(state, at, 1, asked)
    ways = [taken(state, decode(data))]
    monkeypatch.setattr(slot_fields, "read_alike", lambda *slots: None)
    ways.append(taken(state, decode(data)))
    (short, one), (long, other) = ways
    assert (short.same_columns is None, long.same_columns) == (False, None)
    for field in fields(short):
        if field.name not in ("same_columns", "same_mode", "kept_sets", "made_starts"):
            np.testing.assert_array_equal(getattr(short, field.name), getattr(long, field.name))
    np.testing.assert_array_equal(short.starts, long.starts)
    assert one == other


def taken(state, message):
    """A message, and all that its records say."""
    state, records = step(state, message)
    said = [
        [None if array is None else array.tolist() for array in (getattr(r, n) for n in ARRAYS)]
        + [r.cumulative_logprob, r.num_tokens, r.finish_reason, r.num_accepted]
        for r in records
    ]
    return message, (said, state.statistics, state.columns.cumulative_logprob.tolist())

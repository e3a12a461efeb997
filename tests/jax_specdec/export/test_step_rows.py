"""Batches of whole steps, one row a request, against the columns of all records one by one."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_specdec.export.step_rows import joined_rows, step_rows
from jax_specdec.ray.batch import ColumnBatch
from jax_specdec.requests import Request, SamplingParams
from tests.support import delivered_batches
from tests.support.sample_columns import delivered as columns_of
from tests.support.sample_columns import released, streams
from tests.support.scene import Scene, make_requests


def fields(columns):
    """Every array of some columns, lists and kept sets included."""
    for field in dataclasses.fields(columns):
        value = getattr(columns, field.name)
        if dataclasses.is_dataclass(value):
            for inner in dataclasses.fields(value):
                if getattr(value, inner.name) is not None:
                    yield f"{field.name}.{inner.name}", getattr(value, inner.name)
        else:
            yield field.name, value


def by_request(columns):
    """The columns of each request alone, by its name."""
    return {
        name: dict(fields(columns.of_request(at)))
        for at, name in enumerate(columns.request_id.tolist())
    }


def check_same(found, expected):
    """Equal values and types, request by request: batches have no order among requests."""
    found, expected = by_request(found), by_request(expected)
    assert found.keys() == expected.keys()
    whole = {"request", "request_id", "prompt.offsets", "prompt.ids", "temperature", "mode"}
    for name, mine in expected.items():
        for column, values in mine.items():
            if column not in whole | {"finish_reason"}:
                np.testing.assert_array_equal(found[name][column], values, err_msg=column)
                assert found[name][column].dtype == values.dtype, column


def batches_of(released, size):
    """The batches of `size` deliveries of records each."""
    emitted, made = {}, []
    for at in range(0, len(released), size):
        taken = [batch for each in released[at : at + size] for batch in each.batches]
        made.append(step_rows(taken, emitted))
    return made, emitted


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_batches_have_the_logprobs_of_prompts_where_asked(size):
    """Chosen ids included; batches without such rows have no column."""
    requests = make_requests(12, 3)
    chosen = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=1, extra_token_ids=(7, 3, 5))
    requests.append(Request(id="chosen", prompt_token_ids=tuple(range(20)), params=chosen))
    by_id = {request.id: request for request in requests}
    delivered = [update.records for update in Scene(num_ranks=2).generate(requests)]
    rows, emitted = batches_of(delivered, size)
    assert emitted == {}  # each request has ended
    batches = [
        ColumnBatch(one, [by_id[name] for name in one.column("request_id").to_pylist()])
        for one in rows
    ]
    delivered_batches.check(requests, batches)
    prompts = [one.prompt for batch in batches for one in batch if one.request_id == "chosen"]
    named = np.concatenate([prompt.chosen_logprobs for prompt in prompts if prompt is not None])
    np.testing.assert_array_equal(named, np.full((19, 3), -9, np.float32))
    with_rows = {"prompt_start" in one.schema.names for one in rows}
    assert with_rows == ({True, False} if size < 1000 else {True})


@settings(max_examples=50)
@given(streams(), st.integers(1, 4))
def test_every_kind_of_row_comes_through(stream, size):
    batches, _ = batches_of(list(released(stream)), size)
    found = joined_rows(batches, {asked.id: asked for asked, _ in stream})
    expected = columns_of(stream)
    check_same(found, expected)
    ends = dict(zip(expected.request_id, expected.finish_reason, strict=True))
    assert dict(zip(found.request_id, found.finish_reason, strict=True)) == ends
    assert len(found.prompt.ids) == 2 * len(ends)  # prompts have two tokens


def test_no_steps_make_an_empty_batch():
    batch = step_rows([], {})
    assert batch.num_rows == 0
    assert len(joined_rows([batch], {})) == 0

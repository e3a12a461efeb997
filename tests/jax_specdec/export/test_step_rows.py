"""Batches of whole steps, one row a request, against the columns of all records one by one."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.prompt_columns import prompt_part, prompt_versions
from jax_specdec.export.step_rows import joined_rows, step_rows
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Request, SamplingParams
from tests.support.sample_columns import delivered, released, streams
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


def run(requests):
    """What a run delivers, update by update."""
    return [update.records for update in Scene(num_ranks=2).generate(requests)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_batches_have_the_columns_of_all_records(size):
    requests = make_requests(12, 3)
    builder, every = ColumnBuilder(), run(requests)
    for records in every:
        builder.add(records)
    (batches, emitted), expected = batches_of(every, size), builder.columns()
    assert emitted == {}  # each request has ended
    found = joined_rows(batches, {request.id: request for request in requests})
    check_same(found, expected)
    ends = dict(zip(expected.request_id, expected.finish_reason, strict=True))
    assert dict(zip(found.request_id, found.finish_reason, strict=True)) == ends
    assert set(ends.values()) <= {FinishReason.LENGTH, FinishReason.STOP_TOKEN}
    assert len(found.prompt.ids) == sum(len(request.prompt_token_ids) for request in requests)


def prompts_of(parts):
    """The rows of each request's prompt, of all its parts one after the other."""
    found = {}
    for request, version, rows in parts:
        mine = found.setdefault(request.id, {"next": 1, "versions": [], "tables": []})
        assert rows.start == mine["next"]
        mine["next"] += len(rows.token_ids)
        mine["versions"] += version
        mine["tables"].append(rows)
    names = ("token_ids", "logprobs", "chosen_logprobs", "token_ranks", "topk_ids")
    for mine in found.values():
        tables = mine.pop("tables")
        mine |= {n: np.concatenate([getattr(rows, n) for rows in tables]).tolist() for n in names}
    return found


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_batches_have_the_logprobs_of_prompts_where_asked(size):
    """As the records have them, chosen ids included; batches without such rows have no column."""
    requests = make_requests(12, 3)
    chosen = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=1, extra_token_ids=(7, 3, 5))
    requests.append(Request(id="chosen", prompt_token_ids=tuple(range(20)), params=chosen))
    every = run(requests)
    batches, _ = batches_of(every, size)
    by_id = {request.id: request for request in requests}
    parts = [
        (by_id[name], prompt_versions(batch, row).tolist(), prompt_part(batch, row, by_id[name]))
        for batch in batches
        for row, name in enumerate(batch.column("request_id").to_pylist())
    ]
    found = prompts_of([part for part in parts if part[2] is not None])
    assert found == prompts_of(
        [(r.request, [r.weights_version] * len(r.prompt.token_ids), r.prompt)
         for records in every for r in records if r.prompt is not None]
    )  # fmt: skip
    asked = {r.id for r in requests if r.params.prompt_logprobs is not None}
    assert found.keys() == {name for name in asked if len(by_id[name].prompt_token_ids) > 1}
    assert all(not version for _, version, rows in parts if rows is None)
    with_rows = {"prompt_start" in batch.schema.names for batch in batches}
    assert with_rows == ({True, False} if size < 1000 else {True})


@settings(max_examples=50)
@given(streams(), st.integers(1, 4))
def test_every_kind_of_row_comes_through(stream, size):
    batches, _ = batches_of(list(released(stream)), size)
    requests = {asked.id: asked for asked, _ in stream}
    check_same(joined_rows(batches, requests), delivered(stream))


def test_no_steps_make_an_empty_batch():
    batch = step_rows([], {})
    assert batch.num_rows == 0
    assert len(joined_rows([batch], {})) == 0

"""Arrow tables and Parquet files: columns come back without loss."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings

from jax_specdec.export import arrow
from jax_specdec.export.column_builder import ColumnBuilder
from tests.support.sample_columns import delivered, streams, three_requests

EMPTY = ColumnBuilder().columns()


def same(left, right):
    """Assert equal dtypes, shapes and values, NaN included."""
    assert type(left) is type(right)
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if is_dataclass(a):
            same(a, b)
        elif a is None:
            assert b is None
        else:
            assert a.dtype == b.dtype or a.dtype.kind == "U", field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)


def check(folder, columns):
    arrow.write_parquet(folder / "tokens", columns)
    same(columns, arrow.read_parquet(folder / "tokens"))
    arrow.write_sequences(folder, columns)
    found = arrow.read_sequences(folder)
    assert (np.diff(found.request) >= 0).all()  # each request's tokens one after the other
    for index in range(len(columns.request_id)):
        same(columns.of_request(index), found.of_request(index))
    if not len(columns):
        same(columns, found)


@pytest.mark.parametrize("columns", [three_requests(), EMPTY])
def test_files_bring_everything_back(tmp_path, columns):
    check(tmp_path, columns)


@settings(max_examples=30)
@given(streams())
def test_every_run_comes_back(tmp_path_factory, runs):
    check(tmp_path_factory.mktemp("columns"), delivered(runs))


def test_a_row_of_a_sequence_has_a_list_for_each_column_of_tokens():
    table = arrow.sequences_table(three_requests())
    found = {name: table[name].to_pylist() for name in table.column_names}
    expected = {
        "request_id": ["a", "b", "c"],
        "token_id": [[1, 2, 3], [5, 6], [3, 4, 5]],
        "weights_version": [[0, 0, 1], [0, 0], [0, 0, 1]],
        "topk_ids": [[[]] * 3, [[9], []], [[]] * 3],
        "prompt_token_ids": [[1, 2]] * 3,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["kind"][0] == ["accepted", "recovered", "plain"]
    assert found["logprob"][2] == [None] * 3  # not asked for


def test_tables_without_a_column_are_refused():
    columns = three_requests()
    tokens_table, requests_table = arrow.tokens_table(columns), arrow.requests_table(columns)
    before = tokens_table.drop_columns(["draft_chosen_ids", "kept_ids", "log_kept"])
    sequences = arrow.sequences_table(columns).drop_columns(["weights_version"])
    for read, tables, lacks in (
        (arrow.from_tables, (before, requests_table), "draft_chosen_ids, kept_ids, log_kept"),
        (arrow.from_tables, (tokens_table, requests_table.drop_columns(["mode"])), "mode"),
        (arrow.from_sequences, (sequences,), "weights_version"),
    ):
        with pytest.raises(ValueError, match=f"lacks the columns {lacks}: read"):
            read(*tables)


def test_arrow_knows_null_from_nan():
    table = arrow.tokens_table(three_requests())
    found = {name: table[name].to_pylist() for name in table.column_names}
    assert found["logprob"][4] is None  # not asked
    assert np.isnan(found["logprob"][3])  # an invalid row
    expected = {
        "request_id": ["a", "a", "b", "b", "c", "c", "a", "c"],
        "weights_version": [0] * 6 + [1] * 2,
        "kept_count": [None] * 2 + [2, -1] + [None] * 4,
        "kept_ids": [[]] * 2 + [[5, 9], []] + [[]] * 4,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["kind"][1] == "recovered"
    assert found["draft_token_id"][:3] == [1, 11, None]
    assert found["log_kept"][1:4] == [None, -0.5, 0]
    requests = arrow.requests_table(three_requests()).to_pydict()
    assert requests["finish_reason"] == ["length", None, None]
    assert requests["mode"] == ["raw"] * 3
    assert requests["prompt_token_ids"] == [[1, 2]] * 3

"""Arrow tables and Parquet files: columns come back without loss."""

import sys
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import given

from jax_specdec.export import arrow
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.token_columns import TOKEN_COLUMNS, TOKEN_LISTS, Ragged
from jax_specdec.kept_sets import KeptSets
from tests.support.sample_columns import delivered, streams, three_requests


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


@pytest.mark.fast
def test_the_comparison_can_fail():
    left, right = three_requests(), three_requests()
    right.draft_logprob[0] += 1
    with pytest.raises(AssertionError, match="draft_logprob"):
        same(left, right)
    right = three_requests()
    right.draft_chosen.logprobs[3] += 1
    with pytest.raises(AssertionError, match="logprobs"):
        same(left, right)
    right = three_requests()
    right.kept.token_ids[1] += 1
    with pytest.raises(AssertionError, match="token_ids"):
        same(left, right)


def test_parquet_brings_everything_back(tmp_path):
    for columns in (three_requests(), ColumnBuilder().columns()):
        arrow.write_parquet(tmp_path / "rollouts", columns)
        same(columns, arrow.read_parquet(tmp_path / "rollouts"))


def by_request(columns):
    """The columns with each request's tokens one after the other."""
    none = ColumnBuilder().columns()
    parts = [columns.of_request(index) for index in range(len(columns.request_id))]
    taken = {}
    for name in TOKEN_COLUMNS:
        taken[name] = np.concatenate([getattr(part, name) for part in parts or [none]])
    for name in TOKEN_LISTS:
        lists = [getattr(part, name) for part in parts or [none]]
        taken[name] = Ragged.of(
            np.concatenate([np.diff(one.offsets) for one in lists]),
            np.concatenate([one.ids for one in lists]),
            np.concatenate([one.logprobs for one in lists]),
        )
    kept = KeptSets.joined([part.kept for part in parts])
    return replace(columns, **taken, kept=kept)


@given(streams())
def test_one_row_a_sequence_brings_everything_back(tmp_path_factory, runs):
    folder, columns = tmp_path_factory.mktemp("sequences"), delivered(runs)
    arrow.write_sequences(folder, columns)
    same(by_request(columns), arrow.read_sequences(folder))


def test_a_row_of_a_sequence_has_a_list_for_each_column_of_tokens():
    columns = three_requests()
    table = arrow.sequences_table(columns)
    assert table["request_id"].to_pylist() == ["a", "b", "c"]
    assert table["token_id"].to_pylist() == [[1, 2, 3], [5, 6], [3, 4, 5]]
    assert table["kind"].to_pylist()[0] == ["accepted", "recovered", "plain"]
    assert table["weights_version"].to_pylist() == [[0, 0, 1], [0, 0], [0, 0, 1]]
    assert table["topk_ids"].to_pylist() == [[[]] * 3, [[9], []], [[]] * 3]
    assert table["logprob"].to_pylist()[2] == [None] * 3  # not asked for
    assert table["prompt_token_ids"].to_pylist() == [[1, 2]] * 3
    assert len(arrow.sequences_table(ColumnBuilder().columns())) == 0
    with pytest.raises(ValueError, match="lacks the columns weights_version: read"):
        arrow.from_sequences(table.drop_columns(["weights_version"]))


def test_tables_without_a_column_are_refused():
    columns = three_requests()
    tokens_table, requests_table = arrow.tokens_table(columns), arrow.requests_table(columns)
    before = tokens_table.drop_columns(["draft_chosen_ids", "kept_ids", "log_kept"])
    with pytest.raises(ValueError, match=r"lacks .* draft_chosen_ids, kept_ids, log_kept: read"):
        arrow.from_tables(before, requests_table)
    with pytest.raises(ValueError, match="lacks the columns mode: read"):
        arrow.from_tables(tokens_table, requests_table.drop_columns(["mode"]))


@given(streams())
def test_every_run_comes_back_from_parquet(tmp_path_factory, runs):
    folder, columns = tmp_path_factory.mktemp("columns"), delivered(runs)
    arrow.write_parquet(folder, columns)
    same(columns, arrow.read_parquet(folder))


def test_arrow_knows_null_from_nan():
    columns = three_requests()
    table = arrow.tokens_table(columns)
    assert len(table) == len(columns) == 8
    assert table["logprob"].to_pylist()[4] is None  # not asked
    assert np.isnan(table["logprob"].to_pylist()[3])  # an invalid row
    assert table["request_id"].to_pylist() == ["a", "a", "b", "b", "c", "c", "a", "c"]
    assert table["kind"].to_pylist()[1] == "recovered"
    assert table["draft_token_id"].to_pylist()[:3] == [1, 11, None]
    assert table["weights_version"].to_pylist() == [0] * 6 + [1] * 2
    assert table["kept_count"].to_pylist() == [None] * 2 + [2, -1] + [None] * 4
    assert table["kept_ids"].to_pylist() == [[]] * 2 + [[5, 9], []] + [[]] * 4
    assert table["log_kept"].to_pylist()[1:4] == [None, -0.5, 0]
    requests = arrow.requests_table(columns)
    assert requests["finish_reason"].to_pylist() == ["length", None, None]
    assert requests["mode"].to_pylist() == ["raw"] * 3
    assert requests["prompt_token_ids"].to_pylist() == [[1, 2]] * 3


@pytest.mark.fast
def test_without_pyarrow_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pyarrow>=16'"):
        arrow.tokens_table(ColumnBuilder().columns())

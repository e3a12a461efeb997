"""Columns for training: one row a token, and back from npz, Arrow and Parquet without loss."""

import inspect
import sys
from dataclasses import fields

import numpy as np
import pytest

from jax_specdec import arrow, columnar
from jax_specdec.columnar import KINDS, NOT_ASKED, ColumnBuilder, Columns, Ragged
from jax_specdec.output_processor import ProcessorState, admit, step
from jax_specdec.records import FinishReason
from tests.processor_messages import draft, drafts, request, silent, target, tokens


def three_requests():
    """Chosen ids and drafts; K = 2 with an invalid row and a missing column; no logprobs."""
    state = ProcessorState.empty(3)
    asked = [
        request("a", logprobs=0, extra_token_ids=(7, 8), draft_logprobs=True, max_tokens=3),
        request("b", logprobs=2, temperature=0.5),
        request("c"),
    ]
    for slot, one in enumerate(asked):
        state = admit(state, slot, 1, one)
    mixed = tokens(5, 6, drafts=4, columns=3, ranks=[2, 0],
                   logprobs=[[-1.0, -0.5, -np.inf], [np.nan] * 3])  # fmt: skip
    mixed.topk_ids[:] = [[9, -1], [-1, -1]]
    first = target(
        0,
        tokens(1, 2, drafts=3, columns=1, chosen=2,
               logprobs=[[-0.5, -2, -3], [-0.25, -4, -np.inf]]),
        mixed,
        tokens(3, 4),
        draft_follows=True,
    )  # fmt: skip
    guesses = drafts(1, 11, 12)
    second = target(1, tokens(3, columns=1, chosen=2), silent(), tokens(5))
    builder = ColumnBuilder()
    for message in (first, draft(0, guesses, silent(), silent()), second):
        state, records = step(state, message)
        builder.add(records)
    return builder.columns()


def same(left, right):
    """Equal dtypes, shapes and values, NaN included."""
    assert type(left) is type(right)
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, Ragged):
            same(a, b)
        elif a is None:
            assert b is None
        else:
            assert a.dtype == b.dtype or a.dtype.kind == "U", field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)


@pytest.mark.fast
def test_one_row_a_token():
    found = three_requests()
    assert found.request_id.tolist() == ["a", "b", "c"]
    assert found.request.tolist() == [0, 0, 1, 1, 2, 2, 0, 2]
    assert found.position.tolist() == [2, 3, 2, 3, 2, 3, 4, 4]  # prompts have two tokens
    assert found.step.tolist() == [0] * 6 + [1] * 2
    assert found.token_id.tolist() == [1, 2, 5, 6, 3, 4, 3, 5]
    assert [KINDS[n] for n in found.kind] == [
        "accepted", "recovered", "accepted", "recovered", "accepted", "bonus", "plain", "plain",
    ]  # fmt: skip
    np.testing.assert_array_equal(found.logprob[:6], [-0.5, -0.25, -1, np.nan, np.nan, np.nan])
    assert found.token_rank.tolist()[2:6] == [2, 0, NOT_ASKED, NOT_ASKED]
    # The rejected draft stands where the recovered token was emitted.
    assert found.draft_token_id.tolist() == [1, 11, -1, -1, -1, -1, -1, -1]
    assert np.isfinite(found.draft_logprob).tolist() == [True, True] + [False] * 6
    assert found.topk.offsets.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert found.topk.ids.tolist() == [9]
    assert found.chosen.ids.tolist() == [7, 8] * 3
    assert found.chosen.logprobs.tolist()[:4] == [-2, -3, -4, -np.inf]
    assert found.prompt.ids.tolist() == [1, 2] * 3
    assert found.finish_reason.tolist() == [FinishReason.LENGTH, 0, 0]
    assert found.temperature.tolist() == [0, 0.5, 0]


@pytest.mark.fast
def test_one_requests_rows():
    found = three_requests().of_request(0)
    assert found.token_id.tolist() == [1, 2, 3]
    assert found.position.tolist() == [2, 3, 4]
    ids, logprobs = found.chosen.dense()
    assert ids.tolist() == [[7, 8]] * 3
    assert logprobs[0].tolist() == [-2, -3]


@pytest.mark.fast
def test_dense_lists_are_filled_up():
    ragged = Ragged(np.array([0, 2, 2, 3]), np.array([4, 5, 6], np.int32),
                    np.array([-1, -2, -3], np.float32))  # fmt: skip
    ids, logprobs = ragged.dense()
    assert ids.tolist() == [[4, 5], [-1, -1], [6, -1]]
    assert logprobs.tolist() == [[-1, -2], [-np.inf] * 2, [-3, -np.inf]]


@pytest.mark.fast
def test_npz_brings_everything_back(tmp_path):
    for columns in (three_requests(), ColumnBuilder().columns()):
        columnar.save(tmp_path / "rollouts", columns)
        same(columns, columnar.load(tmp_path / "rollouts"))


@pytest.mark.fast
def test_another_npz_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="no file of columns in format 1"):
        columnar.load(tmp_path / "other.npz")


@pytest.mark.fast
def test_the_comparison_of_these_tests_can_fail():
    left, right = three_requests(), three_requests()
    right.draft_logprob[0] += 1
    with pytest.raises(AssertionError, match="draft_logprob"):
        same(left, right)


def test_parquet_brings_everything_back(tmp_path):
    for columns in (three_requests(), ColumnBuilder().columns()):
        arrow.write_parquet(tmp_path / "rollouts", columns)
        same(columns, arrow.read_parquet(tmp_path / "rollouts"))


def test_arrow_knows_null_from_nan():
    columns = three_requests()
    table = arrow.tokens_table(columns)
    assert len(table) == len(columns) == 8
    assert table["logprob"].to_pylist()[4] is None  # not asked
    assert np.isnan(table["logprob"].to_pylist()[3])  # an invalid row
    assert table["request_id"].to_pylist() == ["a", "a", "b", "b", "c", "c", "a", "c"]
    assert table["kind"].to_pylist()[1] == "recovered"
    assert table["draft_token_id"].to_pylist()[:3] == [1, 11, None]
    requests = arrow.requests_table(columns)
    assert requests["finish_reason"].to_pylist() == ["length", None, None]
    assert requests["mode"].to_pylist() == ["raw"] * 3
    assert requests["prompt_token_ids"].to_pylist() == [[1, 2]] * 3


@pytest.mark.fast
def test_without_pyarrow_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax-specdec\[arrow\]'"):
        arrow.tokens_table(ColumnBuilder().columns())


@pytest.mark.fast
def test_every_column_is_documented():
    documented = inspect.getdoc(Columns)  # Python 3.13 strips a docstring's indentation
    for field in fields(Columns):
        assert f"\n  {field.name}: " in documented

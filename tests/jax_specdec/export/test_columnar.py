"""Columns for training: one row a token, and back from npz, Arrow and Parquet without loss."""

import inspect
import itertools
import sys
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.export import arrow, column_builder
from jax_specdec.export.column_builder import KINDS, NOT_ASKED, ColumnBuilder, Ragged, TokenColumns
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.output_processor import ProcessorState, admit, step
from tests.support.processor_messages import draft, drafts, request, silent, target, tokens


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
    guesses = drafts(1, 11, 12, columns=1, chosen=2)
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
    # Of the drafts at the positions of the two emitted tokens; the third has no position.
    assert found.draft_chosen.offsets.tolist() == [0, 2, 4, 4, 4, 4, 4, 4, 4]
    assert found.draft_chosen.ids.tolist() == [7, 8] * 2
    np.testing.assert_allclose(
        found.draft_chosen.logprobs, [-2 / 16, -2 / 24, -12 / 16, -12 / 24], rtol=1e-6
    )
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
        column_builder.save(tmp_path / "rollouts", columns)
        same(columns, column_builder.load(tmp_path / "rollouts"))


@pytest.mark.fast
def test_another_npz_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="no file of columns: save writes them"):
        column_builder.load(tmp_path / "other.npz")
    column_builder.save(tmp_path / "now.npz", three_requests())
    with np.load(tmp_path / "now.npz") as arrays:
        before = {n: a for n, a in arrays.items() if not n.startswith("draft_chosen")}
    np.savez(tmp_path / "before.npz", **before | {"format": np.array(1)})
    with pytest.raises(ValueError, match="has columns in format 1, and this version reads 2"):
        column_builder.load(tmp_path / "before.npz")


@pytest.mark.fast
def test_the_comparison_of_these_tests_can_fail():
    left, right = three_requests(), three_requests()
    right.draft_logprob[0] += 1
    with pytest.raises(AssertionError, match="draft_logprob"):
        same(left, right)
    right = three_requests()
    right.draft_chosen.logprobs[3] += 1
    with pytest.raises(AssertionError, match="logprobs"):
        same(left, right)


def test_parquet_brings_everything_back(tmp_path):
    for columns in (three_requests(), ColumnBuilder().columns()):
        arrow.write_parquet(tmp_path / "rollouts", columns)
        same(columns, arrow.read_parquet(tmp_path / "rollouts"))


def test_tables_without_a_column_are_refused():
    columns = three_requests()
    tokens_table, requests_table = arrow.tokens_table(columns), arrow.requests_table(columns)
    before = tokens_table.drop_columns(["draft_chosen_ids", "draft_chosen_logprobs"])
    with pytest.raises(ValueError, match=r"lacks .* draft_chosen_ids, draft_chosen_logprobs: read"):
        arrow.from_tables(before, requests_table)
    with pytest.raises(ValueError, match="lacks the columns mode: read"):
        arrow.from_tables(tokens_table, requests_table.drop_columns(["mode"]))


@st.composite
def streams(draw):
    """(request, [(ids, drafts, their slot in a draft message or None)]) of each slot of a run."""
    runs, num_steps = [], draw(st.integers(1, 4))
    for slot in range(draw(st.integers(1, 3))):
        k = draw(st.none() | st.integers(0, 2))
        chosen = () if k is None else draw(st.permutations((3, 5, 9)))[: draw(st.integers(0, 3))]
        asked = request(
            f"r{slot}",
            logprobs=k,
            extra_token_ids=tuple(chosen),
            max_tokens=draw(st.integers(1, 9)),
            draft_logprobs=k is not None and draw(st.booleans()),
        )
        steps = []
        for _ in range(num_steps):
            guesses = draw(st.lists(st.integers(0, 30), max_size=3))
            accepted = draw(st.integers(0, len(guesses)))
            ids = [*guesses[:accepted], draw(st.integers(31, 40))]
            width = asked.params.num_columns + len(chosen)
            table = draw(logprobs_table(len(ids), width))
            drafted = None
            if asked.params.draft_logprobs and guesses and draw(st.booleans()):
                drafted = draw(logprobs_table(len(guesses), width))
            steps.append((ids, guesses, table, drafted))
        runs.append((asked, steps))
    return runs


def logprobs_table(rows, width):
    """[rows, width]: -inf is legal, NaN is an invalid row's."""
    some = st.floats(-50, 0, width=32) | st.just(-np.inf) | st.just(np.nan)
    return st.lists(st.lists(some, min_size=width, max_size=width), min_size=rows, max_size=rows)


def delivered(runs):
    """The columns of these runs, whose messages come out of the encoder."""
    state, builder = ProcessorState.empty(len(runs)), ColumnBuilder()
    for slot, (asked, _) in enumerate(runs):
        state = admit(state, slot, 1, asked)
    for number in range(len(runs[0][1])):
        targets, guessed = [], []
        for asked, steps in runs:
            ids, guesses, table, drafted = steps[number]
            shape = {
                "columns": asked.params.num_columns,
                "chosen": len(asked.params.extra_token_ids),
            }
            rows = table if shape["columns"] else None
            targets.append(tokens(*ids, drafts=len(guesses), logprobs=rows, **shape))
            one = tokens(*guesses, drafts=len(guesses), logprobs=drafted, **shape)
            guessed.append(silent() if drafted is None else one)
        follows = any(steps[number][3] is not None for _, steps in runs)
        messages = [target(number, *targets, draft_follows=follows)]
        messages += [draft(number, *guessed)] if follows else []
        for message in messages:
            state, records = step(state, message)
            builder.add(records)
    return builder.columns()


def chosen_by_hand(asked, steps):
    """Lists of (id, logprob) of each delivered token and of the draft at its position."""
    ids, columns = asked.params.extra_token_ids, asked.params.num_columns
    of_tokens, of_drafts = [], []
    for emitted, guesses, table, drafted in steps:
        for place in range(len(emitted)):
            row = table[place][columns:] if ids else []
            of_tokens.append(list(zip(ids, row, strict=True)))
            there = drafted is not None and place < len(guesses)
            row = drafted[place][columns:] if there else []
            of_drafts.append(list(zip(ids, row, strict=True)) if there else [])
    most = asked.params.max_tokens
    return of_tokens[:most], of_drafts[:most]


def pairs(ragged):
    values = list(zip(ragged.ids.tolist(), ragged.logprobs.tolist(), strict=True))
    bounds = ragged.offsets.tolist()
    return [values[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.fast
@given(streams())
def test_chosen_ids_of_tokens_and_drafts_are_those_that_were_sent(runs):
    columns = delivered(runs)
    for index, request_id in enumerate(columns.request_id.tolist()):
        asked, steps = next(run for run in runs if run[0].id == request_id)
        mine = columns.of_request(index)
        of_tokens, of_drafts = chosen_by_hand(asked, steps)
        np.testing.assert_equal(pairs(mine.chosen), of_tokens)
        np.testing.assert_equal(pairs(mine.draft_chosen), of_drafts)
        known = mine.draft_token_rank != NOT_ASKED
        counts = np.diff(mine.draft_chosen.offsets)
        assert counts.tolist() == (known * len(asked.params.extra_token_ids)).tolist()


@given(streams())
def test_every_run_comes_back_from_npz_and_parquet(tmp_path_factory, runs):
    folder, columns = tmp_path_factory.mktemp("columns"), delivered(runs)
    column_builder.save(folder / "rollouts", columns)
    same(columns, column_builder.load(folder / "rollouts"))
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
    documented = inspect.getdoc(TokenColumns)  # Python 3.13 strips a docstring's indentation
    for field in fields(TokenColumns):
        assert f"\n  {field.name}: " in documented

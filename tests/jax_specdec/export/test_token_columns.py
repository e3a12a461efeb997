"""Columns for training: one row a token, with all that the records hold; in Arrow's files; and in
batches of whole steps, one row a request.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_specdec.export import arrow
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.step_rows import joined_rows, step_rows
from jax_specdec.export.token_columns import NO_RANK, TOKEN_KINDS, Ragged
from jax_specdec.ray.batch import ColumnBatch
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import ROW_VALUES, Request, SamplingParams
from tests.support import delivered_batches
from tests.support.random_kept import as_lists
from tests.support.sample_columns import delivered, released, streams, three_requests
from tests.support.scene import Scene, make_requests


def test_one_row_a_token():
    found = three_requests()
    assert found.request_id.tolist() == ["a", "b", "c"]
    assert found.request.tolist() == [0, 0, 1, 1, 2, 2, 0, 2]
    assert found.position.tolist() == [2, 3, 2, 3, 2, 3, 4, 4]  # prompts have two tokens
    assert found.step.tolist() == [0] * 6 + [1] * 2
    assert found.token_id.tolist() == [1, 2, 5, 6, 3, 4, 3, 5]
    assert [TOKEN_KINDS[n] for n in found.kind] == [
        "accepted", "recovered", "accepted", "recovered", "accepted", "bonus", "plain", "plain",
    ]  # fmt: skip
    np.testing.assert_array_equal(found.logprob[:6], [-0.5, -0.25, -1, np.nan, np.nan, np.nan])
    assert found.token_rank.tolist()[2:6] == [2, 0, NO_RANK, NO_RANK]
    # The rejected draft stands where the recovered token was emitted.
    assert found.draft_token_id.tolist() == [1, 11, -1, -1, -1, -1, -1, -1]
    assert np.isfinite(found.draft_logprob).tolist() == [True, True] + [False] * 6
    assert found.topk.offsets.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert found.topk.ids.tolist() == [9]
    assert found.prompt.ids.tolist() == [1, 2] * 3
    assert found.finish_reason.tolist() == [FinishReason.LENGTH, 0, 0]
    assert found.temperature.tolist() == [0, 0.5, 0]


def test_dense_lists_are_filled_up():
    ragged = Ragged(np.array([0, 2, 2, 3]), np.array([4, 5, 6], np.int32),
                    np.array([-1, -2, -3], np.float32))  # fmt: skip
    ids, logprobs = ragged.dense()
    assert ids.tolist() == [[4, 5], [-1, -1], [6, -1]]
    assert logprobs.tolist() == [[-1, -2], [-np.inf] * 2, [-3, -np.inf]]


def chosen_by_hand(asked, steps):
    """Lists of (id, logprob): one for each delivered token, one for the draft at its position."""
    ids, columns = asked.params.extra_token_ids, asked.params.num_columns
    of_tokens, of_drafts = [], []
    for emitted, guesses, table, drafted, _ in steps:
        for place in range(len(emitted)):
            row = table[place][columns : columns + len(ids)] if ids else []
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


@settings(max_examples=50)
@given(streams())
def test_lists_and_sets_are_those_that_were_sent(runs):
    """Those of tokens and of drafts, and each token's place in a table."""
    columns = delivered(runs)
    rows = columns.rows_by_place(30)
    assert rows.shape == (len(columns.request_id), 30)
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(columns)))
    padded = columns.kept.padded(rows)
    for index, request_id in enumerate(columns.request_id.tolist()):
        asked, steps = next(run for run in runs if run[0].id == request_id)
        mine = columns.of_request(index)
        of_tokens, of_drafts = chosen_by_hand(asked, steps)
        np.testing.assert_equal(pairs(mine.chosen), of_tokens)
        np.testing.assert_equal(pairs(mine.draft_chosen), of_drafts)
        known = mine.draft_token_rank != NO_RANK
        bits, width = asked.params.row_values, asked.params.num_columns
        for name, value in ROW_VALUES.items():
            place = (
                width + len(asked.params.extra_token_ids) + (bits & ((1 << value) - 1)).bit_count()
            )
            there = bits >> value & 1
            sent = [row[place] if there else np.nan for step in steps for row in step[2]]
            sent = np.float32(sent[: asked.params.max_tokens])
            np.testing.assert_array_equal(getattr(mine, name), sent)
        digests = np.zeros(len(mine), np.uint64)
        if asked.params.row_digest:
            halves = [row[-2:] for step in steps for row in step[2]]
            digests = np.float32(halves)[: len(mine)].reshape(-1, 2).view("<u8")[:, 0]
        np.testing.assert_array_equal(mine.row_digest, digests)
        counts = np.diff(mine.draft_chosen.offsets)
        assert counts.tolist() == (known * len(asked.params.extra_token_ids)).tolist()
        if asked.params.kept_token_ids:
            sent = [row for step in steps for row in as_lists(step[-1])]
            assert as_lists(mine.kept) == sent[: asked.params.max_tokens]
        else:
            assert mine.kept.counts.tolist() == [0] * len(mine)
        begin = 2  # prompts have two tokens
        there = rows[index, begin : begin + len(mine)]
        assert columns.token_id[there].tolist() == mine.token_id.tolist()
        for n in range(len(mine)):
            ids = padded.token_ids[index, begin + n]
            assert ids[ids >= 0].tolist() == mine.kept.ids(n).tolist()
    if len(columns):
        longest = columns.rows_by_place().shape[1]
        assert longest == int(columns.position.max()) + 1
        with pytest.raises(ValueError, match=f"has {longest} tokens, more than length = 2"):
            columns.rows_by_place(2)


def same(left, right, but=()):
    """Assert equal dtypes, shapes and values, NaN included, of all fields but some."""
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        if field.name in but:
            continue
        a, b = getattr(left, field.name), getattr(right, field.name)
        if dataclasses.is_dataclass(a):
            same(a, b)
        elif a is None:
            assert b is None
        else:
            assert a.dtype == b.dtype or a.dtype.kind == "U", field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)


def check(folder, columns):
    arrow.write_parquet(folder / "tokens", columns)
    same(columns, arrow.read_parquet(folder / "tokens"))
    found = arrow.from_sequences(arrow.sequences_table(columns))
    assert (np.diff(found.request) >= 0).all()  # each request's tokens one after the other
    for index in range(len(columns.request_id)):
        same(columns.of_request(index), found.of_request(index))
    if not len(columns):
        same(columns, found)


@pytest.mark.parametrize("columns", [three_requests(), ColumnBuilder().columns()])
def test_files_bring_everything_back(tmp_path, columns):
    check(tmp_path, columns)


@settings(max_examples=30)
@given(streams())
def test_every_run_comes_back(tmp_path_factory, runs):
    check(tmp_path_factory.mktemp("columns"), delivered(runs))


def test_a_sequences_row_has_lists_of_token_columns():
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
    gone = ["draft_extra_token_ids", "kept_token_ids", "log_kept"]
    before, without_mode = (
        tokens_table.drop_columns(gone),
        requests_table.drop_columns(["logprobs_mode"]),
    )
    sequences = arrow.sequences_table(columns).drop_columns(["weights_version"])
    for read, tables, lacks in (
        (arrow.from_tables, (before, requests_table), ", ".join(gone)),
        (arrow.from_tables, (tokens_table, without_mode), "logprobs_mode"),
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
        "kept_token_ids": [[]] * 2 + [[5, 9], []] + [[]] * 4,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["kind"][1] == "recovered"
    assert found["draft_token_id"][:3] == [1, 11, None]
    assert found["log_kept"][1:4] == [None, -0.5, 0]
    requests = arrow.requests_table(three_requests()).to_pydict()
    assert requests["finish_reason"] == ["length", None, None]
    assert requests["logprobs_mode"] == ["raw"] * 3
    assert requests["prompt_token_ids"] == [[1, 2]] * 3


def check_same(found, expected):
    """Equal values and types, request by request: batches have no order among requests."""
    places = {name: at for at, name in enumerate(found.request_id.tolist())}
    assert sorted(places) == sorted(expected.request_id.tolist())
    whole = "request", "request_id", "prompt", "temperature", "logprobs_mode", "finish_reason"
    for at, name in enumerate(expected.request_id.tolist()):
        same(expected.of_request(at), found.of_request(places[name]), but=whole)


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
    late = SamplingParams(max_tokens=2, prompt_logprobs=2, prompt_logprobs_start=13)
    requests.append(Request(id="late", prompt_token_ids=tuple(range(20)), params=late))
    by_id = {request.id: request for request in requests}
    told = [update.records for update in Scene(num_ranks=2).generate(requests)]
    rows, emitted = batches_of(told, size)
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
    expected = delivered(stream)
    check_same(found, expected)
    ends = dict(zip(expected.request_id, expected.finish_reason, strict=True))
    assert dict(zip(found.request_id, found.finish_reason, strict=True)) == ends
    assert len(found.prompt.ids) == 2 * len(ends)  # prompts have two tokens


def test_no_steps_make_an_empty_batch():
    batch = step_rows([], {})
    assert batch.num_rows == 0
    assert len(joined_rows([batch], {})) == 0

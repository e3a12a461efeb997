"""Rollouts as one table, read by others without this package, and as the learners' batches."""

import dataclasses

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings

from jax_specdec.export import arrow, rollouts
from jax_specdec.export.rollouts import SCHEMA, rollouts_table, tunix_batch, verl_batch
from tests.support.processes import output_of
from tests.support.sample_columns import delivered, streams, three_requests

# Three lines each; they print all ids, all masks and the first logprob of each sequence.
READERS = {
    "pyarrow": (
        "import pyarrow.parquet",
        "t = pyarrow.parquet.read_table(PATH)",
        "ids, masks, own = (t[n].to_pylist() for n in ('input_ids', 'loss_mask', 'logprob'))",
    ),
    "datasets": (
        "from datasets import Dataset",
        "t = Dataset.from_parquet(PATH, cache_dir=FOLDER)",
        "ids, masks, own = (t[n][:] for n in ('input_ids', 'loss_mask', 'logprob'))",
    ),
    "polars": (
        "import polars",
        "t = polars.read_parquet(PATH)",
        "ids, masks, own = (t[n].to_list() for n in ('input_ids', 'loss_mask', 'logprob'))",
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_rollouts_is_read_without_this_package(reader, tmp_path):
    path = tmp_path / "rollouts.parquet"
    columns = three_requests()
    pyarrow.parquet.write_table(rollouts_table(columns), path)
    lines = [f"PATH, FOLDER = {str(path)!r}, {str(tmp_path)!r}", *READERS[reader]]
    lines += ["import sys", "assert 'jax_specdec' not in sys.modules"]
    lines += ["print([*map(list, ids)], [*map(list, masks)], [list(x)[0] for x in own], sep='|')"]
    ids, masks, own = output_of("\n".join(lines), cwd=tmp_path).strip().split("|")
    table = rollouts_table(columns)
    assert ids == str(table["input_ids"].to_pylist())
    assert masks == str([[0, 0, 1, 1, 1]] + [[0, 0, 1, 1]] + [[0, 0, 1, 1, 1]])
    assert own == "[-0.5, -1.0, None]"


def test_every_column_says_what_it_is():
    table = rollouts_table(three_requests())
    assert table.column_names == [*SCHEMA]
    assert table.schema.metadata == {b"jax_specdec.rollouts": rollouts.SCHEMA_VERSION.encode()}
    for field in table.schema:
        assert field.metadata == {b"doc": SCHEMA[field.name].encode()}


@settings(max_examples=30)
@given(streams())
def test_nothing_is_lost_in_the_table(runs):
    columns = delivered(runs)
    again = arrow.from_sequences(rollouts_table(columns))
    for request in range(len(columns.request_id)):
        one, other = columns.of_request(request), again.of_request(request)
        for name in (
            "token_id",
            "logprob",
            "entropy",
            "log_sum_exp",
            "row_digest",
            "weights_version",
            "digest",
        ):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        np.testing.assert_array_equal(one.kept.token_ids, other.kept.token_ids)
    for row in rollouts_table(columns).to_pylist():
        assert row["input_ids"] == [*row["prompt_token_ids"], *row["token_id"]]
        emitted = np.flatnonzero(row["loss_mask"]).tolist()
        assert emitted == row["position"]


def with_logprobs():
    """The columns of the requests that have some: "a" with three tokens, "b" with two."""
    columns = three_requests()
    keep = columns.request < 2
    rows = np.flatnonzero(keep)
    names = ("request", "position", "token_id", "logprob", "token_rank")
    return dataclasses.replace(
        columns,
        request_id=columns.request_id[:2],
        prompt=columns.prompt.take(np.arange(2)),
        **{name: getattr(columns, name)[rows] for name in names},
    )


def test_the_batches_have_the_learners_names_and_paddings():
    batch = verl_batch(with_logprobs(), prompt_length=3, response_length=4, pad_id=9)
    prompts = batch["prompts"].tolist()
    assert [row[0] for row in prompts] == [9, 9]  # on the left
    assert batch["responses"].tolist() == [[1, 2, 3, 9], [5, 6, 9, 9]]
    assert batch["response_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 4], [0, 0, 1, 2, 3, 3, 3]]
    np.testing.assert_array_equal(batch["input_ids"], np.hstack([prompts, batch["responses"]]))
    logprobs = batch["rollout_log_probs"]
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(logprobs[1], np.float32([-1.0, np.nan, 0, 0]))
    theirs = tunix_batch(with_logprobs(), prompt_length=3, response_length=4, pad_id=9)
    assert [*theirs] == [
        "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old_per_token_logps",
    ]  # fmt: skip
    assert theirs["prompt_mask"].tolist() == [[False, True, True]] * 2
    np.testing.assert_array_equal(theirs["completion_ids"], batch["responses"])
    np.testing.assert_array_equal(theirs["old_per_token_logps"], logprobs)


def test_what_is_no_batch_is_refused():
    with pytest.raises(ValueError, match=r"request 'c' has tokens without logprobs.* logprobs = 0"):
        verl_batch(three_requests())
    with pytest.raises(ValueError, match="a response has 3 tokens, more than response_length = 2"):
        tunix_batch(with_logprobs(), response_length=2)
    with pytest.raises(ValueError, match="a prompt has 2 tokens, more than prompt_length = 1"):
        verl_batch(with_logprobs(), prompt_length=1)

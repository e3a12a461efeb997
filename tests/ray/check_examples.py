"""The examples on a cluster, run as a user runs them."""

import re

from pyarrow import parquet

from tests.support.run_examples import EXAMPLES, run

ROLLOUT = re.compile(
    r"iteration (\d): weights \[(\d)\], .* of 384 tokens: ([^ ,]+), rows of other logits: (\d+)"
)


def test_rollouts_of_new_weights_have_a_ratio_of_one():
    printed = run(EXAMPLES / "ray_rollouts.py")
    found = ROLLOUT.findall(printed)
    assert [one[:2] for one in found] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert all((float(largest), rows) == (0, "0") for _, _, largest, rows in found)
    assert re.search(r"1152 tokens came in \d+ batches", printed)


def test_rollouts_of_stale_weights_are_noticed():
    printed = run(EXAMPLES / "ray_rollouts.py", "--stale", status=1)
    found = ROLLOUT.findall(printed)
    assert [(version, rows) for _, version, _, rows in found] == [("0", "0"), ("0", "384")]
    assert "the rollouts are of another policy" in printed


def test_prompts_are_scored_into_parquet(tmp_path):
    printed = run("-W", "default", EXAMPLES / "ray_score.py", "--output", str(tmp_path / "out"))
    found = re.findall(r"^(\S+) nats a token: '(.*)'", printed, re.MULTILINE)
    scores = [float(score) for score, _ in found]
    assert len(scores) == 6
    assert scores == sorted(scores)
    assert found[-1][1] == "qqqqqq"  # nothing a Python source has
    table = parquet.read_table(tmp_path / "out")
    for ids, logprobs in zip(
        table["token_ids"].to_pylist(), table["logprobs"].to_pylist(), strict=True
    ):
        assert len(logprobs) == len(ids) - 1
        assert max(logprobs) <= 0

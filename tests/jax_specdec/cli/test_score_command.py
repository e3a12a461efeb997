"""`jax-specdec score`: its columns, and runs that are cut short and go on."""

import json
import signal

import numpy as np
import pytest

from jax_specdec.cli.scored_parts import LOCK, ScoredParts, scored_sequence
from jax_specdec.records.batch import PromptRows
from tests.support.command_status import status_of
from tests.support.scripted_process import scripted_engine
from tests.support.scripted_worker import logprob

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")


def rows(start, ids, k):
    n = len(ids)
    logprobs = -np.arange(n * (k + 1), dtype=np.float32).reshape(n, k + 1)
    topk = np.arange(n * k, dtype=np.int32).reshape(n, k)
    nothing = np.empty((n, 0), np.float32)
    ids = np.asarray(ids, np.int32)
    return PromptRows(start, ids, logprobs, nothing, np.ones(n, np.int32), topk)


def sequence(id, prompt=(7, 8, 9, 7), k=2):
    return scored_sequence(id, f"digest {id}", prompt, [rows(1, prompt[1:], k)], k)


@pytest.mark.parametrize("k", [0, 2])
def test_a_row_a_sequence(k):
    chunks = [rows(1, (8, 9), k), rows(3, (7,), k)]
    made = scored_sequence("a", "d", (7, 8, 9, 7), chunks, k)
    table = pa.concat_tables([made, scored_sequence("b", "d", (5,), [], k)])
    expected = np.concatenate([chunk.logprobs for chunk in chunks])
    columns = {
        "token_ids": [[7, 8, 9, 7], [5]],
        "logprobs": [expected[:, 0].tolist(), []],
        "token_ranks": [[1, 1, 1], []],
    }
    if k:
        columns["topk_logprobs"] = [expected[:, 1:].tolist(), []]
        columns["topk_ids"] = [[[0, 1], [2, 3], [0, 1]], []]
    columns |= {"id": ["a", "b"], "digest": ["d", "d"]}
    assert table.to_pydict() == columns
    with pytest.raises(ValueError, match="2 rows are not of its 4 tokens"):
        scored_sequence("a", "d", (7, 8, 9, 7), chunks[:1], k)


def test_parts_are_whole_or_absent(tmp_path):
    folder = tmp_path / "out"
    with ScoredParts(folder) as parts:
        parts.write()
        assert not list(folder.glob("part-*"))  # there was nothing to write
        parts.add(sequence("a"))
        parts.write()
        parts.add(sequence("lost"))
        with pytest.raises(ValueError, match="another process writes"):
            ScoredParts(folder)
    (folder / ".part-00002").write_bytes(b"cut short")
    with ScoredParts(folder, max_bytes=2 * sequence("b").nbytes) as parts:
        assert parts.done == {"a": "digest a"}
        assert [parts.add(sequence(name)) for name in "bcdef"] == [False, True, False, True, False]
    names = [LOCK, "part-00001.parquet", "part-00002.parquet", "part-00003.parquet"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert pq.read_table(folder)["id"].to_pylist() == list("abcde")
    (folder / "part-00001.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"part-00001\.parquet is not of this command"):
        ScoredParts(folder)


def test_a_run_that_ends_early_goes_on(model, use_engine, tmp_path, capsys, monkeypatch):
    """Interrupted, then whole: every sequence once, as in a run of one go."""

    def run(output, k=3):
        status = status_of(*options, "--output", output, "--logprobs", k)
        return status, capsys.readouterr().err

    file, out, whole = tmp_path / "p.jsonl", tmp_path / "out", tmp_path / "whole"
    lines = [{"id": f"n{i}", "prompt_token_ids": list(range(4, 30 + i))} for i in range(12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["score", "--model", model, "--prompts", file, "--slots", 2]
    add, added = ScoredParts.add, []

    def interrupted(parts, sequence):
        added.append(add(parts, sequence))
        if len(added) == 5:
            signal.raise_signal(signal.SIGINT)
        return added[-1]

    use_engine(scripted_engine())
    with monkeypatch.context() as patch:
        patch.setattr(ScoredParts, "add", interrupted)
        status, error = run(out)
    said = f"ended before that: 5 of 12 prompts, kept in {out}: run the same command"
    assert (status, said in error, pq.read_table(out).num_rows) == (130, True, 5)
    status, error = run(out)
    assert (status, "in the output already: 5 of 12 prompts" in error) == (0, True)
    assert run(out) == (0, "in the output already: 12 of 12 prompts\n")
    assert run(whole)[0] == 0
    found, expected = (pq.read_table(folder).sort_by("id") for folder in (out, whole))
    assert found.equals(expected)
    assert found.num_rows == 12
    for row in found.to_pylist():
        ids = row["token_ids"]
        assert row["logprobs"] == [logprob(ids[:n]) for n in range(1, len(ids))]
    assert run(out, k=4)[0] == 2

"""`jax-specdec score`: its columns, and runs that are cut short and go on."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from jax_specdec.cli.scored_parts import LOCK, ScoredParts
from jax_specdec.export.scored_sequences import scored_sequence, sequences_table
from jax_specdec.records.batch import PromptRows
from tests.support import decoding, hf_files
from tests.support.processes import children_of
from tests.support.scripted_process import start_command
from tests.support.tiny_checkpoint import CONFIG, make_tokenizer

pq = pytest.importorskip("pyarrow.parquet")


def start(*options, hold=-1):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return start_command("score", *options, hold=hold, **pipes)


def run(*options, status=0):
    """Run the command to its end; returns its standard error."""
    with start(*options) as process:
        _, err = process.communicate(timeout=250)
    assert process.returncode == status, err
    return err


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
    alone = scored_sequence("b", "d", (5,), [], k)
    table = sequences_table([made, alone], k)
    assert table["token_ids"].to_pylist() == [[7, 8, 9, 7], [5]]
    expected = np.concatenate([chunk.logprobs for chunk in chunks])
    assert table["logprobs"].to_pylist() == [expected[:, 0].tolist(), []]
    assert table["token_ranks"].to_pylist() == [[1, 1, 1], []]
    if k:
        assert table["topk_logprobs"].to_pylist() == [expected[:, 1:].tolist(), []]
        assert table["topk_ids"].to_pylist()[0] == [[0, 1], [2, 3], [0, 1]]
    else:
        assert "topk_ids" not in table.column_names


def test_rows_of_another_prompt_are_refused():
    with pytest.raises(ValueError, match="2 rows are not of its 4 tokens"):
        scored_sequence("a", "d", (7, 8, 9, 7), [rows(1, (8, 9), 1)], 1)


def test_parts_are_whole_or_absent(tmp_path):
    with ScoredParts(tmp_path / "out", 2) as parts:
        parts.write()
        assert not list((tmp_path / "out").glob("part-*"))  # there was nothing to write
        parts.add(sequence("a"))
        parts.write()
        parts.add(sequence("lost"))
        with pytest.raises(ValueError, match="another process writes"):
            ScoredParts(tmp_path / "out", 2)
    (tmp_path / "out" / ".part-00002").write_bytes(b"cut short")
    with ScoredParts(tmp_path / "out", 2) as parts:
        assert parts.done == {"a": "digest a"}
        parts.add(sequence("b"))
        parts.write()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [LOCK, "part-00001.parquet", "part-00002.parquet"]
    assert pq.read_table(tmp_path / "out")["id"].to_pylist() == ["a", "b"]


def test_large_parts_are_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_specdec.cli.scored_parts.MAX_PART_BYTES", 2 * sequence("a").num_bytes)
    with ScoredParts(tmp_path, 2) as parts:
        assert [parts.add(sequence(name)) for name in "abcde"] == [False, True, False, True, False]
    assert pq.read_table(tmp_path)["id"].to_pylist() == list("abcd")


def test_a_foreign_file_is_named(tmp_path):
    (tmp_path / "part-00001.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"part-00001\.parquet is not of this command"):
        ScoredParts(tmp_path, 2)


def test_a_run_that_ends_early_goes_on(model, tmp_path):
    """Interrupted, then killed, then whole: every sequence once, as in a run of one go."""
    file, out, whole = tmp_path / "p.jsonl", tmp_path / "out", tmp_path / "whole"
    lines = [{"id": f"n{i}", "prompt_token_ids": list(range(4, 30 + i))} for i in range(12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", model, "--prompts", file, "--logprobs", 3, "--slots", 2]
    process = start(*options, "--output", out, hold=12)
    try:
        while not (children := children_of(process.pid)):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(2)  # some are scored; the worker is silent by then
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert children
    assert process.returncode == 130
    assert f"of 12 prompts, kept in {out}: run the same command again for the others" in error
    error = run(*options, "--output", out)
    assert "12 prompts" in error
    assert "in the output already: 12 of 12 prompts" in run(*options, "--output", out)
    run(*options, "--output", whole)
    found, expected = (
        {row["id"]: row for row in pq.read_table(folder).to_pylist()} for folder in (out, whole)
    )
    assert found == expected
    assert len(pq.read_table(out)) == 12
    run(*options[:-4], "--logprobs", 4, "--output", out, status=2)


def test_lines_with_parameters_are_refused(model, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "prompt": "x", "temperature": 0.5}\n')
    error = run("--model", model, "--prompts", file, "--output", tmp_path / "o", status=2)
    assert "prompt 'a' has parameters of its own" in error


@pytest.mark.slow
def test_scores_are_those_of_the_loop(model, tmp_path):
    file = tmp_path / "p.txt"
    texts = ["import json, import json, import", "x" * 90]
    file.write_text("\n".join(texts))
    command = ["python", "-m", "jax_specdec.cli", "score", "--model", model, "--prompts", file,
               "--output", tmp_path / "out", "--logprobs", 4]  # fmt: skip
    subprocess.run([os.sys.executable, *map(str, command[1:])], check=True, timeout=250)
    tokenizer = make_tokenizer()
    requests = [
        decoding.request(str(n), tokenizer.encode(text).ids, max_tokens=1, prompt_logprobs=4)
        for n, text in enumerate(texts, 1)
    ]
    params = hf_files.random_params(CONFIG)
    want = decoding.run(requests, "none", num_slots=2, model=(params, CONFIG))
    for row in pq.read_table(tmp_path / "out").to_pylist():
        parts = [one.prompt for one in want.records[row["id"]] if one.prompt is not None]
        logprobs = np.concatenate([part.logprobs for part in parts])
        np.testing.assert_allclose(row["logprobs"], logprobs[:, 0], rtol=1e-5)
        np.testing.assert_allclose(row["topk_logprobs"], logprobs[:, 1:], rtol=1e-5)
        assert row["token_ranks"] == np.concatenate([x.token_ranks for x in parts]).tolist()
        assert row["topk_ids"] == np.concatenate([x.topk_ids for x in parts]).tolist()

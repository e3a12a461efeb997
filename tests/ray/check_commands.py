"""The command line on a cluster of several raylets, with the real worker."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from jax_specdec.cli.generate_ray import read_table
from jax_specdec.export import arrow
from tests.ray.cluster import cluster_that_compiles, fixture
from tests.support import tiny_checkpoint
from tests.support.paths import ROOT
from tests.support.processes import ended, wait_for

COMMAND = (sys.executable, "-m", "jax_specdec.cli.main")
TEXTS = ("def", "import os", "class A", "return", "for", "while")


cluster = fixture(cluster_that_compiles, 1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint.write(tmp_path_factory.mktemp("model"))


def run(*arguments):
    """What a run of the command that succeeds prints."""
    done = ended(*COMMAND[1:], *arguments, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_generate_writes_each_request_once_and_goes_on(cluster, model, tmp_path):
    """As `generate` here: the same ids; a second run finds all of them; a torn file is mended."""
    prompts, folder = tmp_path / "p.txt", tmp_path / "columns"
    prompts.write_text("".join(f"{text}\n" for text in TEXTS[:3]))
    common = ("generate", "--model", model, "--max-tokens", 8, "--logprobs", 1, "--quiet",
              "--drafter", "none", "--ignore-eos", "--slots", 4, "--prompts", prompts)  # fmt: skip
    on_ray = (*common, "--ray", cluster.address, "--replicas", 2, "--output", folder)
    assert "3 of 3 requests, 24 tokens" in run(*on_ray)
    columns = arrow.from_sequences(read_table(folder))
    assert sorted(columns.request_id.tolist()) == ["1", "2", "3"]
    assert len(columns) == 24

    # A batch that was torn off with the machine: the run does that request again, and no other.
    file = max(folder.glob("replica-*.arrows"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size - 5)
    prompts.write_text("".join(f"{text}\n" for text in TEXTS))
    assert "cut off a half-written record" in run(*on_ray)
    again = arrow.from_sequences(read_table(folder))
    assert sorted(again.request_id.tolist()) == [str(n + 1) for n in range(6)]

    local = tmp_path / "local.jsonl"
    run(*common, "--output", local)
    for record in map(json.loads, local.read_text().splitlines()):
        mine = again.of_request(again.request_id.tolist().index(record["id"]))
        expected = record["choices"][0]["logprobs"]["token_logprobs"]
        assert mine.logprob.tolist() == pytest.approx(expected, abs=1e-4)
    run(*on_ray)

    # The prompt's logprobs are columns of such a file, and a part of a record here.
    scored = tmp_path / "scored.jsonl"
    scored.write_text('{"prompt": "import os", "prompt_logprobs": 2}\n')
    folder, local = tmp_path / "scored", tmp_path / "scored.out.jsonl"
    for more in (("--ray", cluster.address, "--output", folder), ("--output", local)):
        run(*common[:-1], scored, *more)
    (row,) = read_table(folder).to_pylist()
    entries = json.loads(local.read_text())["speculation"]["prompt_logprobs"][1:]
    assert len(entries) == len(row["prompt_logprobs"]) > 4
    for ids, logprobs, entry in zip(
        row["prompt_topk_ids"], row["prompt_logprobs"], entries, strict=True
    ):
        assert entry["logprob"] == pytest.approx(logprobs[0], abs=1e-4)
        assert len(ids) + 1 == len(logprobs) == 3


def test_serve_answers(cluster, model):
    server = subprocess.Popen(
        [*COMMAND, "serve", "--ray", cluster.address, "--port", "18432", "--slots", "2",
         "--max-length", "64", "--drafter", "none"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert any("serving" in line for line in server.stderr), "it has ended"
        asked = {"prompt": "def main(", "max_tokens": 4, "logprobs": 1}
        with httpx.Client(base_url="http://127.0.0.1:18432", timeout=200) as client:
            (model_here,) = client.get("/v1/models").json()["data"]
            asked["model"] = model_here["id"]
            answer = client.post("/v1/completions", json=asked).json()
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 4
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: server.poll() is not None, 60)
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()

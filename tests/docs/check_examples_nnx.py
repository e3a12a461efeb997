"""The Flax NNX example, as a user runs it: pytest tests/docs/check_examples_nnx.py

Named so that the ordinary test run does not collect it: flax brings a dozen packages along.
"""

import os
import re

import openai

from tests.support.run_examples import EXAMPLES, run
from tests.support.served_process import served


def test_an_nnx_model_is_decoded_with_logprobs():
    text = run(EXAMPLES / "nnx_model.py")
    assert re.search(r"trained to 0\.\d\d and \d\.\d\d nats", text)
    # The window of 8 characters knows the text by heart; greedy decoding recites it.
    assert "Alice was beginning to get very tired of sitting by her sister on the" in text
    assert re.search(r"step 0  greedy .* logprob so far +-\d\.\d{3}", text)
    rate = re.search(r"accepted (\d+)% of the drafts", text)
    assert 0 < int(rate[1]) < 100


def test_it_runs_in_the_worker_and_the_engine():
    text = run(EXAMPLES / "nnx_engine.py")
    assert "Alice was beginning to get very tired of sitting by her sister on the" in text
    assert re.search(r"^the Rabbit .*\(\d+ drafts accepted\)$", text, re.MULTILINE)


def test_it_is_served(tmp_path):
    text = run(EXAMPLES / "nnx_engine.py", str(tmp_path))
    assert f"--own-model nnx_engine:make --tokenizer {tmp_path}" in text
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    options = ("--own-model", "nnx_engine:make", "--tokenizer", str(tmp_path))
    environment = os.environ | {"PYTHONPATH": path}
    with served(*options, "--max-length", "128", env=environment) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.completions.create(
            model="nnx_engine", prompt="Alice was", max_tokens=60, logprobs=2, temperature=0
        )
    (choice,) = answer.choices
    assert choice.text.startswith(" beginning to get very tired of sitting by her sister on the")
    assert len(choice.logprobs.token_logprobs) == 60
    assert server.exit_status == 0

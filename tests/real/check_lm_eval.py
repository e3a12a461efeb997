"""lm-evaluation-harness on a real model through the server, against its own transformers backend.

Named so that the ordinary test run does not collect it: `.ci/heavy real` does.
"""

import os

import pytest
from lm_eval.models.huggingface import HFLM

from tests.real import model
from tests.support.lm_eval_backends import check_generated, check_loglikelihoods, client_of
from tests.support.served_process import served

TEXTS = [prompt for prompt in model.PROMPTS if isinstance(prompt, str)]


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """The reference, and the client of a server of the same file."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    loaded, tokenizer = model.reference()
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    reference = HFLM(pretrained=loaded, tokenizer=tokenizer, batch_size=1, max_length=240)
    options = "--max-length", "256", "--slots", "4", "--name", "model"
    with served("--model", str(model.path()), *options) as server:
        yield reference, client_of(server, directory, 240)


def test_loglikelihoods_are_equal(backends):
    check_loglikelihoods(backends, [(a, " " + b) for a in TEXTS[:4] for b in TEXTS[2:8]])


def test_generated_texts_are_equal(backends):
    check_generated(backends, TEXTS[:8], until=["\n\n"], different=4)

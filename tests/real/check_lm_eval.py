"""lm-evaluation-harness on a real model through the server, against its own transformers backend.

Named so that the ordinary test run does not collect it: `.ci/heavy real` does.
"""

import os

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from tests.real import model
from tests.support.served_process import served

TOLERANCE = 1e-3
TEXTS = [prompt for prompt in model.PROMPTS if isinstance(prompt, str)]


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """The reference, and the client of a server of the same file."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    loaded, tokenizer = model.reference()
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    reference = HFLM(pretrained=loaded, tokenizer=tokenizer, batch_size=1, max_length=240)
    options = ("--model", str(model.path()), "--max-length", "256", "--slots", "4", "--name", "it")
    with served(*options) as server:
        client = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", model="it", tokenizer=str(directory),
            tokenizer_backend="huggingface", num_concurrent=4, max_length=242,
        )  # fmt: skip
        yield reference, client


def answers(backends, kind, arguments):
    asked = [
        Instance(request_type=kind, doc={}, arguments=one, idx=n) for n, one in enumerate(arguments)
    ]
    return [getattr(each, kind)(asked, disable_tqdm=True) for each in backends]


def test_loglikelihoods_are_equal(backends):
    pairs = [(a, " " + b) for a in TEXTS[:4] for b in TEXTS[2:8]]
    want, got = answers(backends, "loglikelihood", pairs)
    assert len({round(value, 2) for value, _ in want}) > len(pairs) // 2
    for (value, greedy), (other, other_greedy) in zip(want, got, strict=True):
        assert other == pytest.approx(value, abs=TOLERANCE)
        assert other_greedy == greedy


def test_generated_texts_are_equal(backends):
    settings = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
    want, got = answers(backends, "generate_until", [(text, settings) for text in TEXTS[:8]])
    assert got == want
    assert len(set(want)) > 4

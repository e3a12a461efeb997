"""lm-evaluation-harness through the server, against its own transformers backend.

Log-likelihoods within 1e-3, the same choices and accuracy, the same generated texts. Named so that
the ordinary test run does not collect it: `.ci/heavy lm-eval` does.
https://github.com/EleutherAI/lm-evaluation-harness
"""

import json
import os

import pytest
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.hf import checkpoints
from tests.hf.check_command import save
from tests.support import quick_compile
from tests.support.lm_eval_backends import (
    TOLERANCE,
    answers,
    check_generated,
    check_loglikelihoods,
    client_of,
)
from tests.support.served_process import served
from tests.support.tokenizer_files import CORPUS, byte_level

MAX_LENGTH = 120  # of both backends
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """The reference, and the client of a server of the same checkpoint."""
    directory = tmp_path_factory.mktemp("lm") / "model"
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    os.environ["HF_DATASETS_CACHE"] = str(directory.parent / "datasets")
    checkpoints.write(directory, checkpoints.build("Qwen3", vocab_size=512))
    save(directory, byte_level)
    reference = HFLM(
        pretrained=str(directory), device="cpu", dtype="float32", batch_size=1, add_bos_token=True,
        max_length=MAX_LENGTH,
    )  # fmt: skip
    # What rounding does is far below the tolerance: compile as cheaply as possible.
    environment = os.environ | {"XLA_FLAGS": quick_compile.FLAGS}
    options = ("--model", directory, "--max-length", "256", "--slots", "4")
    with served(*options, env=environment) as server:
        yield reference, client_of(server, directory, MAX_LENGTH, add_bos_token=True)


def test_loglikelihoods_are_equal(backends):
    check_loglikelihoods(backends, [(a, " " + b) for a in CORPUS[:3] for b in CORPUS[:4]])


def test_rolling_loglikelihoods_are_equal(backends):
    texts = [(" ".join(CORPUS) * 4,), (CORPUS[0],)]  # the first one has several windows
    want, got = answers(backends, "loglikelihood_rolling", texts)
    assert got == pytest.approx(want, abs=TOLERANCE)


def test_generated_texts_are_equal(backends):
    check_generated(backends, CORPUS, until=["\n\n", "zz"], different=1)


def test_a_local_task_has_the_same_accuracy(backends, tmp_path):
    words = " ".join(CORPUS).split()
    rows = [
        {"question": CORPUS[n % len(CORPUS)], "label": n % 3,
         "choices": [" " + words[(n * 7 + k * 5) % len(words)] for k in range(3)]}
        for n in range(24)
    ]  # fmt: skip
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "local.yaml").write_text(TASK.format(data=tmp_path / "rows.json"))
    # `simple_evaluate` does the same, and asks pip for the packages of the environment.
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = [
        evaluate(lm=each, task_dict=manager.load(["local_choices"]), bootstrap_iters=0)
        for each in backends
    ]
    accuracies = [one["results"]["local_choices"]["acc,none"] for one in found]
    assert accuracies[0] == accuracies[1]
    assert 0 < accuracies[0] < 1

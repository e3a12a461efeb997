"""lm-evaluation-harness through the server, against its own transformers backend.

Log-likelihoods within 1e-3, the same choices and accuracy, the same generated texts. Named so that
the ordinary test run does not collect it: `.ci/heavy lm-eval` does.
https://github.com/EleutherAI/lm-evaluation-harness
"""

import json
import os

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.hf import checkpoints
from tests.hf.check_command import save
from tests.support import quick_compile
from tests.support.served_process import served
from tests.support.tokenizer_files import CORPUS, byte_level

TOLERANCE = 1e-3
MAX_LENGTH = 120  # of both backends
VOCAB = 512
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
    checkpoints.SIZES["vocab_size"], before = VOCAB, checkpoints.SIZES["vocab_size"]
    try:
        written = checkpoints.build("Qwen3")
    finally:
        checkpoints.SIZES["vocab_size"] = before
    checkpoints.write(directory, written, dtype=torch.float32, shard_bytes=None)
    save(directory, byte_level)
    reference = HFLM(
        pretrained=str(directory), device="cpu", dtype="float32", batch_size=1, add_bos_token=True,
        max_length=MAX_LENGTH,
    )  # fmt: skip
    # What rounding does is far below the tolerance: compile as cheaply as possible.
    environment = os.environ | {"XLA_FLAGS": quick_compile.FLAGS}
    options = ("--model", directory, "--max-length", "256", "--slots", "4")
    with served(*options, env=environment) as server:
        client = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", model="model", tokenizer=str(directory),
            tokenizer_backend="huggingface", num_concurrent=4, max_length=MAX_LENGTH + 2,
            add_bos_token=True,
        )  # fmt: skip
        yield reference, client


def instances(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=n) for n, one in enumerate(arguments)
    ]


def test_loglikelihoods_are_equal(backends):
    pairs = [(a, " " + b) for a in CORPUS[:3] for b in CORPUS[:4]]
    want, got = (
        each.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
        for each in backends
    )
    assert len({round(value, 2) for value, _ in want}) > len(pairs) // 2
    for (value, greedy), (other, other_greedy) in zip(want, got, strict=True):
        assert other == pytest.approx(value, abs=TOLERANCE)
        assert other_greedy == greedy


def test_rolling_loglikelihoods_are_equal(backends):
    texts = [(" ".join(CORPUS) * 4,), (CORPUS[0],)]  # the first one has several windows
    want, got = (
        each.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
        for each in backends
    )
    assert got == pytest.approx(want, abs=TOLERANCE)


def test_generated_texts_are_equal(backends):
    settings = {"until": ["\n\n", "zz"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
    asked = [(text, settings) for text in CORPUS]
    want, got = (
        each.generate_until(instances("generate_until", asked), disable_tqdm=True)
        for each in backends
    )
    assert got == want
    assert len(set(want)) > 1


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

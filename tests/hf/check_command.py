"""`jax-specdec generate` and its tokenizer, against transformers, through files alone.

Named so that the ordinary test run does not collect it: `.ci/heavy hf` does.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jax_specdec.text.tokenizer import Tokenizer
from tests.hf import checkpoints
from tests.support.tokenizer_files import CHAT, CORPUS, byte_level, write
from tests.support.tokenizer_kinds import mistral

TOLERANCE = 1e-4
MESSAGES = [{"role": "user", "content": "Zwei Boxkämpfer?"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def save(directory, make):
    """A tokenizer as transformers saves it: with its own config and template files."""
    write(directory, make())
    wrapped = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **SPECIAL)
    wrapped.chat_template = CHAT
    wrapped.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@pytest.mark.parametrize("make", [byte_level, mistral])
def test_tokenizer_and_template_equal_transformers(make, tmp_path):
    # The class is looked up by the model's type.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    reference = save(tmp_path, make)
    ours = Tokenizer(tmp_path, len(reference))
    for text in [*CORPUS[:3], "", "  two", "<s> </s>"]:
        assert list(ours.encode(text)) == reference(text)["input_ids"]
    chat = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True)
    assert list(ours.encode_chat(MESSAGES)) == list(chat["input_ids"])
    ids = reference(CORPUS[1])["input_ids"]
    text = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.table().decode(ids).removeprefix(" ") == text == CORPUS[1]


def test_the_command_writes_what_transformers_computes(tmp_path):
    directory = tmp_path / "model"
    written = checkpoints.build("Qwen3", vocab_size=512)
    checkpoints.write(directory, written, dtype=torch.bfloat16, shard_bytes=60_000)
    tokenizer = save(directory, byte_level)
    checkpoint = checkpoints.read(directory)
    lines = [{"id": "a", "prompt": CORPUS[0]}, {"id": "b", "messages": MESSAGES}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    subprocess.run(
        [sys.executable, "-m", "jax_specdec.cli.main", "generate", "--model", directory,
         "--prompts", tmp_path / "p.jsonl", "--output", tmp_path / "o.jsonl", "--dtype", "float32",
         "--max-tokens", "24", "--logprobs", "4", "--ignore-eos", "--quiet"],
        check=True,
    )  # fmt: skip
    records = {
        one["id"]: one for one in map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    }
    prompts = {
        "a": tokenizer(CORPUS[0])["input_ids"],
        "b": list(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]),
    }
    for name, prompt in prompts.items():
        speculation, choice = records[name]["speculation"], records[name]["choices"][0]
        ids = speculation["token_ids"]
        assert speculation["prompt_token_ids"] == prompt
        with torch.no_grad():
            generated = checkpoint.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=24, do_sample=False, eos_token_id=None,
            )[0, len(prompt) :].tolist()  # fmt: skip
            logits = checkpoint(torch.tensor([prompt + ids])).logits[0].double().numpy()
        logprobs = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
        logprobs = logprobs[len(prompt) - 1 : -1]
        top = -np.sort(-logprobs, axis=1)[:, :4]
        assert (top[:, 0] - top[:, 1]).min() > TOLERANCE  # no near tie: then ids must be equal
        assert ids == generated
        if name == "a":
            got = choice["logprobs"]["token_logprobs"]
        else:
            content = choice["logprobs"]["content"]
            got = [token["logprob"] for token in content]
            got_top = [[one["logprob"] for one in token["top_logprobs"]] for token in content]
            np.testing.assert_allclose(got_top, top, atol=TOLERANCE, rtol=0)
        own = logprobs[np.arange(24), ids]
        np.testing.assert_allclose(got, own, atol=TOLERANCE, rtol=0)

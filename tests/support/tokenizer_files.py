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


def sentencepiece_style():
    """A tokenizer like Llama 2's: a space is U+2581, one precedes a text; bytes cover the rest."""
    letters = sorted({c for text in CORPUS[:1] for c in text.replace(" ", "▁")} | {"▁"})
    pieces = SPECIAL + ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)] + letters
    merges = [("▁", "q"), ("t", "h"), ("th", "e"), ("▁", "the"), ("o", "x")]
    pieces += ["".join(pair) for pair in merges if "".join(pair) not in pieces]
    model = models.BPE(
        vocab={piece: id for id, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
    )
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    made.add_special_tokens([*SPECIAL, "<unk>"])
    return made


def metaspace():
    made = sentencepiece_style()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece_style, "metaspace": metaspace}


def write(directory, made, config=None):
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    made.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory

"""A small checkpoint with a tokenizer and a chat template, for tests of whole commands."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jax_specdec.checkpoint.model_config import ModelConfig
from tests.support import hf_files

VOCAB = 300
CONFIG = ModelConfig.tiny(VOCAB, qkv_bias=True, tie_embeddings=False, num_mtp_layers=0)
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|model|>"


def make_tokenizer():
    """A byte-level tokenizer, trained on this file; ids 0 to 3 are special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,  # as usual, the model has ids that the tokenizer lacks
        special_tokens=["<s>", "</s>", "<|user|>", "<|model|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([__file__], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return made


def write(directory, config=CONFIG):
    """Write the whole model directory."""
    hf_files.write(directory, config, shards=2, fields={"eos_token_id": 1})
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return directory

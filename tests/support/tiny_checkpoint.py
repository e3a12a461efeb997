"""A small checkpoint with a tokenizer and a chat template, for tests of whole commands."""

from jax_specdec.checkpoint.model_config import ModelConfig
from tests.support import hf_files, tokenizer_files

VOCAB = 300
CONFIG = ModelConfig.tiny(VOCAB, qkv_bias=True, tie_embeddings=False, num_mtp_layers=0)


def write(directory, config=CONFIG):
    """Write the whole model directory."""
    hf_files.write(directory, config, shards=2, fields={"eos_token_id": 1})
    made = tokenizer_files.byte_level(VOCAB - 8)  # as usual, the model has ids that it lacks
    return tokenizer_files.write(directory, made, {"chat_template": tokenizer_files.CHAT})

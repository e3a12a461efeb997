"""The decoder that comes with the package, its MTP head, and their weights.

A small door beside `jax_specdec.device`, for programs that load, run or train this model. What lies
behind it may change, the functions of the modules `llama` and `mtp` among it.
"""

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.checkpoint.shipped import tiny_weights_path
from jax_specdec.device.model import llama, mtp
from jax_specdec.device.model.attention import tiled_attention
from jax_specdec.device.model.checkpoint import (
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from jax_specdec.device.model.own_model import OwnModel
from jax_specdec.device.model.params import (
    KVCache,
    LayerParams,
    ModelParams,
    init_cache,
    init_mtp_cache,
    init_params,
    named_arrays,
)
from jax_specdec.device.model.sequences import digest_of, sequence_logprobs
from jax_specdec.device.model.tiles import over_rows, tiled_norm, tiled_product

__all__ = [
    "ModelConfig",
    "ModelParams",
    "LayerParams",
    "KVCache",
    "init_params",
    "named_arrays",
    "init_cache",
    "init_mtp_cache",
    # A model of your own.
    "OwnModel",
    # The same bits in any batch: the learner's function, and pieces for a model of your own.
    "sequence_logprobs",
    "digest_of",
    "over_rows",
    "tiled_product",
    "tiled_norm",
    "tiled_attention",
    # The forward pass, the output head and the layer that decoding and training share.
    "llama",
    "mtp",
    # Files.
    "load_model",
    "load_checkpoint",
    "save_checkpoint",
    "tiny_weights_path",
]

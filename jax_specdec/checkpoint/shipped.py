"""The weights that come with the package."""

import json
from importlib import resources
from pathlib import Path

from jax_specdec.checkpoint.model_config import ModelConfig


def tiny_weights_path() -> Path:
    """The file of the byte-level weights that come with the package."""
    return Path(str(resources.files("jax_specdec"))) / "weights" / "tiny.safetensors"


def tiny_config() -> ModelConfig:
    """The sizes of the model whose weights these are."""
    from safetensors import safe_open  # milliseconds, which few users of the path need

    with safe_open(tiny_weights_path(), framework="numpy") as file:
        return ModelConfig.from_dict(json.loads(file.metadata()["config"]))

"""The weights that come with the package."""

from importlib import resources
from pathlib import Path


def tiny_weights_path() -> Path:
    """The file of the byte-level weights that come with the package."""
    return Path(str(resources.files("jax_specdec"))) / "weights" / "tiny.safetensors"

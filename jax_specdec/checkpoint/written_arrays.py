"""Arrays as a checkpoint that looks like another one.

A trainer has arrays and a worker reads files. What the file holds beside the arrays, the
configuration above all, is that of the checkpoint which the worker runs.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_specdec.checkpoint.gguf_file import is_gguf
from jax_specdec.checkpoint.hf_files import INDEX, SINGLE
from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.checkpoint.shipped import tiny_weights_path


def write_arrays(
    arrays: Mapping[str, Any], like: str, target: Path, *, is_own_model: bool = False
) -> Path:
    """Write arrays with the configuration of a checkpoint.

    Args:
      arrays: by the names that the tensors have in `like`: those of its files in a directory in
        Hugging Face layout, dotted paths such as "layers.query" in a file. NumPy's, or what
        `numpy.asarray` takes.
      like: the checkpoint; empty for the weights that come with the package.
      target: the path to make, without a suffix.
      is_own_model: the arrays are of a model of the user's own, and have no configuration.

    Returns:
      `target` with a suffix: a file, or a directory where `like` is one.

    Raises:
      OSError: the file cannot be written, or `like` not read.
      CheckpointError: an array is not one of numbers, or `like` is damaged.
    """
    tensors = {name: _contiguous(name, value) for name, value in arrays.items()}
    folder = Path(like)
    if not is_own_model and is_gguf(like):
        raise CheckpointError(
            f"arrays have the names of a directory's tensors, and {like} is a GGUF file: give the "
            "path of another one, or start the engine with a directory"
        )
    if like and not is_own_model and folder.is_dir():
        made = target.with_suffix(".checkpoint")
        made.mkdir()
        for path in folder.iterdir():  # configuration and tokenizer
            if path.suffix != ".safetensors" and path.name != INDEX:
                (made / path.name).symlink_to(path.absolute())
        _save(tensors, made / SINGLE, {"format": "pt"})
        return made
    made = target.with_suffix(".safetensors")
    _save(tensors, made, {} if is_own_model else _metadata(like or tiny_weights_path()))
    return made


def _contiguous(name: str, value: Any) -> np.ndarray:
    array = np.ascontiguousarray(value)
    if array.dtype.kind not in "fiubV" or (array.dtype.kind == "V" and array.dtype.fields):
        raise CheckpointError(f"{name} is an array of {array.dtype}: numbers are needed")
    # `ascontiguousarray` makes a scalar [1].
    return array.reshape(np.shape(value))


def _metadata(path: str | Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error


def _save(tensors: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
    """Write one file, or leave none."""
    try:
        save_file(tensors, path, metadata)
    except BaseException as error:
        with contextlib.suppress(OSError):
            path.unlink()
        if isinstance(error, SafetensorError | KeyError):
            raise CheckpointError(f"the arrays cannot be written: {error!r}") from error
        raise

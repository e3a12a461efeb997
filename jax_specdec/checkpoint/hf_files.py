"""The tensors that a Hugging Face model directory stores, from the files' headers.

The directory has `model.safetensors`, or several files and `model.safetensors.index.json`, whose
`weight_map` says which file holds which tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from jax_specdec.checkpoint.gguf_file import Gguf, GgufTensor, hf_name, permuted
from jax_specdec.checkpoint.hf_config import read_json
from jax_specdec.checkpoint.model_config import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in the files, and how it is stored."""

    name: str
    file: Path
    dtype: str  # as safetensors writes it: "BF16"
    shape: tuple[int, ...]
    packed: GgufTensor | None = None  # how it is stored, in a GGUF file
    permuted: int = 0  # heads whose rows are in GGUF's order


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model directory by name; only headers are read.

    Raises:
      FileNotFoundError: a file is missing; says which, and what it should hold.
      CheckpointError: a file is damaged, or lacks a tensor that the index says it holds.
    """
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        return _indexed(directory, index)
    if single.is_file():
        return _header(single, [])
    others = sorted(path.name for path in directory.glob("*.bin"))
    hint = (
        f"; {others[0]} is a pickle file, which is not read: save the model again with "
        "transformers' save_pretrained"
        if others
        else ""
    )
    raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}{hint}")


def gguf_tensors(file: Gguf) -> dict[str, StoredTensor]:
    """Every tensor of a GGUF file by the name that it has in a directory, unpacked to float32."""
    return {
        hf_name(name): StoredTensor(
            hf_name(name), file.path, "F32", tensor.shape, tensor, permuted(file, name)
        )
        for name, tensor in file.tensors.items()
    }


def _indexed(directory: Path, index: Path) -> dict[str, StoredTensor]:
    """The tensors of several files, each of which must hold what the index says."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(str(file), []).append(name)
    stored: dict[str, StoredTensor] = {}
    for file, names in sorted(by_file.items()):
        if Path(file).name != file:
            raise CheckpointError(f"{index} names {file!r}, which is not a plain file name")
        tensors = _header(directory / file, names)
        if lacking := sorted(set(names) - tensors.keys()):
            raise CheckpointError(
                f"{directory / file} lacks {_some(lacking)}, which {INDEX} says it holds"
            )
        stored |= tensors
    return stored


def _header(path: Path, names: Sequence[str]) -> dict[str, StoredTensor]:
    """The tensors of one file; `names` are those it should hold, for its errors."""
    holds = f"; it should hold {_some(sorted(names))}" if names else ""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing{holds}")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {
                name: StoredTensor(name, path, str(part.get_dtype()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is cut off, damaged or not a safetensors file: "
            f"{error}{holds}"
        ) from error
    for tensor in tensors.values():
        if tensor.dtype not in ITEM_BYTES:
            raise CheckpointError(
                f"{path}: {tensor.name} is stored as {tensor.dtype}; supported are "
                f"{', '.join(ITEM_BYTES)}"
            )
    return tensors


def check_shapes(
    stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    """Refuse a directory that lacks a tensor, or has it in another shape.

    Args:
      stored: the result of `stored_tensors`.
      expected: name to shape of every tensor that the configuration asks for.
      directory: where the tensors are, for the error.

    Raises:
      CheckpointError: says which tensor, where, and the shape it should have.
    """
    lacking = [name for name in expected if name not in stored]
    if lacking:
        name = lacking[0]
        raise CheckpointError(
            f"{directory} does not fit its config.json: it lacks {name} {list(expected[name])}"
            + (f" and {len(lacking) - 1} more tensors" if len(lacking) > 1 else "")
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{stored[name].file}: {name} has shape {list(stored[name].shape)}, but "
                f"config.json wants {list(shape)}"
            )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"

"""transformers' tokenizers, without torch and without its notes about torch.

A directory is read by `AutoTokenizer`: from local files only, and never by code that lies in it.
Where torch is installed, transformers would import it for the configuration of a model, which takes
seconds and hundreds of MB in a process that needs none of it. So it gets a stand-in meanwhile,
which imports torch for whoever asks it for something.

Source: https://huggingface.co/docs/transformers/main_classes/tokenizer
"""

import contextlib
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jax_specdec.checkpoint.hf_config import read_json
from jax_specdec.checkpoint.model_config import CheckpointError

# The extra `hf`: these names are found wherever this package came from.
INSTALL = "pip install 'transformers>=5' 'tokenizers>=0.22' 'jinja2>=3.1.6'"
FILE = "tokenizer.json"
# Other files of a vocabulary, each group of them enough for transformers to make a tokenizer.
_OTHERS = (("vocab.json", "merges.txt"), ("tokenizer.model",), ("tekken.json",), ("vocab.txt",))
_TORCH = "torch"
# Who writes notes that are of no use here: of torch that is missing, of models that are not known.
_CONFIGURATION = "transformers.configuration_utils"
_NOTES = ("transformers", _CONFIGURATION)


class MissingExtra(ValueError):
    """A library of the `hf` extra is missing; says how to install it."""


_importing = threading.Lock()  # of torch's stand-in there is one at a time


def import_transformers() -> ModuleType:
    """transformers, with its tokenizers imported; the first call takes about a second.

    Raises:
      MissingExtra: it is not installed, or a version of it without what is needed.
    """
    try:
        with _importing, _without_notes(), _torch_later():
            import transformers

            _ = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast
    except (ImportError, AttributeError) as error:
        raise MissingExtra(f"tokenizers are read with transformers: {INSTALL} ({error})") from error
    module: ModuleType = transformers
    return module


def renderer() -> Callable[..., tuple[list[str], Any]]:
    """The function by which transformers renders a chat template.

    Raises:
      MissingExtra: it is not installed.
    """
    try:
        with _importing, _without_notes(), _torch_later():
            from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise MissingExtra(f"chat templates need transformers: {INSTALL} ({error})") from error
    render: Callable[..., tuple[list[str], Any]] = render_jinja_template
    return render


def read_directory(directory: Path) -> Any:
    """The tokenizer of a model directory, a `PreTrainedTokenizerBase` with a fast backend.

    Raises:
      FileNotFoundError: there are no files of a tokenizer.
      MissingExtra: transformers is not installed.
      CheckpointError: the files are damaged, or of a kind that is not read; says why.
    """
    path = directory / FILE
    others = [group for group in _OTHERS if all((directory / name).is_file() for name in group)]
    if not path.is_file() and not others:
        raise FileNotFoundError(
            f"{path} is missing, and so is every other file that transformers makes a tokenizer "
            "of: save the tokenizer again with AutoTokenizer and save_pretrained"
        )
    auto = import_transformers().AutoTokenizer
    try:
        arguments = {"local_files_only": True, "trust_remote_code": False} | _tokens_of(directory)
        try:
            with _importing, _without_notes(), _torch_later():
                tokenizer = auto.from_pretrained(str(directory), **arguments)
        except ImportError:  # of a library that needs torch itself
            tokenizer = auto.from_pretrained(str(directory), **arguments)
    except Exception as error:  # tokenizers raises nothing narrower
        what = path if path.is_file() else directory / others[0][0]
        why = " ".join(str(error).split())[:500]
        raise CheckpointError(f"{what} is not a tokenizer: {why}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(
            f"{directory} has a {type(tokenizer).__name__}, which has no fast form ({FILE}): save "
            "the tokenizer again with another class"
        )
    return tokenizer


def _tokens_of(directory: Path) -> dict[str, Any]:
    """The tokens that tokenizer_config.json names by objects without a type, which are refused."""
    import tokenizers

    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    usual: dict[str, Any] = {"normalized": False, "special": True}
    return {
        name: tokenizers.AddedToken(**(usual | token))
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, dict) and "__type" not in token
    }


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Drop what transformers says of torch, and of models that it does not know, but errors."""
    loggers = [logging.getLogger(name) for name in _NOTES]
    for logger in loggers:
        logger.addFilter(_is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class _Later(ModuleType):
    """torch for who imports it and uses nothing of it.

    A model's configuration asks for the type of its weights, which no tokenizer looks at: it gets
    the type's name.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys._getframe(1).f_globals.get("__name__") == _CONFIGURATION:
            return name
        if sys.modules.get(_TORCH) is self:
            del sys.modules[_TORCH]
        return getattr(importlib.import_module(_TORCH), name)


@contextlib.contextmanager
def _torch_later() -> Iterator[None]:
    """Let who imports torch meanwhile get a stand-in, unless it is there already, or missing."""
    spec = None if _TORCH in sys.modules else importlib.util.find_spec(_TORCH)
    if spec is None:
        yield
        return
    stand_in = _Later(_TORCH)
    stand_in.__spec__ = spec  # by which others see that there is torch
    sys.modules[_TORCH] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(_TORCH) is stand_in:
            del sys.modules[_TORCH]

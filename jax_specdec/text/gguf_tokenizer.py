"""A GGUF file's tokenizer as the objects of tokenizer.json and of a chat template.

Byte-level BPE ("gpt2") is read, split as `tokenizer.ggml.pre` names it. Llama.cpp's own splits are
in code; those here are the tokenizer.json of the models that brought the names.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from typing import Any

from jax_specdec.checkpoint.gguf_file import Gguf, token_id
from jax_specdec.checkpoint.model_config import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
        "use_regex": use_regex,
    }  # fmt: skip


def _split(numbers: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _WORDS % numbers}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, _bytes(False)]


# What splits a text into words, by the name in a file.
_SPLITS = {
    "gpt-2": [_bytes(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes(True)],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}


def tokenizer_rules(file: Gguf) -> dict[str, Any]:
    """The object that a tokenizer.json would hold.

    Raises:
      CheckpointError: there is no tokenizer, or one that is not read; says which are.
    """
    model, pre = (_field(file, name) for name in ("model", "pre"))
    if model != "gpt2" or pre not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: a tokenizer of kind {model!r}, {pre!r} is not supported; supported is "
            f"'gpt2' with {', '.join(_SPLITS)}: use the Hugging Face directory that the file was "
            "made from"
        )
    tokens, merges, kinds = (_field(file, name) for name in ("tokens", "merges", "token_type"))
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{file.path}: its tokenizer has {len(tokens)} tokens, {len(set(tokens))} of which "
            f"differ, and {len(kinds)} kinds of tokens: the file is damaged"
        )
    added = [
        {
            "id": id, "content": tokens[id], "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": kind == _CONTROL,
        }
        for id, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]  # fmt: skip
    first, begins = [], file.fields.get("tokenizer.ggml.add_bos_token")
    bos = token_id(file, "bos")
    if begins and bos is None:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.add_bos_token = {begins!r} puts a token before a text, "
            "and tokenizer.ggml.bos_token_id, which says which, is missing: use the Hugging Face "
            "directory that the file was made from"
        )
    if bos is not None and (pre == "llama-bpe" if begins is None else begins):
        first = [tokens[bos]]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[pre]},
        "post_processor": _beginning(first, tokens),
        "decoder": _bytes(True),
        "model": {
            "type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": merges, "ignore_merges": pre == "llama-bpe",
        },
    }  # fmt: skip


def special_tokens(file: Gguf) -> dict[str, str]:
    """Names such as "bos_token" to their strings."""
    tokens, names = _field(file, "tokens"), {"bos": "bos", "eos": "eos", "unknown": "unk"}
    by_name = {}
    for name, short in names.items():
        id = token_id(file, name)
        if id is not None:
            by_name[f"{short}_token"] = tokens[id]
    return by_name


def chat_templates(file: Gguf) -> str | dict[str, str] | None:
    """The chat template, or several by their names; None where there is none."""
    begin = "tokenizer.chat_template"
    default = file.fields.get(begin)
    named = {
        name.removeprefix(f"{begin}."): text
        for name, text in file.fields.items()
        if name.startswith(f"{begin}.")
    }
    if default is None or not named:
        return default
    return {"default": default, **named}


def _field(file: Gguf, name: str) -> Any:
    name = f"tokenizer.ggml.{name}"
    if name not in file.fields:
        raise CheckpointError(f"{file.path} has no tokenizer: it lacks {name}")
    return file.fields[name]


def _beginning(first: list[str], tokens: list[str]) -> dict[str, Any] | None:
    """The step that puts a token before a text; None for none."""
    if not first:
        return None
    ids = {name: {"id": name, "ids": [tokens.index(name)], "tokens": [name]} for name in first}
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    before = [{"SpecialToken": {"id": name, "type_id": 0}} for name in first]
    return {"type": "TemplateProcessing", "single": before + text, "pair": [],
            "special_tokens": ids}  # fmt: skip

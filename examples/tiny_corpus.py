"""The text that the tiny model is trained on: files of the Python standard library, by hash.

A list has one file a line: SHA-256, split (`train` or `held-out`), path below the library's
directory. Nothing is downloaded: every machine with that Python has the text.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_specdec.engine import byte_tokens

SPLITS = ("train", "held-out")
HELD_OUT_SHARE = 0.08  # of the files, by a hash of their paths
# Not on every machine (packaged apart, or site-dependent), or tables rather than text.
EXCLUDED = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3",
    "distutils", "ensurepip", "turtledemo", "encodings", "pydoc_data", "html",
}  # fmt: skip
SMALLEST_FILE = 1000  # bytes; less is mostly licence and imports


class CorpusError(Exception):
    """The files on this machine are not those of the list."""


@dataclass(frozen=True)
class Entry:
    """One file of the corpus."""

    sha256: str
    split: str
    path: str


def standard_library() -> Path:
    """The running Python's library directory."""
    return Path(sysconfig.get_path("stdlib"))


def read_list(file: Path) -> list[Entry]:
    """The entries of a list; blank lines and those with # are comments."""
    entries = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(maxsplit=2)
        if len(parts) != 3 or len(parts[0]) != 64 or parts[1] not in SPLITS:
            raise CorpusError(f"{file}:{number}: want 'sha256 train|held-out path', got {line!r}")
        entries.append(Entry(*parts))
    return entries


def make_list(libraries: Sequence[Path]) -> list[Entry]:
    """Choose files that are the same in all of the given library directories."""
    entries = []
    for file in sorted(libraries[0].rglob("*.py")):
        path = file.relative_to(libraries[0])
        if EXCLUDED & set(path.parts) or file.stat().st_size < SMALLEST_FILE:
            continue
        sha256 = _sha256(file.read_bytes())
        others = [library / path for library in libraries[1:]]
        if all(o.is_file() and _sha256(o.read_bytes()) == sha256 for o in others):
            draw = int(_sha256(str(path).encode())[:8], 16) / 2**32
            split = SPLITS[draw < HELD_OUT_SHARE]
            entries.append(Entry(sha256, split, path.as_posix()))
    return entries


def write_list(file: Path, entries: Sequence[Entry]) -> None:
    """Write a list that `read_list` reads."""
    lines = [f"{e.sha256} {e.split} {e.path}\n" for e in entries]
    file.write_text(
        "# sha256, split, path below the standard library's directory\n" + "".join(lines)
    )


def load(entries: Sequence[Entry], split: str, library: Path) -> np.ndarray:
    """The ids [N] int32 of a split: each document after an end-of-document id, one at the end.

    Raises:
      CorpusError: files that are missing or have another content; the message names them.
    """
    documents, wrong = [], []
    for entry in entries:
        if entry.split != split:
            continue
        file = library / entry.path
        content = file.read_bytes() if file.is_file() else None
        if content is None or _sha256(content) != entry.sha256:
            wrong.append(f"  {entry.path}: {'missing' if content is None else 'differs'}")
        else:
            documents.append(byte_tokens.encode(content, start_document=True))
    if wrong:
        raise CorpusError(
            f"{len(wrong)} files below {library} (Python {sys.version.split()[0]}) are not those "
            "of the list:\n" + "\n".join(wrong) + "\nPatch versions of Python differ. Use the one "
            "named in docs/model.md (or name its library with --library), or make a list of your "
            "own with --write-corpus: the losses are then your own, too."
        )
    if not documents:
        raise CorpusError(f"the list has no {split} files")
    return np.concatenate([*documents, np.array([byte_tokens.EOS_ID], np.int32)])


def digest(entries: Sequence[Entry]) -> str:
    """One SHA-256 for a whole list."""
    return _sha256("".join(f"{e.sha256} {e.split} {e.path}\n" for e in entries).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

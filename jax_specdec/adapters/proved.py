"""The functions of peers that the adapters were proved with: by what they say, not by a release.

`proved.json` has for each peer its package and for each function the fingerprints that the lane
`peers` was green with, each with the versions that have it. A release that leaves these functions
as they are needs nothing here; `python -m tests.peers.prove` adds one that changes them.
"""

import importlib
import json
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_specdec.adapters.fingerprint import fingerprint

DATA = Path(__file__).with_name("proved.json")
_LOOSE = 1e-4  # of a comparison: sums in another order; a function that means another thing is off


@cache
def peers() -> dict[str, Any]:
    """The file, by the name of the distribution."""
    read: dict[str, Any] = json.loads(DATA.read_text())
    return read


def check_functions(distribution: str, names: Iterable[str]) -> None:
    """Refuse a peer one of whose functions is another than the adapter was proved with.

    Args:
      distribution: its name on the package index.
      names: of its functions, "module:function".

    Raises:
      ImportError: it is not installed, has no such function, or another one; names function,
        version and way out.
    """
    peer = peers()[distribution]
    folder = folder_of(distribution, peer["package"])
    for name in names:
        proved = peer["functions"].get(name, {})
        try:
            read = fingerprint(folder, name)
        except (LookupError, SyntaxError) as error:
            raise ImportError(f"{_refusal(distribution, name)}: {error}") from error
        if read not in proved:
            raise ImportError(
                f"{_refusal(distribution, name)}: it is another function there (fingerprint {read})"
            )


def folder_of(distribution: str, package: str) -> Path:
    """Where the files of a package are.

    Raises:
      ImportError: it is not installed.
    """
    try:
        return Path(next(iter(importlib.import_module(package).__path__)))
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"{distribution} is not installed; the adapter was proved with "
            f"{' and '.join(peers()[distribution]['versions'])}: "
            f"pip install {distribution}=={releases(distribution)[-1]}"
        ) from None


def releases(distribution: str) -> list[str]:
    """Those with which an adapter was proved, oldest first, without nightlies."""
    return [version for version in peers()[distribution]["versions"] if "dev" not in version]


def has_function(distribution: str, name: str) -> bool:
    """Whether a peer that is installed has a function of this name, whatever it says.

    Raises:
      ImportError: it is not installed.
    """
    try:
        fingerprint(folder_of(distribution, peers()[distribution]["package"]), name)
    except (LookupError, SyntaxError):
        return False
    return True


def compare(
    distribution: str, name: str, theirs: Callable[[], Any], ours: Callable[[], Any]
) -> None:
    """Refuse a peer where both sides give different results for the same few rows.

    Args:
      distribution: its name on the package index.
      name: of the function.
      theirs, ours: give arrays and numbers in a tree.

    Raises:
      ImportError: the results differ in form, dtype, shape or values, or theirs can't be called.
    """
    try:
        expected = theirs()
    except Exception as error:
        raise ImportError(
            f"{_refusal(distribution, name)}: it fails on eight rows ({error})"
        ) from error
    results = ours()
    forms: list[Any] = [jax.tree.structure(tree) for tree in (expected, results)]
    arrays = (jax.tree.leaves(tree) for tree in (expected, results))
    if not (forms[0] == forms[1] and all(map(_same, *arrays))):
        raise ImportError(f"{_refusal(distribution, name)}: its results on eight rows are others")


def _same(first: Any, second: Any) -> bool:
    first, second = np.asarray(first), np.asarray(second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not np.issubdtype(first.dtype, np.inexact):
        return bool(np.array_equal(first, second))
    return bool(np.allclose(first, second, rtol=_LOOSE, atol=_LOOSE, equal_nan=True))


def _refusal(distribution: str, name: str) -> str:
    try:
        release = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # its files lie in a folder
        release = "of no known version"
    return (
        f"{distribution} {release} is installed, and the adapter was proved with "
        f"{' and '.join(peers()[distribution]['versions'])}: install one of these, or call the "
        f"adapter's functions where you have logits. {name.replace(':', '.')} cannot be replaced"
    )

"""Which kernels were found right on which devices: by default no others run.

A kernel that compiles may still be wrong, or hang, on a chip that nobody tried it on. So calls that
name no implementation take the kernels that passed `jax-specdec check-device` on this kind of
device, with this minor version of jax, and XLA for the rest; by name, kernels run anywhere.

Two files say what passed: `proved.json` beside this one, of the package, and one of this user, into
which `check-device --keep` writes. An entry has the digest of the kernels' sources, so it ends with
the first change of what they compute: comments, docstrings, layout and the names of locals do not
count. `tests/pallas_kernels/test_proved.py` names the entries of the package that a change ends.
"""

import ast
import functools
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

HOUSE = Path(__file__).parents[1]  # pallas_kernels
PACKAGE_FILE = Path(__file__).parent / "proved.json"
USER_FILE = "proved-kernels.json"
DIGITS = 16
# What `check-device` checks (`testing/pieces.py`) before a job of a backend counts as proved.
PARTS = {
    "rows": ("rows", "turns", "changes", "edges"),
    "groups": ("groups", "candidates", "changes", "greedy", "verify"),
    "draw": ("draws", "verify"),
    "count_larger": ("ranks", "verify"),
}
JOBS = {
    "mosaic_gpu": ("rows", "groups", "draw", "count_larger"),
    "mosaic_tpu": ("rows", "groups"),
}
# Of a tree of Python: how it was made, or where it stands.
_LEFT_OUT = {"ctx", "kind", "type_comment", "type_ignores", "annotation", "returns", "type_params"}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef)


class Proof(NamedTuple):
    """That a job's kernels passed on a kind of device."""

    device: str  # as jax names its kind: "NVIDIA H200"
    jax: str  # the minor version: "0.11"
    backend: str
    job: str
    digest: str


def user_file() -> Path:
    """The file of this user's proofs, beside the kept programs; made by nobody yet perhaps."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "jax-specdec" / USER_FILE


def read_entries(file: Path) -> list[Proof]:
    """The proofs in a file; none where it is not there, or is none of ours."""
    try:
        return [Proof(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def minor_version() -> str:
    """Of jax: "0.11"."""
    return ".".join(jax.__version__.split(".")[:2])


def device_kind(platform: str) -> str | None:
    """The kind of this process's devices of a platform; None without any, or with several kinds."""
    if jax.default_backend() != {"cuda": "gpu"}.get(platform, platform):
        return None
    kinds = {device.device_kind for device in jax.local_devices()}
    return kinds.pop() if len(kinds) == 1 else None


def obstacle(backend: str, job: str, platform: str) -> str | None:
    """Why a job's kernels are not taken by default on this process's devices; None if they are."""
    kind = device_kind(platform)
    if kind is None:
        return f"nobody knows on which device the program for {platform} will run"
    digests = proved_digests(kind, backend, job)
    if not digests:
        return f"nobody has checked them on {kind} with jax {minor_version()}"
    if kernel_digest(backend, job) in digests:
        return None
    return f"they have changed since they passed on {kind} with jax {minor_version()}"


@functools.cache
def proved_digests(kind: str, backend: str, job: str) -> frozenset[str]:
    """Those of the kernels that passed. The files are read once: a process goes on as it began."""
    entry = kind, minor_version(), backend, job
    proofs = [proof for file in (PACKAGE_FILE, user_file()) for proof in read_entries(file)]
    return frozenset(proof.digest for proof in proofs if proof[:4] == entry)


@functools.cache
def warn_once(backend: str, reason: str) -> None:
    """Say that XLA computes what kernels would, once in a process for each reason."""
    warnings.warn(
        f"XLA computes what the {backend} kernels would: {reason}. `jax-specdec check-device "
        "--keep` checks them in ten minutes, and from then on they are taken; "
        f'`use_implementation("{backend}")` takes them as they are',
        RuntimeWarning, stacklevel=3,
    )  # fmt: skip


@functools.cache
def kernel_digest(backend: str, job: str) -> str:
    """16 hexadecimal digits of the sources of a job's kernels, and of all that they import here."""
    pending, texts = [f"backends.{backend}.{job}"], dict[str, str]()
    while pending:
        module = pending.pop()
        if module in texts:
            continue
        tree = ast.parse((HOUSE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        texts[module] = source_of(tree)
        pending += _imports(tree)
    text = "\n".join(f"{module} = {texts[module]}" for module in sorted(texts))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _imports(tree: ast.Module) -> Iterator[str]:
    """The modules of this package that a module imports, below `pallas_kernels`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(HOUSE.name):
            base = (node.module or "").removeprefix(HOUSE.name).lstrip(".")
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            files = {name for name in (base, *names) if name and _file_of(name).is_file()}
            yield from sorted(files)


def _file_of(module: str) -> Path:
    return HOUSE / f"{module.replace('.', '/')}.py"


def source_of(tree: ast.Module) -> str:
    """A module in words, without what computes nothing: docstrings, types, names of locals."""
    return _words(tree, {})


def _words(node: object, names: dict[str, str]) -> str:
    """A tree in words.

    names: those of the locals of the functions around it, and what stands for them.
    """
    if isinstance(node, list):
        return f"[{', '.join(_words(item, names) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        names = names | _locals(node, len(names))
    if isinstance(node, ast.Name):
        return f"Name({names.get(node.id, node.id)})"
    if isinstance(node, ast.arg):
        return f"arg({names.get(node.arg, node.arg)})"
    fields = {name: getattr(node, name, None) for name in node._fields if name not in _LEFT_OUT}
    if isinstance(node, ast.AnnAssign):
        fields.pop("simple")
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    texts = (f"{name}={_words(x, names)}" for name, x in fields.items() if x not in (None, []))
    return f"{type(node).__name__}({', '.join(texts)})"


def _locals(function: ast.FunctionDef | ast.Lambda, number: int) -> dict[str, str]:
    """Names that a function binds itself, in the order in which they stand; not its arguments.

    Arguments are named by calls. `number` names of functions around it have numbers already.
    """
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters += [x for x in (arguments.vararg, arguments.kwarg) if x is not None]
    taken = {x.arg: x.arg for x in parameters}
    bound = dict[str, str]()
    pending = list[ast.AST](function.body[::-1] if isinstance(function.body, list) else [])
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in taken:
            bound.setdefault(node.id, f"local {number + len(bound)}")
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            pending += [*ast.iter_child_nodes(node)][::-1]
    return taken | bound

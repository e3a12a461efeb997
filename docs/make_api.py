"""Writes docs/api.md, the reference of the public names, from their docstrings.

    python docs/make_api.py            write the page
    python docs/make_api.py --check    exit status 1 where the page is not what the sources say

It reads the sources and imports nothing, so that every Python makes the same page. A public name is
one of a module in `MODULES` that is listed in its `__all__`, or that has no leading underscore.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "api.md"

# What a program of one's own calls. Parts that only the package's worker and engine put together
# (`outgoing`, `compiled`, `scoring`, `rank`, ...) are not among them.
MODULES = {
    "Kernels, with jax": ("pallas_kernels",),
    "A decoding loop, with jax": (
        "jax_specdec.device.sampling.verify",
        "jax_specdec.device.sampling.distribution",
        "jax_specdec.device.sampling.random_draws",
        "jax_specdec.device.drafting.drafters",
        "jax_specdec.device.drafting.from_function",
        "jax_specdec.device.messages.step_messages",
        "jax_specdec.device.messages.row_logprobs",
        "jax_specdec.device.loop.host_slots",
        "jax_specdec.device.messages.pack",
        "jax_specdec.device.worker.device_checks",
        "jax_specdec.device.loop.step",
        "jax_specdec.device.loop.state",
        "jax_specdec.device.worker.worker",
        "jax_specdec.device.model.checkpoint",
    ),
    "The ring and its messages, without jax": (
        "ipc",
        "ipc.wire",
    ),
    "An engine, without jax": (
        "jax_specdec.requests",
        "jax_specdec.engine.engine",
        "jax_specdec.engine.config",
        "jax_specdec.control",
        "jax_specdec.records.decode",
        "jax_specdec.records.encode",
        "jax_specdec.records.output_processor",
        "jax_specdec.records.record",
        "jax_specdec.records.statistics",
        "jax_specdec.export.metrics",
        "jax_specdec.export.openai",
        "jax_specdec.export.column_builder",
        "jax_specdec.export.arrow",
    ),
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Public:
    """A public function or class, or a public method of one."""

    name: str  # as it is used: module.name or module.Class.method
    node: Definition
    source: str  # of the file that defines it

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public(module: str, source: str | None = None) -> Iterator[Public]:
    """The public functions and classes of a module, in its own order, methods after their class.

    Raises:
      ValueError: `__all__` has a name that is defined neither there nor where it comes from.
    """
    if source is None:
        source = path_of(module).read_text()
    tree = ast.parse(source)
    listed = _listed(tree)
    defined = {node.name: node for node in tree.body if isinstance(node, Definition)}
    names = listed if listed is not None else [n for n in defined if not n.startswith("_")]
    for name in names:
        if name in defined:
            yield from _with_methods(f"{module}.{name}", defined[name], source)
        elif (origin := _origin(tree, name)) is not None:
            for found in public(origin):
                before, _, after = found.name.removeprefix(f"{origin}.").partition(".")
                if before == name:
                    yield Public(
                        f"{module}.{before}{after and '.'}{after}", found.node, found.source
                    )
        elif not _assigns(tree, name):
            raise ValueError(f"{module}.__all__ has {name!r}, which is not defined there")


def page() -> str:
    """The text of docs/api.md."""
    lines = [
        "# API reference",
        "",
        "Written by `python docs/make_api.py` from the docstrings. What the values mean:",
        "[semantics.md](semantics.md). Axes: B requests (slots), S positions, R rows, K top-k,",
        "V vocabulary, D drafts.",
    ]
    for title, modules in MODULES.items():
        lines += ["", f"## {title}"]
        for module in modules:
            docstring = ast.get_docstring(ast.parse(path_of(module).read_text())) or ""
            lines += ["", f"### {module}", "", "```text", docstring, "```"]
            for name in public(module):
                lines += ["", f"**`{name.name}`**", "", "```python", _signature(name), "```"]
                if name.docstring:
                    lines += ["", "```text", name.docstring, "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print("docs/api.md is not what the docstrings say: run python docs/make_api.py")
    return 1


def _listed(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def _origin(tree: ast.Module, name: str) -> str | None:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return node.module
    return None


def _assigns(tree: ast.Module, name: str) -> bool:
    return any(
        isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets)
        for node in tree.body
    )


def _with_methods(name: str, node: Definition, source: str) -> Iterator[Public]:
    yield Public(name, node, source)
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, Definition) and not part.name.startswith("_"):
                yield Public(f"{name}.{part.name}", part, source)


def _signature(name: Public) -> str:
    """What stands before the docstring; of a class its fields too, whose comments say shapes."""
    node, lines = name.node, name.source.splitlines()
    decorators = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    if not isinstance(node, ast.ClassDef):
        returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
        prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        whole = f"{prefix} {node.name}({', '.join(_parameters(node.args))}){returns}"
        if len(whole) > 96:
            parts = ",\n    ".join(_parameters(node.args))
            whole = f"{prefix} {node.name}(\n    {parts},\n){returns}"
        return "\n".join([*decorators, whole])
    bases = ", ".join(map(ast.unparse, [*node.bases, *(k.value for k in node.keywords)]))
    fields = [
        line
        for part in node.body
        if isinstance(part, ast.AnnAssign | ast.Assign) and not ast.unparse(part).startswith("_")
        for line in lines[part.lineno - 1 : part.end_lineno]
    ]
    return "\n".join([*decorators, f"class {node.name}{bases and f'({bases})'}", *fields])


def _parameters(args: ast.arguments) -> list[str]:
    def parameter(arg: ast.arg, default: ast.expr | None = None) -> str:
        annotation = "" if arg.annotation is None else f": {ast.unparse(arg.annotation)}"
        if default is None:
            return arg.arg + annotation
        return f"{arg.arg}{annotation} = {ast.unparse(default)}"

    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if args.posonlyargs:
        found.insert(len(args.posonlyargs), "/")
    if args.vararg is not None:
        found.append(f"*{parameter(args.vararg)}")
    elif args.kwonlyargs:
        found.append("*")
    found += [parameter(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg is not None:
        found.append(f"**{parameter(args.kwarg)}")
    return found


if __name__ == "__main__":
    sys.exit(main())

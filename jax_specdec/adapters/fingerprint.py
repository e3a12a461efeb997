"""A number of a function's source, the same on every Python.

A release's number says little of the one function that an adapter replaces. Its syntax does,
together with that of what it calls in the package: without comments, docstrings and layout. The
files are read and nothing is imported. `ast.dump` differs between versions of Python (3.12 added
fields, 3.13 leaves out empty ones), so that the tree is written out here.

What stays out: calls whose target is known when they run (a model that is handed over, methods of
other objects than `self`), and what other packages do. Of a class that is named, its fields and
what makes and calls an object are in, and other methods where they are taken of it by name.
"""

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# How a tree was made, and not what it says.
_LEFT_OUT = {"ctx", "kind", "type_comment", "type_ignores"}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MAKING = {"__new__", "__init__", "__post_init__", "__call__"}
_TYPES = {"annotation", "returns", "type_params"}  # names in them call nothing
_DIGITS = 16


def fingerprint(folder: Path, name: str) -> str:
    """The fingerprint of a function or class, and of all that it names in its package.

    Args:
      folder: of the package.
      name: "package.module:function" or "package.module:Class.method".

    Returns:
      16 hexadecimal digits.

    Raises:
      LookupError: there is no such module, or nothing of that name in it.
      SyntaxError: a module is in the syntax of another Python.
    """
    module, _, path = name.partition(":")
    package = _Package(folder, module.partition(".")[0])
    package.visit(module, path)
    text = "\n".join(f"{key} = {package.read[key]}" for key in sorted(package.read))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def syntax(node: object) -> str:
    """A tree in words: the kinds of nodes with those of their fields that are there."""
    if isinstance(node, list):
        return f"[{', '.join(map(syntax, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: getattr(node, name, None) for name in node._fields if name not in _LEFT_OUT}
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):
        fields["values"] = _joined(node.values)
    words = [f"{name}={syntax(value)}" for name, value in fields.items() if value not in (None, [])]
    return f"{type(node).__name__}({', '.join(words)})"


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, where texts that follow each other are one."""
    parts: list[ast.expr] = []
    for value in values:
        last = parts[-1] if parts else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            parts[-1] = ast.Constant(str(last.value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            parts.append(value)
    return parts


@dataclass(frozen=True)
class _Module:
    """A module: the statements of it that bind each name, and its own package."""

    bound: dict[str, list[ast.stmt]]
    package: str


class _Package:
    """The files of a package.

    Attributes:
      read: what was visited, "module:name" to its syntax.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.read: dict[str, str] = {}
        self._folder, self._name = folder, name
        self._followed: set[tuple[str, tuple[str, ...]]] = set()
        self._modules: dict[str, _Module | None] = {}

    def visit(self, module: str, path: str) -> None:
        """Read a definition, and all that it names.

        Raises:
          LookupError: there is none.
        """
        key = f"{module}:{path}"
        if key in self.read:
            return
        nodes = self._definitions(module, path)
        if not nodes:
            raise LookupError(f"{self._name} has no {module}.{path}")
        nodes = [_as_made(node) for node in nodes]
        self.read[key] = syntax(nodes)
        owner, _, method = path.rpartition(".")
        for chain in (chain for node in nodes for chain in _chains(node)):
            self._follow(module, chain)
            if method and chain[0] == "self" and self._definitions(module, f"{owner}.{chain[1]}"):
                self.visit(module, f"{owner}.{chain[1]}")

    def _follow(self, module: str, chain: tuple[str, ...]) -> None:
        """Visit what a name of a module stands for, if that is of the package."""
        if (module, chain) in self._followed:
            return
        self._followed.add((module, chain))
        source = self._module(module)
        assert source is not None
        for statement in source.bound.get(chain[0], ()):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                target, attributes = _imported(source, statement, chain)
                # Where it is another package's, this says whose.
                origin = attributes[:1] if isinstance(statement, ast.ImportFrom) else ()
                self.read[f"{module}:{chain[0]}"] = f"import {'.'.join([target, *origin])}"
                self._follow_import(target, attributes)
            else:
                self.visit(module, chain[0])
                if isinstance(statement, ast.ClassDef) and chain[1:]:
                    member = f"{chain[0]}.{chain[1]}"
                    if self._definitions(module, member):
                        self.visit(module, member)

    def _follow_import(self, target: str, attributes: tuple[str, ...]) -> None:
        """Visit the first attribute of a module, or that of the module which it is."""
        if not attributes or self._module(target) is None:
            return
        first, *rest = attributes
        if self._definitions(target, first):
            self._follow(target, attributes)
        else:
            self._follow_import(f"{target}.{first}", tuple(rest))

    def _definitions(self, module: str, path: str) -> list[ast.stmt]:
        """The statements that bind a name of a module, or of a class in it."""
        source = self._module(module)
        name, *members = path.split(".")
        nodes = [] if source is None else source.bound.get(name, [])
        for member in members:
            classes = (node for node in nodes if isinstance(node, ast.ClassDef))
            nodes = _bound([part for node in classes for part in node.body]).get(member, [])
        return nodes

    def _module(self, name: str) -> _Module | None:
        """A module of the package; None where it is none."""
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> _Module | None:
        first, *names = name.split(".")
        if first != self._name:
            return None
        path = self._folder.joinpath(*names)
        for file, package in (
            (path / "__init__.py", name),
            (path.with_suffix(".py"), name.rpartition(".")[0]),
        ):
            if file.is_file():
                return _Module(_bound(ast.parse(file.read_bytes()).body), package)
        return None


def _as_made(statement: ast.stmt) -> ast.stmt:
    """A class without the methods that nothing calls where an object is made or called."""
    if not isinstance(statement, ast.ClassDef):
        return statement
    made = copy.copy(statement)
    made.body = [
        part
        for part in statement.body
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) or part.name in _MAKING
    ]
    return made


def _bound(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """The statements that bind each name, in branches too."""
    bound: dict[str, list[ast.stmt]] = {}
    for statement in _statements(body):
        for name in _names(statement):
            bound.setdefault(name, []).append(statement)
    return bound


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)
        else:
            yield statement


def _names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """The names in a tree, each with the attributes that are taken of it."""
    names: list[str] = []
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        names.insert(0, inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *names)
    elif inner is not node:
        yield from _chains(inner)
    else:
        for name, value in ast.iter_fields(node):
            if name not in _TYPES:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from _chains(child)


def _imported(
    module: _Module, statement: ast.Import | ast.ImportFrom, chain: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """The module that an import binds a name to, or has it from, and the attributes of it."""
    if isinstance(statement, ast.ImportFrom):
        above = module.package.split(".")
        above = above[: len(above) - statement.level + 1] if statement.level else []
        target = ".".join([*above, *([statement.module] if statement.module else [])])
        name = next(
            alias.name for alias in statement.names if (alias.asname or alias.name) == chain[0]
        )
        return target, (name, *chain[1:])
    for alias in statement.names:
        if alias.asname == chain[0]:
            return alias.name, chain[1:]
    return chain[0], chain[1:]

"""Whether other libraries' functions still stand where check-device imports them, as it calls them.

    python -m tests.rehearsal.peer_signatures [DISTRIBUTION ...]

downloads the newest wheels, half a gigabyte, installs nothing, and reads the functions' arguments
in their sources: names, kinds and defaults must be those of `peer_stand_ins`. Exits with 1 where
one is not, 3 where there is no package index, or Python is older than those wheels' sources want.
"""

import ast
import inspect
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.rehearsal.peer_stand_ins import LIBRARIES, Library

# The name of a constant of a library's own, and what it is.
CONSTANT = "TopKTieBreak.NONE", "0"


def arguments_of(source: str, function: str) -> str:
    """A function's arguments and their defaults, without annotations and `self`."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, name = function.split(".")
    for one in classes:
        body = next(x.body for x in body if isinstance(x, ast.ClassDef) and x.name == one)
    found = next((x for x in body if isinstance(x, ast.FunctionDef) and x.name == name), None)
    if found is None:
        raise LookupError(f"there is no {function}")
    for node in ast.walk(found.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    text = ast.unparse(found.args).removeprefix("self, ")
    return text.replace(*CONSTANT)


def expected_of(library: Library) -> str:
    """The same of its stand-in."""
    source = inspect.getsource(inspect.getmodule(library.stand_in))
    name = library.stand_in.__name__
    _, _, method = library.function.rpartition(".")
    return arguments_of(source, f"{name}.{method}" if "." in library.function else name)


def wrong(library: Library, wheel: Path) -> str | None:
    """What is not as expected in a wheel."""
    file = library.module.replace(".", "/") + ".py"
    with zipfile.ZipFile(wheel) as archive:
        if file not in archive.namelist():
            return f"there is no {file}"
        source = archive.read(file).decode()
        try:
            found = arguments_of(source, library.defined or library.function)
        except LookupError as error:
            return str(error)
        if library.defined and f"def {library.function}(" not in source:
            return f"there is no {library.function}"
        if library.exported:
            door = archive.read(f"{library.exported}/__init__.py").decode()
            if not any(
                x.strip().startswith("from") and library.function in x for x in _lines(door)
            ):
                return f"{library.exported} has no {library.function}"
    expected = expected_of(library)
    return None if found == expected else f"{library.function} takes {found}, not {expected}"


def _lines(source: str) -> list[str]:
    """A module's imports, each as one line."""
    return [ast.unparse(x) for x in ast.walk(ast.parse(source)) if isinstance(x, ast.ImportFrom)]


def main(names: list[str]) -> int:
    """See the module's docstring."""
    if sys.version_info < (3, 12):
        print("NOT RUN: the newest wheels are for Python 3.12 and later")
        return 3
    status = 0
    for distribution in names or sorted({one.distribution for one in LIBRARIES}):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            command += ["--only-binary=:all:", "--disable-pip-version-check", distribution]
            if subprocess.run(command, check=False).returncode:
                print(f"NOT RUN: {distribution}: the package index has no wheel of it for here")
                return 3
            (wheel,) = Path(folder).glob("*.whl")
            print(wheel.name)
            for library in LIBRARIES:
                if library.distribution == distribution:
                    problem = wrong(library, wheel)
                    print(f"  {library.module}.{library.function}: {problem or 'as expected'}")
                    status = status or int(problem is not None)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

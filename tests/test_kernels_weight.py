"""The kernels stay small enough to hold in one's head: folders, code and untyped values count.

Each count is shown to be able to fail.
"""

import ast
import io
import sys
import tokenize

import numpy as np
import pytest

from pallas_kernels import topk_logprobs
from tests.support.paths import ROOT

pytestmark = pytest.mark.fast

HOUSE = ROOT / "pallas_kernels"
MOST_FILES = 14  # beside each other, except `__init__.py`
# Lines without comments, docstrings and blank ones, except `testing`.
MOST_CODE = 9_850
MOST_UNTYPED = 90
UNTYPED = {"Any", "object", "cast"}


def crowded(folder, most=MOST_FILES):
    """The folders that have more files than that beside each other."""
    files = {
        path: [file for file in path.glob("*.py") if file.name != "__init__.py"]
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    }
    return {path.name: len(found) for path, found in files.items() if len(found) > most}


def docstring_lines(tree):
    """The numbers of the lines of docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    texts = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return {line for node in texts for line in range(node.lineno, node.end_lineno + 1)}


def code_lines(source):
    """How many lines hold code."""
    layout = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = [token for token in tokens if token.type not in layout]
    lines = {line for token in code for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstring_lines(ast.parse(source)))


def untyped(source):
    """How often `Any`, `object` and `cast` stand in it, except in their import."""
    nodes = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name | ast.Attribute)
    ]
    return sum(ast.unparse(node).removeprefix("typing.") in UNTYPED for node in nodes)


def hidden(source):
    """The names that stand for `Any` in it."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return [ast.unparse(node.targets[0]) for node in nodes if ast.unparse(node.value) == "Any"]


def sources(*, without=()):
    """The files of the kernels' package, except some rooms."""
    paths = HOUSE.rglob("*.py")
    return [path.read_text() for path in paths if path.relative_to(HOUSE).parts[0] not in without]


def test_no_folder_is_crowded():
    assert crowded(HOUSE) == {}


@pytest.mark.parametrize(("count", "most"), [(code_lines, MOST_CODE), (untyped, MOST_UNTYPED)])
def test_there_is_little(count, most):
    assert sum(map(count, sources(without=("testing",)))) <= most


def test_no_name_stands_for_any():
    assert [name for source in sources() for name in hidden(source)] == []


def test_a_call_on_a_cpu_crosses_nine_files():
    """All in which a function of ours runs while a call is made."""
    crossed = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(HOUSE)):
            crossed.add(frame.f_code.co_filename.removeprefix(f"{HOUSE}/"))

    logits, token_ids = np.zeros((8, 2053), np.float32), np.zeros(8, np.int32)
    sys.setprofile(note)
    try:
        topk_logprobs(logits, token_ids, 20)
    finally:
        sys.setprofile(None)
    assert crossed == {
        "topk/call.py", "topk/derivatives.py", "backends/answers.py", "backends/xla/rows.py",
        "backends/xla/selection.py", "meshes/placement.py", "lowering/choose.py",
        "lowering/forms.py", "contract/rows.py",
    }  # fmt: skip


def test_these_counts_can_fail(tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    for number in range(4):
        (room / f"{number}.py").touch()
    (room / "__init__.py").touch()
    assert crowded(tmp_path, most=4) == {}
    assert crowded(tmp_path, most=3) == {"room": 4}
    source = '"""A docstring."""\n# a comment\n\nx: typing.Any = (\n    1,  # one\n)\n'
    assert code_lines(source) == 3
    assert untyped(source + "def f(y: Any) -> object:\n    return cast(Any, y)\n") == 5
    assert hidden("Row = Any\nx: Any = Row\n") == ["Row"]

"""The kernels stay small enough to hold in one's head: folders and untyped values count.

Each count is shown to be able to fail.
"""

import ast
import sys

import numpy as np

from pallas_kernels import topk_logprobs
from tests.support.paths import ROOT

HOUSE = ROOT / "pallas_kernels"
MOST_FILES = 16  # beside each other, except `__init__.py`
MOST_UNTYPED = 90  # except in `testing`
UNTYPED = {"Any", "object", "cast"}


def crowded(folder, most=MOST_FILES):
    """The folders that have more files than that beside each other."""
    files = {
        path: [file for file in path.glob("*.py") if file.name != "__init__.py"]
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    }
    return {path.name: len(found) for path, found in files.items() if len(found) > most}


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


def test_few_values_have_no_type():
    assert sum(map(untyped, sources(without=("testing",)))) <= MOST_UNTYPED


def test_no_name_stands_for_any():
    assert [name for source in sources() for name in hidden(source)] == []


def test_a_call_on_a_cpu_crosses_these_files():
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
        "contract/arguments.py", "contract/changes.py", "contract/rows.py",
        "lowering/forms.py", "lowering/implementation.py", "lowering/platforms.py",
        "lowering/row_pieces.py", "lowering/typed.py", "meshes/placement.py",
        "numbers/exponential.py", "numbers/logarithm.py", "numbers/ordered_keys.py",
        "backends/answers.py", "backends/choose.py", "backends/exact_sums.py", "backends/groups.py",
        "backends/mosaic_gpu/limits.py", "backends/mosaic_tpu/limits.py",
        "backends/row_totals.py", "backends/xla/block_rows.py", "backends/xla/group_sums.py",
        "backends/xla/rows.py", "backends/xla/selection.py", "backends/xla/tails.py",
        "topk/call.py", "topk/derivatives.py",
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
    assert untyped(source + "def f(y: Any) -> object:\n    return cast(Any, y)\n") == 5
    assert hidden("Row = Any\nx: Any = Row\n") == ["Row"]

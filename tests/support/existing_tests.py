"""The tests that there are, by name."""

import ast
import re

from tests.support.paths import ROOT


def definitions(source):
    """Names of tests that a module defines, methods as `Class::method`."""
    found = set()

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                found.add(prefix + node.name)
                visit(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.Assign):
                found.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))

    visit(ast.parse(source).body, "")
    return {name for name in found if name.split("::")[-1].startswith(("test_", "Test"))}


def existing_tests():
    return {
        f"{path.stem}::{name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in definitions(path.read_text())
    } | {
        f"ptx::{word}"
        for path in (ROOT / "tests/pallas_kernels/mosaic_gpu/ptx").glob("*cases.py")
        for name in re.findall(r"lambda: \w+\(\s*\"([^\"]+)\"", path.read_text())
        for word in re.findall(r"\w+", name)
    }

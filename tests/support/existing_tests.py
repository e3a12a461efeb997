"""The tests that there are, by name."""

import ast
import re

from tests.support.paths import ROOT


def definitions(source):
    """Names that a module defines, methods as `Class::method`; skipped tests do not count."""
    found = set()

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
                if re.search(r"\b(skip|skipif|xfail)\b", marks):
                    continue
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.Assign):
                found.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))

    visit(ast.parse(source).body, "")
    return found


def existing_tests():
    return {
        f"{path.stem}::{name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in definitions(path.read_text())
        if name.split("::")[-1].startswith(("test_", "Test"))
    } | {
        f"ptx::{word}"
        for path in (ROOT / "tests/pallas_kernels/mosaic_gpu/ptx").glob("*cases.py")
        for name in re.findall(r"lambda: \w+\(\s*\"([^\"]+)\"", path.read_text())
        for word in re.findall(r"\w+", name)
    }

"""A public name of a module stands for one thing, unless several take one form on purpose."""

import ast
from collections import defaultdict

from tests.support.import_rules import PACKAGES, modules

# Names that several modules bind, by who has them.
FORMS = {
    "commands": {"HELP", "add", "run"},
    "programs of their own": {"main"},
    "adapters": {"FUNCTIONS", "NAME", "install", "support_strategy"},
    "modules that log": {"logger"},
    "backends, the doors to them and what they are checked against": {
        "Schedule", "body", "call", "candidates", "choose_schedule", "draw", "group_sums",
        "groups_of", "is_faster", "largest", "obstacle", "part_sums",
        "read_groups", "read_part", "row_sums", "topk_logprobs",
    },
    "kernels of two chips": {"LOG2_E", "like"},
    # Neither side may import the other.
    "kernels and engine": {"MAX_KEPT", "PaddedKept", "with_field_docs"},
    "doors whose modules say the rest": {"decode", "encode", "step"},
}  # fmt: skip


def public_names(source):
    """The names that a module binds at its top, but for private ones."""
    for node in ast.parse(source).body:
        names = [getattr(node, "name", "")]
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        yield from (name for name in names if name and not name.startswith("_"))


def names_of_several(sources):
    """Those that more than one of the sources binds, by module."""
    modules = defaultdict(set)
    for module, source in sources.items():
        for name in public_names(source):
            modules[name].add(module)
    return {name: sorted(binders) for name, binders in modules.items() if len(binders) > 1}


def test_a_public_name_stands_for_one_thing():
    paths = modules(*PACKAGES)
    several = names_of_several({name: path.read_text("utf-8") for name, path in paths.items()})
    forms = set().union(*FORMS.values())
    assert {name: binders for name, binders in several.items() if name not in forms} == {}
    assert forms - several.keys() == set()  # what is listed here is still bound by several


def test_names_that_two_modules_bind_are_seen():
    """The control."""
    a = "X = _Y = 1\ndef f(): z = 1\nclass C: f = 2\n"
    b = "X = 2\n_Y = 3\nasync def f(): ...\ndef C(): ...\nz = 1\n"
    assert names_of_several({"a": a, "b": b}) == {x: ["a", "b"] for x in ("X", "f", "C")}

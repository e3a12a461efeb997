"""A constant of time has a name of its own: one that stands in two files means two things."""

import ast
from collections import defaultdict

from tests.support.import_rules import PACKAGES, modules

UNITS = ("_SECONDS", "_MS", "_NS")


def constants_of_time(source):
    """The names that a module gives to times."""
    targets = [
        target
        for node in ast.parse(source).body
        for target in getattr(node, "targets", [getattr(node, "target", None)])
    ]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if name.isupper() and name.endswith(UNITS)}


def test_a_constant_of_time_has_one_meaning():
    places = defaultdict(set)
    for module, path in modules(*PACKAGES).items():
        for name in constants_of_time(path.read_text("utf-8")):
            places[name].add(module)
    assert len(places) > 30
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_constants_of_time_are_seen():
    """The control."""
    source = "LOOK_SECONDS = 1.0\nLOOK_MS: int = 2\nseconds = 3\ndef f():\n    A_MS = 4\n"
    assert constants_of_time(source) == {"LOOK_SECONDS", "LOOK_MS"}

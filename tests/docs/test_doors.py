"""Every name that a door lists is there and says what it is."""

import importlib
import inspect
import types

import pytest

from tests.support.import_rules import DOORS

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", sorted(set().union(*DOORS.values())))
def test_what_a_door_lists_is_there_and_says_what_it_is(name):
    door = importlib.import_module(name)
    assert door.__doc__
    listed = getattr(door, "__all__", ())
    assert len(set(listed)) == len(listed)
    scope: dict = {}
    exec(f"from {name} import *", scope)  # a module need not be there yet
    for one in listed:
        found = inspect.unwrap(scope[one])
        if isinstance(found, type | types.FunctionType | types.ModuleType):
            # A NamedTuple or dataclass without a docstring gets a list of its fields.
            assert found.__doc__, one
            assert not found.__doc__.startswith(f"{one}("), one

"""Every name that a door lists is there, says what it is, and says the shapes of its arrays."""

import importlib
import inspect
import re
import types

import pytest

from ipc import RingReader
from jax_specdec.engine import Engine, Record
from tests.support.doors import NAMES, documented, names_of, public

pytestmark = pytest.mark.fast

ARRAY = re.compile(r"jax\.Array|NDArray|ArrayLike|\bArray\b")
# "[B, V]" in a docstring, "B V" in an annotation, or another docstring that says it.
SHAPE = re.compile(r"\[[^\]]*\]|\bas `[\w.]+`|Args, Returns(, Raises)?: as", re.IGNORECASE)
SHAPED = re.compile(r"\[[\w.]+, *['\"]")


def silent(door):
    """Modules, classes and functions without a docstring."""
    return [
        name
        for name, found in documented(door).items()
        # A NamedTuple or dataclass without one gets a list of its fields.
        if not found.__doc__ or found.__doc__.startswith(f"{name.rpartition('.')[2]}(")
    ]


def shapeless(door):
    """Functions that take arrays and say no shape, nor where the shapes are said."""
    wrong = []
    for name, found in documented(door).items():
        if isinstance(found, type | types.ModuleType):
            continue
        annotations = [
            str(parameter.annotation)
            if isinstance(parameter.annotation, str)
            else inspect.formatannotation(parameter.annotation)
            for parameter in inspect.signature(found).parameters.values()
        ]
        arrays = [one for one in annotations if ARRAY.search(one)]
        said = SHAPE.search(found.__doc__ or "") or any(SHAPED.search(one) for one in arrays)
        if arrays and not said:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_every_name_says_what_it_is_and_arrays_have_shapes(name):
    door = importlib.import_module(name)
    assert door.__doc__
    assert len(set(names_of(door))) == len(names_of(door)) > 0
    assert silent(door) == []
    assert shapeless(door) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("ipc.wire", "ipc.doctor")])
def test_a_door_says_that_what_lies_behind_it_may_change(name):
    assert "may\nchange" in importlib.import_module(name).__doc__.replace(" ", "\n")


@pytest.mark.parametrize("name", ["jax_specdec.engine", "jax_specdec.device"])
def test_a_door_stays_small(name):
    assert 15 <= len(importlib.import_module(name).__all__) <= 24


def test_it_has_the_names_that_users_begin_with():
    listed = {name for door in NAMES for name, _ in public(importlib.import_module(door))}
    assert listed >= {
        "pallas_kernels.topk_logprobs",
        "ipc.RingReader",
        "jax_specdec.records.output_processor.admit",
        "jax_specdec.engine.Engine",
        "jax_specdec.engine.Record",
        "jax_specdec.device.verify",
    }
    for method in (RingReader.receive, Engine.generate, Record.cumulative_logprob):
        assert method.__doc__


def test_these_checks_can_fail():
    door = types.ModuleType("example")
    exec(
        '''
import jax
from jaxtyping import Array, Float
def good(x: jax.Array): """Twice x [B, V] float32."""
def annotated(x: Float[Array, "B V"]): """Twice x."""
def quiet(x: int): ...
def vague(x: jax.Array): """Twice x."""
def _hidden(): ...
class Plain:
    def method(self): ...
__all__ = ["good", "annotated", "quiet", "vague", "Plain"]
''',
        vars(door),
    )
    assert silent(door) == ["example.quiet", "example.Plain"]
    assert shapeless(door) == ["example.vague"]
    door.__all__.append("gone")
    with pytest.raises(AttributeError, match="gone"):
        silent(door)

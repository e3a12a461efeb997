"""The API reference is what the docstrings say, and every public name says something."""

import ast
import importlib.util
import re

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.fast

DOCS = ROOT / "docs"
_spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
make_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_api)

ARRAY = re.compile(r"jax\.Array|NDArray|ArrayLike|\bArray\b")
SHAPE = re.compile(r"\[[^\]]*\]|\bas `\w+`|Args, Returns(, Raises)?: as", re.IGNORECASE)

ELEMENTWISE = {"jax_specdec.device.sampling.verify.accept_draft"}  # arrays of any one shape


def module_names(found, module):
    """The functions and classes of a module, without their methods."""
    return [name for name in found if "." not in name.name.removeprefix(f"{module}.")]


def silent(module, source=None):
    """Public functions and classes without a docstring."""
    found = module_names(make_api.public(module, source), module)
    return [name.name for name in found if not name.docstring]


def shapeless(module, source=None):
    """Public functions that take arrays and say no shape, nor where the shapes are said."""
    wrong = []
    for name in module_names(make_api.public(module, source), module):
        if isinstance(name.node, ast.ClassDef) or name.name in ELEMENTWISE:
            continue
        arguments = [*name.node.args.args, *name.node.args.kwonlyargs]
        takes = [ast.unparse(arg.annotation) for arg in arguments if arg.annotation]
        if any(ARRAY.search(annotation) for annotation in takes) and not SHAPE.search(
            name.docstring
        ):
            wrong.append(name.name)
    return wrong


MODULES = [module for modules in make_api.MODULES.values() for module in modules]


def test_the_page_is_what_the_docstrings_say():
    if (DOCS / "api.md").read_text() != make_api.page():
        pytest.fail("docs/api.md is out of date: run `python docs/make_api.py`")


def test_it_has_the_names_that_users_begin_with():
    text = (DOCS / "api.md").read_text()
    for name in (
        "pallas_kernels.topk_logprobs",
        "ipc.RingReader.receive",
        "jax_specdec.records.output_processor.admit",
        "jax_specdec.records.record.Record.cumulative_logprob",
        "jax_specdec.engine.engine.Engine.generate",
    ):
        assert f"**`{name}`**" in text


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring_and_arrays_have_shapes(module):
    assert list(make_api.public(module))
    assert silent(module) == []
    assert shapeless(module) == []


def test_these_checks_can_fail():
    source = '''
__all__ = ["good", "quiet", "vague", "Plain"]
def good(x: jax.Array): """Twice x [B, V] float32."""
def quiet(x: int): ...
def vague(x: jax.Array): """Twice x."""
def _hidden(): ...
class Plain:
    def method(self): ...
'''
    assert silent("example", source) == ["example.quiet", "example.Plain"]
    assert shapeless("example", source) == ["example.vague"]
    with pytest.raises(ValueError, match="has 'gone', which is not defined there"):
        list(make_api.public("example", '__all__ = ["gone"]'))

"""The documentation site: the guides as they are, and a page for each door, from its docstrings.

    nox -s docs        or        sphinx-build -W --keep-going -b html docs build/site

Warnings are errors: a link, an anchor or a reference that leads nowhere fails the build, and so
does a name of a door's `__all__` that no page shows.
"""

import importlib
import sys
from enum import Enum
from importlib.metadata import version as version_of
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).parent))
from linked_tests import places_of_tests, repository, with_links

project = "jax-specdec"
author = "the authors of jax-specdec"
version = release = version_of("jax-specdec")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
napoleon_attr_annotations = False
napoleon_use_ivar = True  # members have entries of their own
default_role = "code"  # of `name` in a docstring
exclude_patterns = ["plots", "_static"]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["pages.css"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"  # a signature is names and defaults
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
nitpicky = True  # a link to a name that no page shows ...
nitpick_ignore_regex = [("py:(class|exc)", ".*")]  # ... except for types in signatures, and errors

DOORS = (
    "jax_specdec.engine",
    "jax_specdec.export",
    "jax_specdec.device",
    "jax_specdec.device.drafting",
    "jax_specdec.device.model",
    "jax_specdec.adapters",
    "pallas_kernels",
    "ipc",
)
logger = logging.getLogger(__name__)
PLACES, REPOSITORY = places_of_tests(Path(__file__).parents[1]), repository()


def shorten(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Write array types as sources do."""
    short = [part and part.replace("jaxlib._jax.Array", "Array") for part in (signature, returns)]
    return short[0], short[1]


def keep_enumerators(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Show the members of enumerations, which have no docstrings; leave the rest to Sphinx."""
    return False if isinstance(obj, Enum) else None


def refuse_aliases(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Fail the site at a field of a named tuple of which nothing is said."""
    if lines[:1] and lines[0].startswith("Alias for field number"):
        logger.warning("nothing says what the field %s is: its class' docstring would", name)


def say_results_whole(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Keep a colon in the text of a result: napoleon takes what stands before it for a type."""
    for section in ("Returns:", "Yields:"):
        if section in lines:
            at = lines.index(section)
            lines[at : at + 2] = ["", f":{section[:-1].lower()}: {lines[at + 1].strip()}"]


def link_tests(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the names of tests small, and lead to them."""
    if "::test_" in source[0]:
        source[0] = with_links(source[0], PLACES, REPOSITORY)


def unshown(app: Sphinx) -> list[str]:
    """The names that a door lists and no page of the site shows."""
    shown = {name for name, *_ in app.env.get_domain("py").get_objects()}
    missing = []
    for door in DOORS:
        module = importlib.import_module(door)
        for name in module.__all__:
            value = getattr(module, name)
            # A module has a page or a section under its own name.
            full = value.__name__ if isinstance(value, ModuleType) else f"{door}.{name}"
            missing += [full] if full not in shown else []
    return missing


def check(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for name in unshown(app):
            logger.warning("no page shows %s, which its door lists", name)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", keep_enumerators)
    app.connect("autodoc-process-docstring", refuse_aliases)
    app.connect("autodoc-process-docstring", say_results_whole, priority=400)  # before napoleon
    app.connect("source-read", link_tests)
    app.connect("build-finished", check)

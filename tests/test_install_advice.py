"""What errors say to install can be installed as it is printed.

No version has been published, so pip finds no `jax-specdec[...]`. Errors of the packages name the
libraries themselves, as pyproject.toml does; those of `bench`, which is in a checkout only, name
its extra.
"""

import re
import tomllib

from tests.support.pages import PAGES
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ADVICE = re.compile(r"pip install ((?:'[^']+' ?)+)")


def advised(text):
    """What a text says to install: the requirements of each piece of advice."""
    return [re.findall(r"'([^']+)'", found) for found in ADVICE.findall(text)]


def sources(*tops):
    return [path.read_text("utf-8") for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def test_errors_name_all_that_an_extra_has():
    found = [
        one for text in sources("jax_specdec", "ipc", "pallas_kernels") for one in advised(text)
    ]
    assert len(found) == 7
    for requirements in found:
        assert requirements in EXTRAS.values()


def test_nothing_says_to_install_what_no_index_has():
    unpublished = f"{PROJECT['name']}["
    pages = [page.read_text("utf-8") for page in PAGES]
    for text in [*sources("jax_specdec", "ipc", "pallas_kernels", "bench", "examples"), *pages]:
        assert unpublished not in text

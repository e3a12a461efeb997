"""The README's Python prints what stands below it: a result and an error of each door."""

import json
import re

import pytest

from tests.support.pages import PAIR, same
from tests.support.paths import ROOT
from tests.support.run_examples import run

# Runs the blocks that it reads in one namespace; writes what each printed, or how it failed.
RUN = """
import contextlib, io, json, sys, traceback
printed, scope = [], {"__name__": "__main__"}
for code in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(code, scope)
        except Exception as error:
            print(*traceback.format_exception_only(error), sep="", end="")
    printed.append(out.getvalue())
print(json.dumps([printed, "jax" in sys.modules]))
"""


# The sections that have Python: (code, the output that stands below it), ... by heading.
SECTIONS = {
    section.partition("\n")[0]: PAIR.findall(section)
    for section in re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1:]
    if PAIR.search(section)
}


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_block_prints_what_stands_below_it(heading):
    codes, shown = zip(*SECTIONS[heading], strict=True)
    printed, has_jax = json.loads(run("-c", RUN, json.dumps(codes)))
    for one, other in zip(printed, shown, strict=True):
        assert same(one, other), one
    assert "Error: " in printed[1]
    assert has_jax == ("pallas_kernels" in codes[0])

"""A worker whose interpreter is kept by one call for ever, while it loads its model.

`python -m jax_specdec.child tests.support.held_up_process`
"""

import re
import sys

WORKER = (sys.executable, "-m", "jax_specdec.child", "tests.support.held_up_process")


def main(child):
    """Say how far it is, then compute in C code that lets no other thread run."""
    child.vitals.load(1, 3)
    child.vitals.told()
    child.commands.get()  # the test's, once it has heard so
    child.vitals.told()  # afterwards nothing can be said
    re.match(r"(a+)+$", "a" * 64 + "b")  # takes longer than anybody waits
    return 0

"""A worker whose interpreter is kept by one call for ever, while it loads its model.

`python -m jax_specdec.child tests.support.held_up_process`
"""

import re
import sys
import threading

WORKER = (sys.executable, "-m", "jax_specdec.child", "tests.support.held_up_process")


def main(child):
    """Say how far it is, then compute in C code that lets no other thread run."""
    made = threading.Semaphore(0)  # heartbeats

    def members():
        made.release()
        return ()

    child.vitals.load(1, 3)
    child.vitals.told()
    child.commands.get()  # the test's, once it has heard so
    child.vitals.members = members
    for _ in range(2):  # where the second is made, the first is sent: it says what was taken
        child.vitals.told()
        made.acquire()
    re.match(r"(a+)+$", "a" * 64 + "b")  # takes longer than anybody waits
    return 0

"""Runs a file of examples/ in a process of its own."""

import os

from tests.support import quick_compile
from tests.support.paths import ROOT
from tests.support.processes import ended

EXAMPLES = ROOT / "examples"


def environment():
    """The user's own environment, with cheap compiling, which takes nearly all the time here."""
    return os.environ | {
        "XLA_FLAGS": quick_compile.FLAGS,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def run(*command, status=0):
    """Run Python with a script's path or `-c`; what it prints. A warning in it is an error."""
    done = ended("-W", "error", *command, timeout=200, env=environment())
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr

"""The command line as a module: `python -m jax_specdec.cli demo` is `jax-specdec demo`."""

import sys

from jax_specdec.cli.main import program

if __name__ == "__main__":
    sys.exit(program())

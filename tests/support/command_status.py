"""The command line in this process."""

from jax_specdec.cli.main import main


def status_of(*arguments):
    """The exit status of `jax-specdec` with these arguments, usage errors included."""
    try:
        return main([*map(str, arguments)])
    except SystemExit as end:
        return end.code

"""Importing the engine side brings in few modules, counted by name: times depend on the machine."""

import pytest

from tests.support.processes import output_of

# Each costs milliseconds, and nothing that a record passes through needs it.
HEAVY = {
    "argparse", "asyncio", "concurrent", "ctypes.util", "email", "hashlib", "html", "http",
    "importlib.metadata", "importlib.resources", "inspect", "jax", "jinja2", "logging",
    "multiprocessing", "openai", "prometheus_client", "pyarrow", "pydantic",
    "random", "rich", "secrets", "socket", "ssl", "tempfile", "tokenizers", "typing_extensions",
    "unittest", "urllib.request", "uuid", "xml", "zmq",
}  # fmt: skip


def brings_in(statement):
    """The heavy modules that a statement imports and that NumPy does not."""
    code = (
        "import sys, numpy, numpy.typing; before = {*sys.modules}; "
        f"{statement}; print(*({{*sys.modules}} - before))"
    )
    loaded = output_of(code).split()
    return {name for name in HEAVY if name in loaded}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("records.output_processor, jax_specdec.records.decode, jax_specdec.text.detokenize", ()),
        # An engine says in log lines what happens to requests; zmq comes with its first worker.
        ("engine, jax_specdec.export", ("logging",)),
        # pyarrow comes with a table, prometheus_client with a page.
        ("export.arrow, jax_specdec.export.metrics", ("logging",)),
        ("export.html_page", ("logging", "hashlib")),  # of the page's policy
        ("cli.standard_output", ("logging", "rich")),  # the control
    ],
)
def test_importing_brings_in_nothing_heavy_that_it_does_not_need(module, heavy):
    found = brings_in(f"import jax_specdec.{module}")
    assert found == {*heavy} or ("rich" in heavy and "rich" in found)

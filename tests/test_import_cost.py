"""Importing the engine side brings in few modules, counted by name: times depend on the machine."""

import subprocess
import sys

import pytest

# Each costs milliseconds, and nothing that a record passes through needs it.
HEAVY = {
    "argparse", "asyncio", "concurrent", "ctypes.util", "email", "hashlib", "html", "http",
    "importlib.metadata", "importlib.resources", "inspect", "jax", "jinja2", "logging",
    "multiprocessing", "openai", "prometheus_client", "pyarrow", "pydantic", "random", "rich",
    "secrets", "socket", "ssl", "tempfile", "tokenizers", "typing_extensions", "unittest",
    "urllib.request", "uuid", "xml", "zmq",
}  # fmt: skip


def brings_in(statement):
    """The heavy modules that a statement imports and that NumPy does not."""
    code = (
        "import sys, numpy, numpy.typing; before = {*sys.modules}; "
        f"{statement}; print(*({{*sys.modules}} - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    return {name for name in HEAVY if name in loaded}


def test_the_engine_side_brings_in_nothing_heavy():
    """An engine says in log lines what happens to requests; zmq comes with its first worker."""
    for name in ("records.output_processor", "records.decode", "text.detokenize"):
        assert brings_in(f"import jax_specdec.{name}") == set(), name
    for name in ("engine", "export"):
        assert brings_in(f"import jax_specdec.{name}") == {"logging"}, name


def test_exporting_brings_in_only_what_it_needs():
    """Its metrics are of an engine's status."""
    logging = {"logging"}
    assert brings_in("import jax_specdec.export.column_builder") == logging
    assert brings_in("import jax_specdec.export.arrow") == logging  # pyarrow once a table is made
    assert brings_in("import jax_specdec.export.metrics") == logging  # its client for a page
    # Of the page's policy:
    assert brings_in("import jax_specdec.export.html_page") == {"hashlib", *logging}


@pytest.mark.parametrize("module", ["token_colors", "main"])
def test_that_check_can_fail(module):
    assert brings_in(f"import jax_specdec.cli.{module}") & {"rich", "argparse"}

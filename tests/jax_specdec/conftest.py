"""Weights of engines; what these leave in the temporary directory goes with the tests' end."""

import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _engines_have_a_temporary_directory_of_their_own(tmp_path_factory):
    """Lost workers' output and killed engines' sockets are kept; a test run removes them."""
    tmp_path_factory.getbasetemp()  # pytest's own stays where it is
    folder = Path(tempfile.mkdtemp(prefix="jsd-"))  # short: the path of a socket has 107 characters
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A file of the random model."""
    from jax_specdec.device.model.checkpoint import save_checkpoint
    from tests.support.decoding import random_model

    path = tmp_path_factory.mktemp("weights") / "random.safetensors"
    save_checkpoint(path, *random_model())
    return str(path)

"""Fixtures of the command line's tests."""

import pytest

from tests.support import tiny_checkpoint
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def during(monkeypatch):
    """Let a function run where the engine would run requests."""
    return lambda f: monkeypatch.setattr("jax_specdec.engine.engine.Engine", FakeEngine(f))


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """The directory of a small checkpoint."""
    return tiny_checkpoint.write(tmp_path_factory.mktemp("hf") / "tiny-qwen")

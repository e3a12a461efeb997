"""Fixtures of the command line's tests."""

from contextlib import nullcontext

import pytest

from tests.support import tiny_checkpoint
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def use_engine(monkeypatch):
    """Let the command line start what a test gives it in place of an engine."""

    def use(made):
        for name in ("demo", "generate"):
            monkeypatch.setattr(f"jax_specdec.cli.{name}_command.Engine", made)
        monkeypatch.setattr("jax_specdec.cli.generate_command.worker_ahead", nullcontext)

    return use


@pytest.fixture
def during(use_engine):
    """Let a function run where the engine would run requests."""
    return lambda f: use_engine(FakeEngine(f))


@pytest.fixture
def fake(use_engine):
    """An engine that notes its configurations and requests, and runs none."""
    made = FakeEngine()
    use_engine(made)
    return made


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """The directory of a small checkpoint."""
    return tiny_checkpoint.write(tmp_path_factory.mktemp("hf") / "tiny-qwen")

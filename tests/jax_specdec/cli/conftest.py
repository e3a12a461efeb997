"""Fixtures of the command line's tests."""

import pytest

from tests.support.fake_engine import FakeEngine


@pytest.fixture
def during(monkeypatch):
    """Let a function run where the engine would run requests."""
    return lambda f: monkeypatch.setattr("jax_specdec.engine.engine.Engine", FakeEngine(f))

"""What every test of rings must leave: nothing in /dev/shm."""

import pytest

from tests.support.ring_checks import leftovers


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert leftovers() == []

"""What every test of engines leaves behind: no ring."""

import pytest

from tests.support.processes import no_ring_is_left, wait_for


@pytest.fixture(autouse=True, scope="module")
def nothing_left_in_shared_memory():
    yield
    wait_for(no_ring_is_left)

"""A fixture for modules that look at what programs hold once the kernels are proved."""

import pytest

from pallas_kernels.testing.as_proved import as_proved


@pytest.fixture(autouse=True)
def proved_kernels():
    """As on a device that passed `check-device --keep`: no entry is needed for these programs."""
    with as_proved():
        yield

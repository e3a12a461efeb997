"""`verify` compiles, whatever its shapes: a compiler that aborts takes its whole process along."""

import os

import pytest

from tests.support.compiled_verify import ABORTED, aborted, shapes

# As a user's process has it: the flags of the tests' own would change what is generated.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def test_the_shape_that_once_aborted():
    assert not aborted([ABORTED], ENVIRONMENT)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(3))
def test_every_pair_of_sizes(part):
    assert not aborted(shapes()[part::3], ENVIRONMENT)

"""`verify` compiles, whatever its shapes: a compiler that aborts takes its whole process along."""

import itertools
import os

import pytest

from tests.support.compiled_verify import ABORTED, aborted, has_avx512, shapes

# As a user's process has it: the flags of the tests' own would change what is generated.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def test_the_shape_that_once_aborted():
    assert not aborted([ABORTED], ENVIRONMENT)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(3))
def test_every_pair_of_sizes(part, capsys):
    with capsys.disabled():
        has = "has" if has_avx512() else "does not have"
        print(f"\nThis CPU {has} AVX-512, of whose instructions LLVM could not select some.")
    assert not aborted(shapes()[part::3], ENVIRONMENT)


@pytest.mark.slow
def test_an_abort_is_noticed_and_the_rest_goes_on():
    """Negative control: a process that ends at one shape says which, and not the one behind."""
    wrong = (2, 3, 1, 7, "no_dtype")
    found = aborted([(1, 1, 1, 7, "float32"), wrong, (1, 1, 1, 7, "float32")], ENVIRONMENT)
    assert list(found) == [wrong]
    assert "no_dtype" in found[wrong]


def test_the_shapes_have_every_pair():
    """Of S = 1, which has no drafts, one M is as good as another."""
    every = shapes()
    assert len(every) < 50
    for one, other in itertools.combinations(range(5), 2):
        pairs = {(shape[one], shape[other]) for shape in every}
        firsts, seconds = ({shape[axis] for shape in every} for axis in (one, other))
        missing = set(itertools.product(firsts, seconds)) - pairs
        assert all((one, other) == (1, 2) and s == 1 for s, _ in missing)
    assert [len({shape[axis] for shape in every}) for axis in range(5)] == [4, 5, 10, 2, 3]

"""The schedules that a session on a GPU tries."""

import pytest

from bench import gpu_tune
from pallas_kernels.testing.shapes import Shape

SHAPES = [Shape(rows, 131_072, k, dtype) for rows, k, dtype in (
    (64, 20, "bfloat16"), (1536, 0, "bfloat16"), (4, 20, "float32"),
)]  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("shape", [*SHAPES, Shape(3, 50_257, 64, "float16")], ids=str)
def test_schedules_that_are_tried(shape):
    """The current one is the first, each is there once, and each can be run."""
    found = list(gpu_tune.schedules(shape))
    assert len(found) == len(set(found)) >= 4
    assert len({gpu_tune.name_of(schedule) for schedule in found}) == len(found)
    for schedule in found:
        assert 1 <= schedule.splits <= schedule.num_steps
        assert schedule.vocabulary == shape.vocabulary

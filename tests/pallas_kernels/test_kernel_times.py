"""On which arrays `check-device` times calls."""

import pytest

from pallas_kernels.testing import times
from pallas_kernels.testing.shapes import Shape


@pytest.mark.fast
@pytest.mark.parametrize(("job", "rows"), [(times.VERIFY, 8), (times.DRAW, 2)])
def test_arrays_of_verification_hold_its_rows_alone(job, rows, monkeypatch):
    arrays = []

    def timed(call, buffers, rehearse):
        arrays.extend(buffers.logits)
        return None, [1.0]

    monkeypatch.setattr(times, "timed", timed)
    times.measure(job, Shape(2, 2048, 2, "float32"), "xla", rehearse=True)
    assert {len(logits) for logits in arrays} == {rows}

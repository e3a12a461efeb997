"""What `bench.aot check` compiles: a piece's programs, which do not run; and its limits."""

import jax
import numpy as np
import pytest

from bench import aot_check
from bench.aot_check import Taken
from pallas_kernels.testing import checks, pieces, times
from pallas_kernels.testing.shapes import Shape

SHAPE = Shape(5, 2050, 0, "bfloat16")


@pytest.fixture
def compiler():
    return aot_check.Compiler(jax.sharding.SingleDeviceSharding(jax.devices()[0]), "cpu")


def test_a_piece_is_compiled_and_not_compared(compiler):
    """The control: the same piece, run, finds the wrong result."""

    def check():
        found = checks.jax.jit(lambda x: x + 1)(checks.random_logits(SHAPE, 1))
        checks.np.testing.assert_array_equal(found, 7)

    with pytest.raises(AssertionError):
        check()
    piece = pieces.Piece("ranks: x", check)
    first = aot_check.measure(piece, compiler)
    assert (first.programs, first.step) == (2, "correctness")
    assert 0 < first.seconds == sum(compiler.seconds)
    # The logits' program is there by now; a new function is a new program.
    assert aot_check.measure(piece, compiler).programs == 1
    with pytest.raises(AssertionError):
        check()


def test_programs_of_times_are_compiled_and_not_timed(compiler, monkeypatch):
    def calls(*_):
        return {"mosaic_gpu": lambda x, rows, t: x[rows, t], "xla": lambda x, rows, t: {}[rows]}

    monkeypatch.setattr(times, "jax_calls", calls)
    shape = Shape(256, 2**20, 0, "bfloat16")  # half a gigabyte, which nobody makes
    piece = pieces.Piece("times: x", lambda: times.measure(times.TOPK, shape, "mosaic_gpu"))
    found = aot_check.measure(piece, compiler)
    assert (found.programs, found.step) == (2, "times")
    assert [*found.absent] == ["xla"]
    assert "TypeError" in found.absent["xla"]


def test_zeros_take_no_memory():
    many = aot_check.zeros((10**6, 10**6), np.float32)
    assert many.shape == (10**6, 10**6)
    assert not many[:3, :3].any()


@pytest.mark.parametrize(("taken", "full", "said"), [
    ([Taken("rows: x", 3, 99.0, 9.0, {})] * 4, False, []),
    ([Taken("rows: x", 3, 101.0, 9.0, {})], False, ["rows: x: 101.0 s > 100"]),
    ([Taken("times: x", 3, 1.0, 1.0, {"xla": "why"})], False, ["times: x: xla: why"]),
    ([Taken("rows: x", 3, 99.0, 9.0, {})] * 5, False, ["all pieces: 495 s > 480"]),
    ([Taken("rows: x", 3, 99.0, 9.0, {})] * 5, True, []),
])  # fmt: skip
def test_limits_of_what_pieces_take(taken, full, said):
    assert aot_check.broken_limits(taken, full=full) == said

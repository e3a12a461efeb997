"""Negative controls: a TPU kernel that is wrong in one place is caught when it is interpreted."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.backends.mosaic_tpu import unit
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import oracle
from tests.support import kernel_calls, quick_compile
from tests.support.interpreted_tpu_kernel import CUT, interpret, run_interpreted, run_watched

V = 700
X = np.random.default_rng(5).normal(size=(9, V)).astype(np.float32)
IDS = np.arange(9, dtype=np.int32)


def found(run_it=run_interpreted):
    def call(x, ids, interpret, cut):
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        rest = (None, None, None, nothing, None, interpret, cut)
        return kernel_calls.topk_logprobs(run, x, ids, Outputs(1), *rest)

    return run_it(call, X, IDS)


def test_a_wait_left_out(monkeypatch):
    """What was never copied is read; where it is copied at once, a race is found."""
    wait = unit.Copies.wait

    def all_but_one(self, number, index, tokens):
        if tokens != V - 512:  # the last chunk's
            wait(self, number, index, tokens)

    monkeypatch.setattr(unit.Copies, "wait", all_but_one)
    with pytest.raises(AssertionError):
        oracle.assert_matches(found(), oracle.topk_logprobs(X, IDS, 1))
    assert found(run_it=partial(run_watched, copied="eager"))[1]


@pytest.mark.slow
def test_a_read_behind_the_rows(monkeypatch):
    """The interpreter stops where the chip, whose checks are turned off, would read anything."""
    start = unit.Copies.start
    monkeypatch.setattr(
        unit.Copies,
        "start",
        lambda self, number: start(self._replace(schedule=wider(self.schedule)), number),
    )
    with pytest.raises(Exception, match=r"[Oo]ut-of-bounds"):
        found()


def wider(schedule):
    return replace(schedule, vocabulary=schedule.vocabulary + 1)


@pytest.fixture
def seen(monkeypatch):
    """The starts of copies and the waits for them, in their order."""
    events = []
    for name in ("dma_start", "dma_wait"):
        function = getattr(interpreter, name)

        def noted(*arguments, name=name, function=function, **options):
            events.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(interpreter, name, noted)
    return events


AHEAD = ["dma_start"] * 4 + ["dma_wait"] * 4


def test_the_next_rows_are_copied_before_these_are_waited_for(seen):
    """Two units of two chunks each: all four copies have started when the first is waited for."""
    found()
    assert seen == AHEAD


@pytest.mark.parametrize(
    ("gathered", "copies_of_a_unit"), [pytest.param(False, 2, marks=pytest.mark.slow), (True, 16)]
)
def test_rows_that_are_not_wanted_are_not_copied(seen, gathered, copies_of_a_unit):
    """Of two chunks a unit of 8 rows; where rows are gathered, each is a copy of its own."""
    rows = jnp.asarray(IDS[::-1].copy()) if gathered else None

    def call(x, ids, num_rows):
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        rest = (rows, num_rows, None, nothing, None)
        return kernel_calls.topk_logprobs(run, x, ids, Outputs(0), *rest, interpret(), CUT)

    program = jax.jit(call, compiler_options=quick_compile.OPTIONS)
    for num_rows, units in ((0, 0), (1, 1), (8, 1), (9, 2)):
        seen.clear()
        jax.block_until_ready(program(X, IDS, np.int32(num_rows)))
        assert seen.count("dma_start") == units * copies_of_a_unit
        assert seen.count("dma_wait") == seen.count("dma_start")

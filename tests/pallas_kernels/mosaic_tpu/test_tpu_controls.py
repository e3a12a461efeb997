"""Negative controls: a TPU kernel that is wrong in one place is caught when it is interpreted."""

import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from pallas_kernels import oracle
from pallas_kernels.mosaic_tpu import copies, run, stacks, unit
from pallas_kernels.wanted import Wanted
from tests.support.interpreted_tpu_kernel import run_interpreted

V = 700
X = np.random.default_rng(5).normal(size=(9, V)).astype(np.float32)
X[8, 15] = 9.0
IDS = np.arange(9, dtype=np.int32)


def found(k=1):
    def call(x, ids, interpret, cut):
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        return run.topk_logprobs(x, ids, Wanted(k), None, None, None, nothing, None, interpret, cut)

    return run_interpreted(call, X, IDS)


def is_caught(k=1):
    """Whether the oracle's results differ, or the interpreter stops."""
    try:
        oracle.assert_matches(found(k), oracle.topk_logprobs(X, IDS, k))
    except AssertionError:
        return True
    return False


def test_the_kernel_as_it_is_is_not_caught():
    assert not is_caught()


def test_a_wait_left_out(monkeypatch):
    wait = copies.Copies.wait

    def all_but_one(self, number, index, tokens):
        if tokens != V - 512:  # the last chunk's
            wait(self, number, index, tokens)

    monkeypatch.setattr(copies.Copies, "wait", all_but_one)
    assert is_caught()


def test_a_group_forgotten(monkeypatch):
    push = stacks.push

    def all_but_first(stack, x, column, wanted):
        return push(stack, x, column, wanted & (column != 0.0))

    monkeypatch.setattr(stacks, "push", all_but_first)
    assert is_caught()


def test_an_edge_not_masked(monkeypatch):
    monkeypatch.setattr(unit, "masked", lambda x, tokens: x)
    assert is_caught(0)


def test_the_next_rows_are_copied_before_these_are_waited_for(monkeypatch):
    """Two units of two chunks each: all four copies have started when the first is waited for."""
    seen = []
    for name in ("dma_start", "dma_wait"):
        function = getattr(interpreter, name)

        def noted(*arguments, name=name, function=function, **options):
            seen.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(interpreter, name, noted)
    found()
    assert seen == ["dma_start"] * 4 + ["dma_wait"] * 4

"""The peers beside the adapters: what is refused, what is left out, what limits may miss."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from bench import timing
from bench.comparison import HOST, MEMORY
from bench.peers import environments, measure
from bench.peers.cases import GRID, OF, QUICK, Case
from bench.timing import BenchError
from jax_specdec.adapters import proved
from pallas_kernels.testing.shapes import Shape

SHAPE = Shape(2, 300, 0, "float32")


def table(x):
    """The same as `directly`, with a table of x's size that XLA has to keep."""
    order = jnp.argsort(x, axis=1)
    return jnp.take_along_axis(x, order, axis=1)[:, -1]


def directly(x):
    return x.max(axis=1)


CASE = Case("largest", SHAPE, table, directly, (jnp.arange(600.0).reshape(2, 300),))


def measured(case, on_cpu=True):
    return measure.measured("tunix", case, {"clock": "CPU time"}, on_cpu)


def test_peers_are_run_with_the_newest_release_that_is_proved():
    assert set(environments.PEERS) == set(OF)
    for peer, (distribution, *_) in OF.items():
        assert f"{distribution}=={proved.releases(distribution)[-1]}" in environments.PEERS[peer][0]
    assert set(QUICK) < set(GRID)


def test_both_have_their_memory_and_bytes_to_the_host():
    found = measured(replace(CASE, to_host=8000))
    assert found.names == ("tunix", measure.OURS)
    assert found.title == "tunix largest R=2 V=300 K=0 float32"
    theirs, ours = (found.figures[name] for name in found.names)
    assert theirs[MEMORY] >= 2 * 300 * 4 / 1e6 > ours[MEMORY] >= 8e-6
    assert theirs[HOST] == ours[HOST] == 8


def test_another_result_ends_the_run_before_any_timing(monkeypatch):
    monkeypatch.setattr(timing, "rotated", None)
    for wrong in (lambda x: directly(x) + 1, lambda x: directly(x).astype(jnp.int32) + 1):
        with pytest.raises(BenchError, match="the adapter differs from tunix"):
            measured(replace(CASE, ours=wrong))


def test_drawn_results_are_compared_where_they_are_equal(monkeypatch):
    """What is timed may draw: other arguments say whether both compute the same."""
    other = replace(CASE, ours=lambda x: directly(x) + x[0, 0])  # x[0, 0] = 0 where it is compared
    drawn = replace(other, arguments=(CASE.arguments[0] + 1,), compared=CASE.arguments)
    assert measured(drawn).names == ("tunix", measure.OURS)
    monkeypatch.setattr(timing, "rotated", None)
    with pytest.raises(BenchError, match="the adapter differs from tunix"):
        measured(replace(drawn, compared=drawn.arguments))


def test_a_call_of_minutes_on_a_cpu_is_compiled_and_not_run(monkeypatch):
    monkeypatch.setattr(measure, "MOST_FLOPS", 0.0)
    found = measured(CASE)
    assert found.timings == ()
    assert "Tflop a call" in found.notes["NOT RUN"]
    assert found.figures["tunix"][MEMORY] > 0
    assert measured(CASE, on_cpu=False).timings
    timing.print_table([found])


@pytest.mark.parametrize(("ours", "megabytes", "verdicts"), [
    ([1.0, 9.0], 25.0, ["held", "held"]), ([1.1], 26.0, ["MISSED", "MISSED"]),
])  # fmt: skip
def test_the_limits_can_be_missed(ours, megabytes, verdicts):
    found = timing.from_samples("t", {"tunix": [1.0, 2.0], measure.OURS: ours})
    figures = {"tunix": {MEMORY: 100.0}, measure.OURS: {MEMORY: megabytes}}
    found = replace(found, figures=figures)
    many = replace(CASE, shape=Shape(1024, 300, 0, "float32"), trains=True)
    targets = measure.targets_of(found, "tunix", many)
    assert [one.verdict for one in targets] == verdicts
    for few in (replace(many, trains=False), replace(many, shape=SHAPE)):
        assert len(measure.targets_of(found, "tunix", few)) == 1
    not_run = replace(found, timings=())
    assert [one.what for one in measure.targets_of(not_run, "tunix", many)] == ["memory of tunix's"]

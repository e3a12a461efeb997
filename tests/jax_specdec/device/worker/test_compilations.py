"""While JAX compiles, a worker says so, and which program; and how many it has compiled."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_specdec.control import Phase, ProcessStats
from jax_specdec.device.worker import compilations
from tests.support.processes import in_thread


class Noted(ProcessStats):
    """ProcessStats that keep all that was said."""

    def __init__(self):
        super().__init__()
        self.said = []
        self.counts = compilations.watch(self)

    def change(self, **values):
        super().change(**values)
        self.said.append(str(self.heartbeat))


def program(name):
    """One that is not compiled yet."""

    def called(x):
        return x * 5

    called.__name__ = name
    return jax.jit(called)


@pytest.fixture
def argument():
    return jax.block_until_ready(jnp.arange(3))


def test_a_compilation_between_steps_is_a_phase_of_its_own(argument):
    stats, division = Noted(), program("long_division")
    stats.load(3, 10)
    program("before_it_is_ready")(argument)
    assert str(stats.heartbeat) == "loading 3 of 10"
    assert not any(text.startswith("compiling") for text in stats.said)
    stats.be_ready(())
    stats.advance()
    earlier = stats.heartbeat.progress
    division(argument)
    assert "compiling (long_division)" in stats.said
    assert stats.heartbeat.phase is Phase.STEPPING
    assert stats.heartbeat.progress > earlier
    before, earlier = len(stats.said), stats.heartbeat.progress
    division(argument)  # nothing is compiled
    assert (len(stats.said), stats.heartbeat.progress) == (before, earlier)


def test_a_compilation_that_lasts_is_noted_with_its_seconds(argument, monkeypatch):
    stats = Noted()
    before = stats.heartbeat
    program("quick")(argument)
    assert stats.heartbeat.notes_since(before) == ()
    monkeypatch.setattr(compilations, "NOTED_SECONDS", 0.0)
    program("lasting")(argument)
    (note,) = stats.heartbeat.notes_since(before)
    assert re.fullmatch(r"compiled lasting in \d+\.\d s", note)


def test_a_program_is_noted_by_name_whoever_compiles_it(argument, monkeypatch):
    """A start lowers in one thread and compiles in others."""
    stats = Noted()
    before = stats.heartbeat
    monkeypatch.setattr(compilations, "NOTED_SECONDS", 0.0)
    lowered = [program(name).lower(argument) for name in ("first", "second")]
    for one in reversed(lowered):
        in_thread(one.compile)
    names = [note.split(" in ")[0] for note in stats.heartbeat.notes_since(before)]
    assert names == ["compiled second", "compiled first"]


def test_what_another_thread_compiles_ends_no_phase(argument):
    stats, seen = Noted(), []
    stats.be_ready(())
    stats.advance()
    before = stats.heartbeat.progress, len(stats.said)
    in_thread(lambda: seen.append(program("aside")(argument)))
    assert len(seen) == 1
    assert stats.heartbeat.progress > before[0]
    assert not any(text.startswith("compiling") for text in stats.said[before[1] :])


def test_programs_of_an_earlier_start_are_counted(argument, tmp_path):
    """The same program twice, of two functions: the second is read."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    counts = Noted().counts
    try:
        for name, value in zip(names, (str(tmp_path), 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for _ in range(2):
            program("twice")(argument)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert (counts.count, counts.num_kept) == (2, 1)
    assert str(counts) == "2 programs, 1 of them kept by an earlier start"

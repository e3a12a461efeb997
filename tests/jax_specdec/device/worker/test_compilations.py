"""While JAX compiles, a worker says so, with the program's number and name; what is written."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler

from jax_specdec.control import Phase, ProcessStats
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.loop.programs import PROGRAMS, Compiled
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.worker import background, compilations
from jax_specdec.device.worker.compilation_cache import MOST_WAITING, LaterWrites
from tests.support.decoding import random_model
from tests.support.processes import in_thread

pytestmark = pytest.mark.fast


class Noted(ProcessStats):
    """ProcessStats that keep all that was said."""

    def __init__(self, *needed):
        super().__init__()
        self.said = []
        compilations.watch(self, needed)

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


def test_a_compilation_is_a_phase_with_a_number_and_a_name_and_then_all_is_as_before(argument):
    stats, division = Noted(), program("long_division")
    stats.load(3, 10)
    floats = jax.block_until_ready(argument.astype(jnp.float32))
    earlier, before = stats.heartbeat.progress, len(stats.said)
    division(argument)
    said = list(dict.fromkeys(stats.said[before:]))
    assert [text.split(maxsplit=1)[0] for text in said] == ["loading", "compiling"]
    assert said[1].endswith(" (long_division)")
    assert str(stats.heartbeat) == "loading 3 of 10"
    assert stats.heartbeat.progress > earlier
    number, earlier = int(said[1].split()[1]), stats.heartbeat.progress
    stats.advance()
    assert str(stats.heartbeat) == "stepping"
    division(argument)  # nothing is compiled
    assert stats.heartbeat.progress == earlier + 1
    division(floats)
    assert f"compiling {number + 1} (long_division)" in stats.said
    assert stats.heartbeat.phase is Phase.STEPPING


def test_a_compilation_that_lasts_is_noted_with_its_seconds(argument, monkeypatch):
    stats = Noted()
    before = stats.heartbeat
    program("quick")(argument)
    assert stats.heartbeat.notes_since(before) == ()
    monkeypatch.setattr(compilations, "NOTED_SECONDS", 0.0)
    program("lasting")(argument)
    (note,) = stats.heartbeat.notes_since(before)
    assert re.fullmatch(r"compiled lasting in \d+\.\d s", note)


def test_the_total_counts_what_is_needed_and_grows_with_what_else_is(argument):
    stats = Noted("needed", "also_needed")
    other = program("other")
    for one in (program("needed"), other, program("also_needed"), other):
        one(argument)
    said = [text for text in dict.fromkeys(stats.said) if text.startswith("compiling")]
    expected = "1 of 2 (needed)", "2 of 3 (other)", "3 of 3 (also_needed)"
    assert said == [f"compiling {text}" for text in expected]


def test_the_programs_that_every_request_needs_have_the_names_that_jax_says():
    programs = Compiled(LoopConfig(random_model()[1], NoDrafter(0), num_slots=2, max_length=32))
    assert [getattr(programs, name).__name__ for name in PROGRAMS] == [*PROGRAMS]


def test_a_program_that_is_compiled_beside_the_steps_does_not_end_their_phase(argument):
    stats, seen = Noted(), []
    stats.advance()
    before = stats.heartbeat.progress, len(stats.said)

    def job():
        lowered = program("aside").lower(argument)
        stats.advance()
        seen.append(str(stats.heartbeat))
        lowered.compile()

    in_thread(job, name=background.NAME)
    assert seen == ["stepping (compiling aside)"]
    assert stats.heartbeat.progress > before[0] + 1
    assert not any(text.startswith("compiling") for text in stats.said[before[1] :])
    stats.advance()
    assert str(stats.heartbeat) == "stepping"


# What is compiled beside the steps is written to jax's cache in a rest ---------------------------


def test_what_jobs_compile_is_written_later_and_everything_else_at_once(monkeypatch):
    written, writes = [], LaterWrites()
    monkeypatch.setattr(compiler, "_cache_write", lambda *arguments: written.append(arguments))
    writes.begin()
    writes.steps_are_made = lambda: True

    def in_a_job(*arguments):
        in_thread(compiler._cache_write, *arguments, name=background.NAME)

    in_a_job("first", 1)
    compiler._cache_write("at once", 2)
    in_a_job("second", 3)
    assert written == [("at once", 2)]
    assert writes.write_one()
    assert written == [("at once", 2), ("first", 1)]
    writes.write_all()
    assert written[2:] == [("second", 3)]
    assert not writes.write_one()
    for number in range(MOST_WAITING + 1):
        in_a_job(number)
    writes.write_all()
    assert written[3:] == [(number,) for number in range(1, MOST_WAITING + 1)]

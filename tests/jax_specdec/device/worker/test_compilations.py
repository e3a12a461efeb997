"""While JAX compiles, a worker says so, with the program's number and name."""

import re
import threading

import jax
import jax.numpy as jnp
import pytest

from jax_specdec.control import Phase, ProcessStats
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.loop.programs import PROGRAMS, Compiled
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.worker import background, compilations
from tests.support.decoding import random_model

pytestmark = pytest.mark.fast


class Noted(ProcessStats):
    """ProcessStats that keep all that was said."""

    def __init__(self):
        super().__init__()
        self.said = []

    def change(self, **values):
        super().change(**values)
        self.said.append(str(self.heartbeat))


def test_a_compilation_is_a_phase_with_a_number_and_a_name_and_then_all_is_as_before():
    stats = Noted()
    compilations.watch(stats)
    stats.load(3, 10)
    argument = jnp.arange(3)
    floats = jax.block_until_ready(argument.astype(jnp.float32))
    earlier = stats.heartbeat.progress
    before = len(stats.said)

    @jax.jit
    def long_division(x):
        return x / 3

    long_division(argument)
    said = list(dict.fromkeys(stats.said[before:]))
    assert [text.split(maxsplit=1)[0] for text in said] == ["loading", "compiling"]
    assert said[1].endswith(" (long_division)")
    assert str(stats.heartbeat) == "loading 3 of 10"
    assert stats.heartbeat.progress > earlier
    number, earlier = int(said[1].split()[1]), stats.heartbeat.progress
    stats.advance()
    assert str(stats.heartbeat) == "stepping"
    long_division(argument)  # nothing is compiled
    assert stats.heartbeat.progress == earlier + 1
    long_division(floats)
    assert f"compiling {number + 1} (long_division)" in stats.said
    assert stats.heartbeat.phase is Phase.STEPPING


def test_a_compilation_that_lasts_is_noted_with_its_seconds(monkeypatch):
    stats = ProcessStats()
    compilations.watch(stats)
    floats = jax.block_until_ready(jnp.arange(3.0))
    before = stats.heartbeat

    def quick(x):
        return x / 7

    jax.jit(quick)(floats)
    assert stats.heartbeat.notes_since(before) == ()
    monkeypatch.setattr(compilations, "NOTED_SECONDS", 0.0)

    def lasting(x):
        return x / 9

    jax.jit(lasting)(floats)
    (note,) = stats.heartbeat.notes_since(before)
    assert re.fullmatch(r"compiled lasting in \d+\.\d s", note)


def test_the_total_counts_what_is_needed_and_grows_with_what_else_is():
    def needed(x):
        return x * 5

    def also_needed(x):
        return x * 6

    def other(x):
        return x * 7

    argument = jax.block_until_ready(jnp.arange(3))
    stats = Noted()
    compilations.watch(stats, ["needed", "also_needed"])
    for function in (needed, other, also_needed, other):
        jax.jit(function)(argument)
    said = [text for text in dict.fromkeys(stats.said) if text.startswith("compiling")]
    assert said == [
        "compiling 1 of 2 (needed)",
        "compiling 2 of 3 (other)",
        "compiling 3 of 3 (also_needed)",
    ]


def test_the_programs_that_every_request_needs_have_the_names_that_jax_says():
    _, model = random_model()
    programs = Compiled(LoopConfig(model, NoDrafter(0), num_slots=2, max_length=32))
    assert {getattr(programs, name).__name__: name for name in PROGRAMS} == {
        name: name for name in PROGRAMS
    }


def test_a_program_that_is_compiled_beside_the_steps_does_not_end_their_phase():
    def aside(x):
        return x * 8

    argument = jax.block_until_ready(jnp.arange(3))
    stats = Noted()
    compilations.watch(stats)
    stats.advance()
    before = stats.heartbeat.progress, len(stats.said)
    seen = []

    def job():
        lowered = jax.jit(aside).lower(argument)
        stats.advance()
        seen.append(str(stats.heartbeat))
        lowered.compile()

    thread = threading.Thread(target=job, name=background.NAME)
    thread.start()
    thread.join()
    assert seen == ["stepping (compiling aside)"]
    assert stats.heartbeat.progress > before[0] + 1
    assert not any(text.startswith("compiling") for text in stats.said[before[1] :])
    stats.advance()
    assert str(stats.heartbeat) == "stepping"

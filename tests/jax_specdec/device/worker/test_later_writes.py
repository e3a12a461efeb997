"""Programs that are compiled beside the steps are written to jax's cache in a rest."""

import contextlib
import threading
import warnings

import jax
import pytest
from jax._src import compilation_cache as jax_cache
from jax._src import compiler

from jax_specdec.device.worker import background
from jax_specdec.device.worker.compilation_cache import MOST_WAITING, LaterWrites

pytestmark = pytest.mark.fast


def test_what_jobs_compile_is_written_later_and_everything_else_at_once(monkeypatch):
    written, writes = [], LaterWrites()
    monkeypatch.setattr(compiler, "_cache_write", lambda *arguments: written.append(arguments))
    writes.begin()
    writes.steps_are_made = lambda: True

    def in_a_job(*arguments):
        thread = threading.Thread(
            target=compiler._cache_write, args=arguments, name=background.NAME
        )
        thread.start()
        thread.join()

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


def test_jax_has_the_function_that_writes():
    assert callable(compiler._cache_write)


def sorted_program(name):
    """A program whose bytes can't be made on a CPU once it has run."""
    return jax.jit(lambda x: jax.numpy.argsort(x, stable=True) + len(name))


def test_a_program_that_sorts_is_written_if_nobody_waits_for_steps(tmp_path, monkeypatch):
    """With steps it runs before it is written, and then it can't be, without a word."""
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)
    writes = LaterWrites()
    writes.begin()
    x = jax.numpy.arange(9) < 4

    def job(name):
        sorted_program(name)(x).block_until_ready()

    begun = [("jax_compilation_cache_dir", str(tmp_path))]
    begun += [("jax_persistent_cache_min_compile_time_secs", 0)]
    begun += [("jax_persistent_cache_min_entry_size_bytes", -1)]
    with contextlib.ExitStack() as settings, warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, value in begun:
            settings.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, value)
        settings.callback(jax_cache.reset_cache)
        jax_cache.reset_cache()
        for name, steps in (("at once", False), ("put off", True)):
            writes.steps_are_made = lambda steps=steps: steps
            thread = threading.Thread(target=job, args=(name,), name=background.NAME)
            thread.start()
            thread.join()
            if not steps:
                count = len(list(tmp_path.iterdir()))
        assert count
        writes.write_all()

"""Programs that are compiled beside the steps are written to jax's cache in a rest."""

import threading

import pytest
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

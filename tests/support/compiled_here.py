"""What JAX compiles meanwhile."""

import contextlib

import jax

from jax_specdec.device.worker import compilations


@contextlib.contextmanager
def compiled_here():
    """The names of the programs that are compiled in this block."""
    names = []

    def heard(event, duration_secs, **more):
        if event == compilations.COMPILED:
            names.append(more.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)

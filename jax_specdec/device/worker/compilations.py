"""The phases of compiling, as JAX tells them: a worker that compiles is not one that hangs."""

from typing import Any

import jax

from jax_specdec.control import Phase, Vitals

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the compiler gets the program next
COMPILED = "/jax/core/compile/backend_compile_duration"
_EVENTS = "/jax/core/compile/"


def watch(vitals: Vitals) -> None:
    """Keep `vitals` at the phase COMPILING, with the number of the program, while one is compiled.

    Programs are compiled when they are first needed, so how many there will be is not known. Every
    event of JAX's counts as progress: a long trace ends, and so does a lowering.
    """
    before: list[Phase] = []
    count = 0

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        nonlocal count
        if event == LOWERED:
            count += 1
            if not before:
                before.append(vitals.pulse.phase)
            vitals.enter(Phase.COMPILING, count)
        elif event == COMPILED and before:
            vitals.enter(before.pop())
        if event.startswith(_EVENTS):
            vitals.change(progress=vitals.pulse.progress + 1)

    jax.monitoring.register_event_duration_secs_listener(heard)

"""The phases of compiling, as JAX tells them: a worker that compiles is not one that hangs."""

from typing import Any

import jax

from jax_specdec.control import Phase, Pulse, Vitals

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the compiler gets the program next
COMPILED = "/jax/core/compile/backend_compile_duration"
_EVENTS = "/jax/core/compile/"


def watch(vitals: Vitals) -> None:
    """Keep `vitals` at the phase COMPILING while a program is compiled: its number, its name.

    Programs are compiled when they are first needed, and requests decide which ones are, so how
    many there will be is not known. Every event of JAX's counts as progress: a long trace ends, and
    so does a lowering.
    """
    before: list[Pulse] = []
    count = 0

    def heard(event: str, duration_secs: float, **more: Any) -> None:
        nonlocal count
        if event == LOWERED:
            count += 1
            if not before:
                before.append(vitals.pulse)
            name = str(more.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            vitals.enter(Phase.COMPILING, count, what=name)
        elif event == COMPILED and before:
            pulse = before.pop()
            vitals.enter(pulse.phase, pulse.done, pulse.total)
        if event.startswith(_EVENTS):
            vitals.change(progress=vitals.pulse.progress + 1)

    jax.monitoring.register_event_duration_secs_listener(heard)

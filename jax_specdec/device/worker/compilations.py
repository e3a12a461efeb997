"""The phases of compiling, as JAX tells them: a worker that compiles is not one that hangs."""

import threading
from collections.abc import Callable, Collection
from typing import Any

import jax

from jax_specdec.control import Heartbeat, Phase, ProcessStats
from jax_specdec.device.worker import background

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the compiler gets the program next
COMPILED = "/jax/core/compile/backend_compile_duration"
_EVENTS = "/jax/core/compile/"
NOTED_SECONDS = 0.5  # of lowering and compiling, from which on a program is noted for the log


def watch(
    stats: ProcessStats,
    needed: Collection[str] = (),
    prepares: Callable[[], bool] = lambda: False,
) -> None:
    """Keep `stats` at the phase COMPILING while a program is compiled: its number, its name.

    Programs are compiled when they are first needed, and requests decide which ones are. So the
    total is that of the programs that were compiled, and of those in `needed` that were not: it
    grows where requests need others. A program that is compiled beside the steps does not end their
    phase, which names it. Every event of JAX's counts as progress: a long trace ends,
    and so does a lowering.

    Args:
      needed: names of programs that will be compiled; where there are none, no total is said.
      prepares: whether the programs that are compiled now are counted by who asked for them.
    """
    before: list[Heartbeat] = []
    count, left = 0, set(needed)
    lowered: dict[int, tuple[str, float]] = {}  # by thread: its program, and how long that took

    def heard(event: str, duration_secs: float, **more: Any) -> None:
        nonlocal count
        thread = threading.current_thread()
        aside = thread.name.startswith(background.NAME)
        if event == LOWERED:
            count += 1
            if not before and not aside:
                before.append(stats.heartbeat)
            name = str(more.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            lowered[threading.get_ident()] = name, duration_secs
            left.discard(name)
            total = count + len(left) if needed else 0
            if aside:
                stats.beside = name
            if not prepares() and (not aside or stats.heartbeat.phase is Phase.COMPILING):
                stats.enter(Phase.COMPILING, count, total, what=name)
        elif event == COMPILED and (aside or before):
            name, lowering = lowered.pop(threading.get_ident(), ("", 0.0))
            if aside:
                stats.beside = next((other for other, _ in lowered.values()), "")
            elif (heartbeat := before.pop()) and not prepares():
                stats.enter(heartbeat.phase, heartbeat.done, heartbeat.total)
            if (seconds := lowering + duration_secs) >= NOTED_SECONDS:
                stats.note(f"compiled {name} in {seconds:.1f} s")
        if event.startswith(_EVENTS):
            stats.change(progress=stats.heartbeat.progress + 1)

    jax.monitoring.register_event_duration_secs_listener(heard)

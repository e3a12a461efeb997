"""Events of JAX about compiling: a worker that compiles is not one that hangs."""

import collections
import threading
from dataclasses import dataclass
from typing import Any

import jax

from jax_specdec.control import Heartbeat, Phase, ProcessStats

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the compiler gets the program next
COMPILED = "/jax/core/compile/backend_compile_duration"
KEPT = "/jax/compilation_cache/cache_hits"  # an earlier start has compiled it
READ = "/jax_specdec/kept_programs/read"  # as KEPT, and nothing was traced for it
_EVENTS = "/jax/core/compile/"
NOTED_SECONDS = 0.5  # of lowering and compiling, from which on a program is noted for the log


@dataclass
class Compilations:
    """How many programs were compiled so far, and how many of them were kept by earlier starts."""

    count: int = 0
    num_kept: int = 0

    def __str__(self) -> str:
        return f"{self.count} programs, {self.num_kept} of them kept by an earlier start"


def watch(stats: ProcessStats) -> Compilations:
    """Count the programs that are compiled from now on, and let `stats` tell of them.

    A program that the main thread compiles while it makes steps is a phase of its own. Every event
    of JAX's counts as progress: a long trace ends, and so does a lowering.
    """
    before: list[Heartbeat] = []
    # By program: how long those took that are not compiled yet, which other threads may do.
    lowered: collections.defaultdict[str, collections.deque[float]]
    lowered = collections.defaultdict(collections.deque)
    counts = Compilations()

    def heard(event: str, duration_secs: float, **more: Any) -> None:
        name = str(more.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        if event == LOWERED:
            lowered[name].append(duration_secs)
            if _is_main() and not before and stats.heartbeat.ready:
                before.append(stats.heartbeat)
                stats.enter(Phase.COMPILING, what=name)
        elif event == COMPILED:
            counts.count += 1
            lowering = lowered[name].popleft() if lowered[name] else 0.0
            if _is_main() and before:
                earlier = before.pop()
                stats.enter(earlier.phase, earlier.done, earlier.total)
            if (seconds := lowering + duration_secs) >= NOTED_SECONDS:
                stats.note(f"compiled {name} in {seconds:.1f} s")
        if event.startswith(_EVENTS):
            stats.change(progress=stats.heartbeat.progress + 1)

    def seen(event: str, **more: Any) -> None:
        counts.num_kept += event in (KEPT, READ)
        if event == READ:
            counts.count += 1
            stats.change(progress=stats.heartbeat.progress + 1)

    jax.monitoring.register_event_duration_secs_listener(heard)
    jax.monitoring.register_event_listener(seen)
    return counts


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()

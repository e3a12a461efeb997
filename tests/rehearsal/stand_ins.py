"""What runs a backend's kernels on a CPU, in every call that names the backend."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from pallas_kernels.backends import choose
from pallas_kernels.meshes import placement, split
from pallas_kernels.sampling import verification
from tests.support import interpreted_tpu_kernel
from tests.support.watched_interpreters import watched


def as_if_for(
    platform: str, *arguments: Any, like: Any, default: Any, **others: Callable[..., Any]
) -> Any:
    """`lowered_for`, as if the program were lowered for this platform; traced with the program.

    An interpreter's callbacks must be known before the program is lowered.
    """
    return others.get(platform, default)(*arguments)


@contextmanager
def executed_ptx() -> Iterator[Callable[[], bool]]:
    """The GPU's kernels are executed as PTX; yields whether one was since it was last called."""
    from tests.pallas_kernels.mosaic_gpu.ptx import kernels

    together = kernels.Conditions("together", lambda ctas: [list(range(ctas))])
    stand = kernels.Stand(together, kernels.Compiler())
    with kernels.executed(stand):
        yield partial(_seen, stand.runs)


def _seen(runs: list[Any]) -> bool:
    found = bool(runs)
    runs.clear()
    return found


@contextmanager
def interpreted() -> Iterator[Callable[[], bool]]:
    """The TPU's kernels are interpreted; races are not looked for, which the kernels' tests do."""
    from pallas_kernels.backends.mosaic_tpu import groups, groups_kernel, rows, rows_kernel

    calls: list[Any] = []
    given = {"interpret": interpreted_tpu_kernel.interpret(races=False),
             "cut": interpreted_tpu_kernel.CUT}  # fmt: skip
    of_rows = (rows, "row_sums"), (rows, "part_sums")
    calling = *of_rows, (groups, "largest"), (groups, "read_groups")
    with ExitStack() as stack:
        stack.enter_context(watched())
        for module, name in calling:
            call = partial(getattr(module, name), **given)
            stack.enter_context(mock.patch.object(module, name, call))
        for module in (rows_kernel, groups_kernel):
            call = module.call

            def noted(*arguments: Any, call: Any = call) -> Any:
                calls.append(None)
                return call(*arguments)

            stack.enter_context(mock.patch.object(module, "call", noted))
        yield partial(_seen, calls)


@contextmanager
def in_place(backend: str) -> Iterator[Callable[[], bool]]:
    """Calls that name the backend run its kernels here."""
    chosen = partial(as_if_for, choose.KERNELS[backend].platform)
    with ExitStack() as stack:
        for module in (choose, verification):
            stack.enter_context(mock.patch.object(module, "lowered_for", chosen))
        for module in (placement, split):
            stack.enter_context(mock.patch.object(module, "may_be_split", return_value=False))
        yield stack.enter_context(executed_ptx() if backend == "mosaic_gpu" else interpreted())

"""Pallas' interpreters of GPU and TPU kernels, watched: every race is told, and a kernel that fails
leaves nothing behind.

jax keeps the notes of the last kernel's races alone. After a kernel that raised, its interpreter
fails for every other one, and so does each program with an ordered callback: the memory and the
token of the failed one are still there.

A copy has one entry of the vector clocks, and two copies of one entry count as one after the other.
A TPU's copies get an entry by chance; here, the next one.
"""

import contextlib
import itertools
from unittest import mock

from jax._src import dispatch
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu
from jax._src.pallas.mosaic.interpret.shared_memory import SharedMemory
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as gpu

from pallas_kernels.backends.mosaic_gpu import compat

# What makes the notes of a kernel's races.
_NOTES = [
    (gpu, "GPURaceDetectionState" if compat.VERSION >= (0, 12) else "RaceDetectionState"),
    (tpu, "RaceDetectionState"),
]


@contextlib.contextmanager
def watched():
    """Yields a function: whether a kernel that ran in the block had a race.

    A block that raises, in Python or in a kernel, leaves both interpreters as new.
    """
    kept = []
    with contextlib.ExitStack() as stack:
        for module, name in _NOTES:
            noting = _keeping(getattr(module, name), kept)
            stack.enter_context(mock.patch.object(module, name, noting))
        entries = mock.patch.object(SharedMemory, "get_random_virtual_device_id", _next_entry())
        stack.enter_context(entries)
        try:
            yield lambda: any(notes.races_found for notes in kept)
        except BaseException:
            _reset()
            raise


def _next_entry():
    copies = itertools.count()

    def entry(memory):
        others = memory.num_cores
        return others + next(copies) % (memory.vector_clock_size - others)

    return entry


def _keeping(make, kept):
    def made(*arguments, **options):
        kept.append(make(*arguments, **options))
        return kept[-1]

    return made


def _reset():
    gpu.reset_gpu_interpret_mode_state()
    tpu.reset_tpu_interpret_mode_state()
    dispatch.runtime_tokens.clear()

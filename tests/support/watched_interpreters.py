"""Pallas' interpreter of TPU kernels, watched: every race is told, and a kernel that fails leaves
nothing behind.

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


@contextlib.contextmanager
def watched():
    """Yields a function: whether a kernel that ran in the block had a race.

    A block that raises, in Python or in a kernel, leaves the interpreter as new.
    """
    kept, make = [], tpu.RaceDetectionState

    def noted(*arguments, **options):
        kept.append(make(*arguments, **options))
        return kept[-1]

    with (
        mock.patch.object(tpu, "RaceDetectionState", noted),
        mock.patch.object(SharedMemory, "get_random_virtual_device_id", _next_entry()),
    ):
        try:
            yield lambda: any(notes.races_found for notes in kept)
        except BaseException:
            tpu.reset_tpu_interpret_mode_state()
            dispatch.runtime_tokens.clear()
            raise


def _next_entry():
    copies = itertools.count()

    def entry(memory):
        others = memory.num_cores
        return others + next(copies) % (memory.vector_clock_size - others)

    return entry

"""What decoding some bytes may cost."""

import sys
import tracemalloc

from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.output_processor import ProcessorError, flush, step

# What docs/security.md promises.
MEMORY_PER_BYTE, MEMORY_PER_SLOT = 16, 4096


def cost(data, state):
    """Bytes, lines of Python and the error of a message that a worker sends.

    Bytes are the fewer of two runs: threads that other tests left may allocate during one.
    """
    runs = [_cost(data, state) for _ in range(2)]
    return min(peak for peak, _, _ in runs), *runs[0][1:]


def _cost(data, state):
    tracemalloc.start()
    lines, error = lines_of(
        lambda: flush(step(state, decode(data))[0]), MessageError, ProcessorError
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, lines, error


def lines_of(call, *refusals):
    """The lines of Python that a call runs, and of which of these errors it dies."""
    lines, error, before = 0, None, sys.gettrace()

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        call()
    except refusals as refusal:
        error = refusal
    finally:
        sys.settrace(before)
    return lines, error


def allowed_memory(data, state):
    return MEMORY_PER_BYTE * len(data) + MEMORY_PER_SLOT * state.num_slots + 50_000

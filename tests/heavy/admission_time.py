"""CPU time of the engine's thread for the admission of a prompt of 128,000 tokens.

    python -m tests.heavy.admission_time

Prints the least and the median of 25, for a new request and for one that goes on behind 50 tokens,
beside what making such a request takes, and ends with 1 where the least is over a millisecond. On a
machine with other work it measures that work's caches too: no test of the suite depends on it.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.linked_session import LONG, admission, linked_session, request

LIMIT = 1e-3  # seconds
TIMES = 25


def seconds_of(call):
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def seconds(emitted):
    """What making each request took, and what admitting it took."""
    with tempfile.TemporaryDirectory() as folder, linked_session(Path(folder)) as linked:
        session, client = linked
        making, taken = [], []
        for number in range(TIMES):
            made = []
            making.append(seconds_of(lambda n=number, m=made: m.append(request(str(n), LONG))))
            taken.append(seconds_of(admission(session, *made, emitted)))
        for _ in taken:  # they did travel
            ids = client.commands.get(timeout=60).request.prompt_token_ids
            assert len(ids) == LONG + emitted
    return making, taken


def main():
    slow = 0
    for emitted in (0, 50):
        making, taken = seconds(emitted)
        slow += min(taken) > LIMIT
        print(
            f"{LONG} tokens, {emitted} emitted: admitted in {1e3 * min(taken):.2f} ms at least, "
            f"median {1e3 * statistics.median(taken):.2f} (limit {1e3 * LIMIT:g}); "
            f"made in {1e3 * min(making):.2f} ms",
            flush=True,
        )
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())

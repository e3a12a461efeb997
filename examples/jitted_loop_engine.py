"""The reading side of `jitted_loop.py`, which starts it: `RING DIE_AFTER CLOSE_AFTER`."""

import os
import signal
import sys

import story
from own_loop import admit_all

from ipc import RingReader
from jax_specdec.engine import decode
from jax_specdec.engine import output_processor as processor


def main() -> None:
    name, die_after, close_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    state, num_tokens = admit_all(story.REQUESTS), 0
    with RingReader.attach(name) as reader:
        for message in reader:
            state, records = processor.step(state, decode(message.data))
            num_tokens += sum(record.num_tokens for record in records)
            if state.next_step == die_after:
                print(f"engine: {die_after} steps read, and killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if state.next_step == close_after:
                break
    print(f"engine: {state.next_step} steps read, {num_tokens} tokens delivered", flush=True)


if __name__ == "__main__":
    main()

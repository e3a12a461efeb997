"""The model's side of `own_loop.py`, which starts it: a Python loop around a model of your own.

It reads its requests from standard input, an `Admit` a line, and sends two messages a step into
the ring: the tokens that were emitted, and those that were drafted.
"""

import sys
from functools import partial

import jax
import numpy as np
import own_step
import story
import trigram

from ipc import RingWriter
from jax_specdec.device import check, options_of_requests, widths_of
from jax_specdec.engine import control


def main() -> None:
    commands = [control.from_bytes(bytes.fromhex(line)) for line in sys.stdin]
    asks = [command.request.params for command in commands]
    widths = widths_of(asks, story.VOCAB)  # static: one program for each kind of batch
    asked = options_of_requests(asks, widths, generation=[c.generation for c in commands])
    params = trigram.load()

    @jax.jit
    def step(params, loop, asked):
        model = partial(trigram.logits, params["model"])
        drafter = partial(trigram.logits, params["drafter"])
        return own_step.step(model, drafter, loop, asked, widths)

    loop = own_step.start([command.request for command in commands])
    running = True
    # Leaving the block ends the stream. If the engine dies, `send` raises PeerDied and ends us.
    with RingWriter.attach(sys.argv[1]) as ring:
        while running:
            loop, *messages = step(params, loop, asked)
            for words in messages:
                ring.send(check(np.asarray(words)))
            running = bool((loop.remaining > 0).any())


if __name__ == "__main__":
    main()

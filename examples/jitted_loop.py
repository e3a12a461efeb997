"""A decoding loop that is one jitted `lax.while_loop`, and publishes every step from inside.

    python examples/jitted_loop.py                                    the engine reads every step
    python examples/jitted_loop.py --die-after 3                      it is killed: the loop ends
    python examples/jitted_loop.py --die-after 3 --then go-on         ... or goes on in silence
    python examples/jitted_loop.py --close-after 3                    it closes the ring: the same
    python examples/jitted_loop.py --slot-bytes 100                   the sender's error is not lost

The loop never comes back to Python between two steps. An ordered callback sends the messages; its
answer tells the loop whether an engine still reads, so that a dead engine is an event, not a hang.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import own_step
import story
import trigram
from jax.experimental import io_callback

from ipc import PeerClosed, PeerDied, RingWriter
from jax_specdec.device import check, options_of_requests, widths_of

ENGINE = Path(__file__).parent / "jitted_loop_engine.py"


class Publisher:
    """The host's side of the callback: sends each step, and keeps the error that stopped it.

    It never raises: XLA would replace the exception by an error of its own and drop the loop's
    results. The caller looks at `error` when the loop is over.
    """

    def start(self, ring: RingWriter) -> None:
        """Send into `ring` from now on."""
        self.ring = ring
        self.error: BaseException | None = None
        self.sent = 0

    def __call__(self, *messages: jax.Array) -> np.bool_:
        """Send one step's messages, waiting while the ring is full. False: stop sending."""
        try:
            for words in messages:
                self.ring.send(check(np.asarray(words)))
            self.sent += 1
            return np.True_
        except BaseException as error:
            self.error = error
            return np.False_


def decode_all(publisher, widths, params, loop, asked, go_on):
    """Run `loop` to its end, or until the engine is gone unless `go_on`. Returns the loop."""
    model = partial(trigram.logits, params["model"])
    drafter = partial(trigram.logits, params["drafter"])

    def publish(*messages):
        answer = jax.ShapeDtypeStruct((), jnp.bool_)
        return io_callback(publisher, answer, *messages, ordered=True)

    def body(carry):
        loop, heard = carry
        loop, *messages = own_step.step(model, drafter, loop, asked, widths)
        return loop, jax.lax.cond(heard, publish, lambda *_: jnp.bool_(False), *messages)

    def unfinished(carry):
        loop, heard = carry
        return jnp.any(loop.remaining > 0) & (heard | go_on)

    return jax.lax.while_loop(unfinished, body, (loop, jnp.bool_(True)))[0]


@cache
def program(widths):
    """The publisher, and the loop as one compiled program that sends through it."""
    publisher = Publisher()
    return publisher, jax.jit(partial(decode_all, publisher, widths))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--die-after", default=0, type=int, help="steps until the engine dies")
    parser.add_argument("--close-after", default=0, type=int, help="steps until it closes the ring")
    parser.add_argument("--then", default="stop", choices=["stop", "go-on"])
    parser.add_argument("--slot-bytes", default=1 << 16, type=int, help="100 is too small")
    options = parser.parse_args(argv)
    asks = [request.params for request in story.REQUESTS]
    widths = widths_of(asks, story.VOCAB)
    publisher, run = program(widths)
    loop, asked = own_step.start(story.REQUESTS), options_of_requests(asks, widths)
    # Few slots: the loop is at most two steps ahead of the engine.
    with RingWriter.create(num_slots=4, slot_bytes=options.slot_bytes) as ring:
        engine = subprocess.Popen(
            [sys.executable, ENGINE, ring.name, str(options.die_after), str(options.close_after)]
        )
        ring.expect_peer(engine.pid)
        ring.wait_attached(timeout=60)
        publisher.start(ring)
        done = jax.block_until_ready(run(trigram.load(), loop, asked, options.then == "go-on"))
        jax.effects_barrier()  # the last callback has returned
    engine.wait()
    if isinstance(publisher.error, PeerDied | PeerClosed):
        print(f"the engine is gone: {publisher.error}")
    elif publisher.error is not None:
        raise publisher.error  # the sender's own: a bug, a failed check, a ring too small
    print(f"{int(done.number)} steps, {publisher.sent} published")
    for request, ids, length in zip(story.REQUESTS, done.tokens, done.lengths, strict=True):
        print(f"{request.id:8}  {story.decode(ids[:length])}")


if __name__ == "__main__":
    main()

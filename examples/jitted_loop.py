"""A decoding loop that is one jitted `lax.while_loop`, and publishes every step from inside.

    python examples/jitted_loop.py                                    the engine reads all of it
    python examples/jitted_loop.py --die-after 3                      it is killed: the loop ends
    python examples/jitted_loop.py --die-after 3 --then go-on         ... or goes on in silence
    python examples/jitted_loop.py --close-after 3                    it says goodbye: the same
    python examples/jitted_loop.py --slot-bytes 100                   an error of ours is not lost

The loop never comes back to Python between two steps. An ordered callback sends the messages; its
answer tells the loop whether anybody still listens, so that a dead engine is an event and no hang.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import own_step
import story
import trigram
from jax.experimental import io_callback

from ipc import PeerClosed, PeerDied, RingWriter
from jax_specdec.device import asked_of, check, widths_of

ENGINE = Path(__file__).parent / "jitted_loop_engine.py"


class Publisher:
    """The host's side of the callback: sends, and remembers why it no longer can.

    It never raises. XLA would turn an exception into an error of its own and give the loop's
    results up; so every one is kept in `error`, for the caller to look at when the loop is over.
    """

    def __init__(self, ring: RingWriter) -> None:
        self.ring = ring
        self.error: BaseException | None = None
        self.sent = 0

    def __call__(self, *messages: jax.Array) -> np.bool_:
        """Send one step's messages; whether to go on sending. Waits while the ring is full."""
        try:
            for words in messages:
                self.ring.send(check(np.asarray(words)))
            self.sent += 1
            return np.True_
        except BaseException as error:
            self.error = error
            return np.False_


def decode_all(publisher, params, loop, asked, widths, go_on):
    """Run `loop` to its end, or until nobody listens; jitted as a whole. Returns the loop."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--die-after", default=0, type=int, help="steps until the engine dies")
    parser.add_argument("--close-after", default=0, type=int, help="steps until it says goodbye")
    parser.add_argument("--then", default="stop", choices=["stop", "go-on"])
    parser.add_argument(
        "--slot-bytes", default=1 << 16, type=int, help="100: the ring is too small"
    )
    options = parser.parse_args()
    params = trigram.load()
    asks = [request.params for request in story.REQUESTS]
    widths = widths_of(asks, story.VOCAB)
    # Few slots: the loop is at most two steps ahead of the engine.
    with RingWriter.create(num_slots=4, slot_bytes=options.slot_bytes) as ring:
        engine = subprocess.Popen(
            [sys.executable, ENGINE, ring.name, str(options.die_after), str(options.close_after)]
        )
        ring.expect_peer(engine.pid)
        publisher = Publisher(ring)
        run = jax.jit(partial(decode_all, publisher), static_argnums=(3, 4))
        loop = own_step.start(story.REQUESTS)
        done = run(params, loop, asked_of(asks, widths), widths, options.then == "go-on")
        jax.block_until_ready(done)
        jax.effects_barrier()  # the last callback has returned
        if isinstance(publisher.error, PeerDied | PeerClosed):
            print(f"nobody listens any more: {publisher.error}")
        elif publisher.error is not None:
            raise publisher.error  # ours: a bug, a failed check, a ring too small
    engine.wait()
    print(f"{int(done.number)} steps, {publisher.sent} published")
    for request, ids, length in zip(story.REQUESTS, done.tokens, done.lengths, strict=True):
        print(f"{request.id:8}  {story.decode(ids[:length])}")


if __name__ == "__main__":
    main()

"""The worker of the examples' story without a model: it makes its messages on the host, in no time.

It stands in for `own_loop_worker.py` where a test is about the side that reads. Each request gets
its own prompt's last character again and again, two tokens a step, up to its limit.
"""

import sys

from ipc import RingWriter
from ipc.wire import Kind
from jax_specdec.engine import SlotContents, control, encode


def main() -> None:
    commands = [control.from_bytes(bytes.fromhex(line)) for line in sys.stdin]
    left = [command.request.params.max_tokens for command in commands]
    step = 0
    with RingWriter.attach(sys.argv[1]) as ring:
        while any(left):
            slots = [contents(*each) for each in zip(commands, left, strict=True)]
            left = [max(0, remaining - 2) for remaining in left]
            ring.send(encode(Kind.TARGET, step, slots, running=any(left)))
            step += 1


def contents(command: control.Admit, left: int) -> SlotContents:
    """What one slot sends: two tokens at most, with the logprobs that were asked for."""
    params, n = command.request.params, min(2, left)
    k = -1 if params.logprobs is None else params.logprobs
    rows = n if k >= 0 else 0
    return SlotContents(
        generation=command.generation,
        num_drafts=max(0, n - 1),
        columns=k + 1,
        token_ids=[command.request.prompt_token_ids[-1]] * n,
        token_ranks=[1] * rows,
        logprobs=[[-0.5] * (k + 1)] * rows,
        topk_ids=[list(range(k))] * rows,
    )


if __name__ == "__main__":
    main()

"""The worker of the examples' story without a model: it makes its messages on the host, in no time.

It stands in for `own_loop_worker.py` where a test is about the side that reads. Each request gets
its own prompt's last character again and again, two tokens a step, up to its limit.
"""

import sys

from ipc import RingWriter
from ipc.wire import Kind
from jax_specdec.engine import SlotContents, control, encode


def main() -> None:
    commands = list(control.read_commands(sys.stdin.buffer))
    left = [command.request.params.max_tokens for command in commands]
    step = 0
    with RingWriter.attach(sys.argv[1]) as ring:
        while any(left):
            slots = []
            for command, remaining in zip(commands, left, strict=True):
                slots.append(contents(command, min(2, remaining)))
            left = [max(0, remaining - 2) for remaining in left]
            ring.send(encode(Kind.TARGET, step, slots, running=any(left)))
            step += 1


def contents(command: control.Admit, num_tokens: int) -> SlotContents:
    """What one slot sends: `num_tokens` tokens with the logprobs that were asked for."""
    params = command.request.params
    token_ids = [command.request.prompt_token_ids[-1]] * num_tokens
    columns = 0 if params.logprobs is None else params.logprobs + 1
    rows = num_tokens if columns else 0
    return SlotContents(
        generation=command.generation,
        num_drafts=max(0, num_tokens - 1),
        columns=columns,
        token_ids=token_ids,
        token_ranks=[1] * rows,
        logprobs=[[-0.5] * columns] * rows,
        topk_ids=[list(range(columns - 1))] * rows,
    )


if __name__ == "__main__":
    main()

"""Mutated messages through the decoder: `python -m tests.heavy.mutated_messages [--count N]`.

The decoder must refuse a mutated message with the project's own error, or decode it to exactly what
its bytes say: encoding it again gives the same bytes. It must not crash, hang or grow. CI runs the
same function with fewer messages (tests/jax_specdec/records/test_mutated_messages.py).
"""

import argparse
import random
import resource
import sys
from typing import NamedTuple

import numpy as np

from ipc import wire
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.records.decode import Message, MessageError, decode
from jax_specdec.records.encode import SlotContents, encode
from tests.support.random_kept import random_kept


class Result(NamedTuple):
    """What happened to the mutated messages, and how much the process grew."""

    refused: int  # messages that raised MessageError
    decoded: int
    unchanged: int  # of those: their mutations cancelled each other
    growth_kib: int  # of the largest resident size after the first tenth


def encoded_again(message: Message) -> bytes:
    """Encodes the values of a decoded message."""
    slots = []
    for index in range(message.num_slots):
        view = message.slot(index)
        slots.append(
            SlotContents(
                state=view.state,
                generation=view.generation,
                mode=LogprobsMode(int(message.mode[index])),
                num_drafts=int(message.num_drafts[index]),
                columns=int(message.columns[index]),
                num_chosen=int(message.num_chosen[index]),
                token_ids=view.token_ids,
                token_ranks=view.token_ranks,
                logprobs=view.logprobs,
                topk_ids=view.topk_ids,
                kept=view.kept,
            )
        )
    return encode(
        message.kind,
        message.step,
        slots,
        max_num_logprobs=message.max_num_logprobs,
        running=message.running,
        weights_version=message.weights_version,
        draft_follows=message.draft_follows,
        process_rank=message.process_rank,
    )


def good_message(rng: random.Random) -> bytes:
    """Returns a valid message of up to five slots with random counts."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    slots = []
    kind = rng.choice([Kind.TARGET, Kind.TARGET, Kind.DRAFT])
    for _ in range(rng.randint(0, 5)):
        state = rng.choice([SlotState.TOKENS, SlotState.TOKENS, *SlotState])
        drafts, columns = rng.randint(0, 4), rng.choice([0, 1, 3, 21])
        if kind == Kind.DRAFT:
            state, tokens = SlotState.TOKENS, drafts
        elif state == SlotState.TOKENS:
            tokens = rng.randint(1, drafts + 1)
        else:
            tokens = drafts + 1 if state == SlotState.PREFILL_FIRST_TOKEN else 0
        rows = min(tokens, 1) if state == SlotState.PREFILL_FIRST_TOKEN else tokens
        kept = None
        if kind == Kind.TARGET and rng.random() < 0.4:
            sizes = [rng.choice([1, 2, 7, wire.KEPT_ALL, wire.KEPT_MANY]) for _ in range(rows)]
            kept = random_kept(rng, sizes, 1000)
        rows, chosen = (rows, rng.randint(0, 2)) if columns else (0, 0)
        slots.append(
            SlotContents(
                state=state,
                generation=rng.getrandbits(32),
                mode=rng.choice(list(LogprobsMode)),
                num_drafts=drafts,
                columns=columns,
                num_chosen=chosen,
                token_ids=numbers.integers(0, 1000, tokens),
                token_ranks=numbers.integers(0, 1000, rows),
                logprobs=numbers.standard_normal((rows, columns + chosen)),
                topk_ids=numbers.integers(-1, 1000, rows * max(columns - 1, 0)),
                kept=kept,
            )
        )
    return encode(kind, rng.getrandbits(64), slots, running=rng.random() < 0.5,
                  weights_version=rng.getrandbits(32))  # fmt: skip


def mutated(rng: random.Random, good: bytes) -> bytes:
    """Returns `good` with one to three changes: to bits, bytes, words, its end or its length."""
    data = bytearray(good)
    for _ in range(rng.randint(1, 3)):
        # Counts and offsets are at the front: change them more often than the payload.
        reach = min(len(data), 4 * (wire.HEADER_WORDS + 5 * wire.SLOT_WORDS))
        at = rng.randrange(reach if rng.random() < 0.8 else len(data))
        how = rng.randrange(6)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at] = rng.choice([0, 1, 127, 128, 255])
        elif how == 2:
            value = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.getrandbits(32)])
            data[at & ~3 : (at & ~3) + 4] = value.to_bytes(4, "little")
        elif how == 3:
            del data[at:]
        elif how == 4:
            data += rng.randbytes(rng.choice([1, 4, 64]))
        else:
            data[at:at] = data[at : at + rng.choice([4, 16])]
        if not data:
            break
    return bytes(data)


def run(count: int, seed: int = 0) -> Result:
    """Puts `count` mutated messages through the decoder.

    Raises AssertionError if a message was decoded to anything but what its bytes say. Any other
    exception is a fault of the decoder.
    """
    rng = random.Random(seed)
    refused = decoded = unchanged = 0
    before = 0
    for index in range(count):
        if index % 50 == 0:
            good = good_message(rng)
        if index == count // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = mutated(rng, good)
        try:
            message = decode(data)
        except MessageError:
            refused += 1
            continue
        assert encoded_again(message) == data, f"seed {seed}, message {index}: {data.hex()}"
        decoded += 1
        unchanged += data == good
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Result(refused, decoded, unchanged, growth)


def main() -> int:
    """Runs the check with the numbers of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"RUN: {options.count} mutated messages, seed {options.seed}")
    print(run(options.count, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())

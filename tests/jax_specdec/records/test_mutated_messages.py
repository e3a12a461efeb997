"""Mutated messages through the decoder.

It refuses a mutated message with the project's own error, or decodes it to exactly what its bytes
say: encoding it again gives the same bytes. It does not crash, hang or grow.
"""

import functools
import random
import resource

import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind, LogprobsMode
from jax_specdec.records import decode as decoder
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode
from tests.support.random_messages import random_draft_slot, random_params, random_target_slot

COUNTS = ("num_drafts", "columns", "values", "num_chosen")
VALUES = ("state", "generation", "token_ids", "token_ranks", "logprobs", "topk_ids", "kept")
HEADER = ("max_num_logprobs", "running", "weights_version", "draft_follows", "process_rank",
          "digest")  # fmt: skip


def encoded_again(message):
    """Encodes the values of a decoded message."""
    slots = []
    for index in range(message.num_slots):
        fields = {name: getattr(message.slot(index), name) for name in VALUES}
        fields |= {name: int(getattr(message, name)[index]) for name in COUNTS}
        rows = message.slot(index)
        fields["logprobs"] = np.concatenate([rows.logprobs, rows.row_values], axis=1)
        slots.append(SlotContents(mode=LogprobsMode(message.mode[index]), **fields))
    header = {name: getattr(message, name) for name in HEADER}
    return encode(message.kind, message.step, slots, **header)


def good_message(rng):
    """A valid message of up to five slots with random counts."""
    kind = rng.choice([Kind.TARGET, Kind.TARGET, Kind.DRAFT])
    make = random_draft_slot
    if kind is Kind.TARGET:
        make = functools.partial(random_target_slot, fresh=True)
    slots = [make(rng, random_params(rng), rng.getrandbits(32)) for _ in range(rng.randint(0, 5))]
    return encode(kind, rng.getrandbits(64), slots, running=rng.random() < 0.5,
                  weights_version=rng.getrandbits(32))  # fmt: skip


def mutated(rng, good):
    """`good` with one to three changes: to bits, bytes, words, its end or its length."""
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


def run(count):
    """How many mutated messages were refused, decoded to something else, and the growth in KiB."""
    rng = random.Random(0)
    refused = changed = before = 0
    for index in range(count):
        if index % 50 == 0:
            good = good_message(rng)
            assert encoded_again(decode(good)) == good
        if index == count // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = mutated(rng, good)
        try:
            message = decode(data)
        except MessageError:
            refused += 1
            continue
        assert encoded_again(message) == data, f"message {index}: {data.hex()}"
        changed += data != good
    return refused, changed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("count", [30_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_mutated_messages_are_decoded_equal_or_refused(count):
    refused, changed, growth = run(count)
    assert refused > count / 2
    assert changed > count / 30
    assert growth < 20_000


def test_a_decoder_that_skips_its_checks_is_noticed(monkeypatch):
    monkeypatch.setattr(decoder, "UNUSED_BITS", ())
    monkeypatch.setattr(decoder, "checked_header", decoder.checked_header.__wrapped__)
    with pytest.raises(AssertionError, match="message "):
        run(30_000)

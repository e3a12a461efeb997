"""The packer on the device against the host encoder, its guards and its checks."""

import functools
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import wire
from ipc.wire import DeviceCheck, Kind
from jax_specdec.device.messages.pack import (
    KeptRows,
    PackedSlots,
    SentRows,
    Stamp,
    pack,
    select_rows,
)
from jax_specdec.device.worker import outgoing
from jax_specdec.device.worker.outgoing import DeviceCheckError
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.requests import ROW_VALUES
from pallas_kernels import TopkLogprobs
from tests.support import quick_compile
from tests.support.random_kept import random_kept
from tests.support.random_messages import VOCABULARY, random_params, random_target_slot

B, S, K, C, V, M = 4, 5, 3, 2, 1000, VOCABULARY


select = quick_compile.jit(select_rows, static_argnums=1)


@functools.partial(quick_compile.jit, static_argnames=("kind", "num_words", "rank"))
def packed(slots, token_ids, rows, found, step, process_rank=None, *, flags=(True, False),
           kind=Kind.TARGET, num_words=512, kept=None, rank=0):  # fmt: skip
    """The words of a message from a process rank, traced or static."""
    stamp = Stamp(step, rank if process_rank is None else process_rank)
    return pack(
        slots, token_ids, rows, found, stamp, kind=kind, running=flags[0], draft_follows=flags[1],
        vocab_size=V, num_words=num_words, kept=kept,
    )  # fmt: skip


def with_rows(slots, token_ids, found, order=None):
    """What `packed` takes: the kernel's rows in the order of the slots, or in another one."""
    rows = select(slots.num_rows, token_ids.shape[1])
    if order is not None:
        whole = np.concatenate([order, np.arange(len(order), len(rows.flat))])
        found = jax.tree.map(lambda x: x[whole], found)
        rows = SentRows(rows.flat[whole], rows.num)
    return slots, token_ids, rows, found


NUMBERS = dict.fromkeys(PackedSlots._fields, jnp.int32) | {"generation": jnp.uint32}
EDGES = (0, 1, 77, 2**31 - 1, 2**31, 2**32 - 1)  # of words


def step_of(contents):
    """Slot fields, ids and kernel results that mean these contents; what they lack is random."""
    random, row = np.random.default_rng(0), 0
    ids, ranks = random.integers(0, V, (B, S), dtype=np.int32), np.zeros(B * S, np.int32)
    top = random.integers(-1, V, (B * S, K + 1), dtype=np.int32)
    logprobs, extra = random.normal(size=(B * S, K + 1)), random.normal(size=(B * S, C))
    of_rows = random.normal(size=(len(wire.RowValue), B * S))
    for b, one in enumerate(contents):
        ids[b, : len(one.token_ids)] = one.token_ids
        for values, rank, best in zip(one.logprobs, one.token_ranks, one.topk_ids, strict=True):
            logprobs[row, : one.columns] = values[: one.columns]
            extra[row, : one.num_chosen] = values[one.columns :][: one.num_chosen]
            last = list(values[one.columns + one.num_chosen :])
            for value in wire.RowValue:
                if one.values >> value & 1:
                    of_rows[value, row] = last.pop(0)
            ranks[row], top[row, 1 : one.columns] = rank, best
            row += 1
    fields = {
        name: [int(getattr(one, name, None) or 0) for one in contents]
        for name in NUMBERS
        if name != "kept"
    }
    fields["num_tokens"] = [len(one.token_ids) for one in contents]
    fields["num_rows"] = [len(one.token_ranks) for one in contents]
    fields["kept"] = [one.kept is not None for one in contents]
    slots = {name: jnp.asarray(values, NUMBERS[name]) for name, values in fields.items()}
    found = top, jnp.float32(logprobs), ranks, jnp.float32(extra)
    named = {name: jnp.float32(of_rows[value]) for name, value in ROW_VALUES.items()}
    halves = of_rows[[wire.RowValue.DIGEST_LOW, wire.RowValue.DIGEST_HIGH]]
    named["digests"] = jnp.asarray(np.float32(halves).T.copy().view(np.uint32))
    return PackedSlots(**slots), jnp.asarray(ids), TopkLogprobs(*map(jnp.asarray, found), **named)


def kept_rows(contents):
    """The kept sets of these contents, as the packer takes them."""
    sets = KeptSets.joined([slot.kept for slot in contents if slot.kept is not None])
    rows = np.arange(B * S)
    padded = sets.padded(np.where(rows < len(sets), rows, -1), width=M)
    return KeptRows(jnp.int32(len(sets)), jax.tree.map(jnp.asarray, padded))


@given(seed=st.integers(0, 2**32 - 1))
def test_the_packed_words_are_the_host_encoders(seed):
    """Whatever the kernel's K, and in whatever order its rows come."""
    rng = Random(seed)
    drawn = [(random_params(rng), rng.choice(EDGES)) for _ in range(B)]
    contents = [random_target_slot(rng, *one, fresh=True) for one in drawn]
    slots, ids, found = step_of(contents)
    low, high, process_rank = (rng.choice(EDGES) for _ in range(3))
    flags = rng.random() < 0.5, rng.random() < 0.5
    order = np.random.default_rng(seed).permutation(int(slots.num_rows.sum()))
    said = {"kept": kept_rows(contents)} if slots.kept.any() else {}
    given = *with_rows(slots, ids, found, order), np.uint32([low, high]), np.uint32(process_rank)
    words = np.asarray(packed(*given, flags=flags, **said))
    expected = encode(
        Kind.TARGET, low + (high << 32), contents, running=flags[0], draft_follows=flags[1],
        process_rank=process_rank,
    )  # fmt: skip
    used = int(wire.HEADER["num_words"].get(words))
    assert words[:used].tobytes() == expected
    assert not words[used:].any()
    decode(words[:used])


def simple_step(ids=None, **changes):
    """One good step; `changes` replace slot fields, and `ids` the id of a slot's place."""
    one = SlotContents(num_drafts=2, columns=2, num_chosen=1, token_ids=(3, 4), token_ranks=(1, 2),
                       logprobs=np.zeros((2, 3)), topk_ids=((5,), (6,)))  # fmt: skip
    slots, token_ids, found = step_of([one] * B)
    slots = slots._replace(**{k: jnp.asarray(v) for k, v in changes.items()})
    return slots, token_ids if ids is None else token_ids.at[*ids[0]].set(ids[1]), found


def run(*step, number=(0, 0), **options):
    return np.asarray(packed(*with_rows(*step), np.uint32(number), **options))


def failed(words):
    """The checks of a message that failed; its first word is there whatever they are."""
    assert words[0] == wire.MAGIC << 16 | wire.VERSION
    checks = int(wire.HEADER["error_checks"].get(words))
    assert wire.HEADER["error"].get(words) == (checks > 0)
    return {check for check in DeviceCheck if checks >> check & 1}


COUNTS, FIELDS, ID = DeviceCheck.SLOT_COUNTS, DeviceCheck.SLOT_FIELDS, DeviceCheck.TOKEN_ID


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        (None, {}),
        (COUNTS, {"num_tokens": [2, S + 1, 2, 2]}),
        (COUNTS, {"num_tokens": [2, -1, 2, 2]}),
        (COUNTS, {"num_rows": [3, 2, 2, 2]}),
        (COUNTS, {"num_rows": [-(2**31), 2, 2, 2]}),
        (COUNTS, {"num_drafts": [2, 2, 2, S]}),
        (COUNTS, {"columns": [2, 0, 2, 2]}),
        (FIELDS, {"columns": [2, K + 2, 2, 2]}),
        (FIELDS, {"columns": [2**31 - 1, 2, 2, 2]}),
        (FIELDS, {"num_chosen": [1, 1, C + 1, 1]}),
        (FIELDS, {"state": [0, 6, 0, 0]}),
        (FIELDS, {"mode": [0, 0, 3, 0]}),
        (FIELDS, {"kept": [0, 0, 0, 1]}),
        *((ID, {"ids": ((1, 1), wrong)}) for wrong in (-1, V, 2**31 - 1)),
        (None, {"ids": ((1, 2), V)}),  # beyond the slot's tokens: it is not sent
    ],
)
def test_a_wrong_value_sets_its_bit_and_cannot_reach_the_header(check, changes):
    words = run(*simple_step(**changes), number=(7, 3))
    assert failed(words) == ({check} if check is not None else set())
    assert wire.HEADER["kind"].get(words) == Kind.TARGET
    assert wire.HEADER["max_num_logprobs"].get(words) <= K
    if check is not None:
        with pytest.raises(MessageError, match=check.name):
            decode(words[: int(wire.HEADER["num_words"].get(words))])
        with pytest.raises(DeviceCheckError, match=rf"step {3 * 2**32 + 7} failed .*{check.name}"):
            outgoing.check(words)


def with_value(kept, name, value):
    """The kept sets with another count of row 0, or another first id."""
    changed = getattr(kept.sets, name).at[(0,) * getattr(kept.sets, name).ndim].set(value)
    return kept._replace(sets=kept.sets._replace(**{name: changed}))


def test_wrong_kept_sets_set_their_bit():
    kept = random_kept(Random(2), [2, M], V)
    contents = [SlotContents(num_drafts=2, token_ids=(3, 4), kept=kept)] * B
    step, good = step_of(contents), kept_rows(contents)
    single = with_value(good, "counts", 1)
    wrong = [good._replace(num=good.num + 1), good._replace(num=good.num - 1)]
    wrong += [with_value(good, "counts", count) for count in (0, -3, M + 1)]
    wrong += [with_value(single, "token_ids", one) for one in (V, -1)]
    found = [failed(run(*step, kept=one)) for one in (good, *wrong)]
    # A count of more ids than there are would send what pads them.
    assert found[:6] == [set(), *4 * [{COUNTS}], {COUNTS, ID}]
    assert all(ID in one for one in found[6:])


def test_a_message_longer_than_its_bucket_sets_its_bit():
    step = simple_step()
    needed = int(wire.HEADER["num_words"].get(run(*step)))
    assert failed(run(*step, num_words=needed)) == set()
    assert failed(run(*step, num_words=needed - 1)) == {DeviceCheck.WORDS}


def one_slot(num_positions=1, k=0, num_extra=0, kind=Kind.TARGET, rank=0, num_words=None, **fields):
    """One slot's message at any size: one token without logprobs unless `fields` say more."""
    fields = dict.fromkeys(PackedSlots._fields, 0) | {"num_tokens": 1, "generation": 1} | fields
    slots = PackedSlots(**{name: jnp.full(1, x, NUMBERS[name]) for name, x in fields.items()})
    found = TopkLogprobs(
        jnp.zeros((num_positions, k + 1), jnp.int32),
        jnp.zeros((num_positions, k + 1)),
        jnp.ones(num_positions, jnp.int32),
        jnp.zeros((num_positions, num_extra)),
    )
    num_words = num_words or 32 + num_positions + 2 * k + num_extra
    ids = jnp.zeros((1, num_positions), jnp.int32)
    return run(slots, ids, found, kind=kind, num_words=num_words, rank=rank)


MOST = 65535


@pytest.mark.parametrize(
    ("field", "check", "shape"),
    [
        ("num_tokens", COUNTS, {"num_positions": MOST}),
        ("num_drafts", COUNTS, {"num_positions": MOST, "kind": Kind.DRAFT}),
        ("columns", FIELDS, {"k": MOST, "num_rows": 1}),
        ("num_chosen", FIELDS, {"num_extra": MOST + 1}),
    ],
)
def test_a_count_beyond_its_field_sets_its_bit(field, check, shape):
    most = wire.SLOT[field].maximum
    words = one_slot(**shape, **{field: most})
    assert failed(words) == set()
    assert wire.SLOT[field].get(words[wire.HEADER_WORDS :]) == most
    assert check in failed(one_slot(**shape, **{field: most + 1}))


def test_values_of_rows_that_were_not_made_set_the_bit():
    assert failed(run(*simple_step(values=[1, 2, 3, 0]))) == set()
    assert failed(run(*simple_step(values=[16, 0, 0, 0]))) == {DeviceCheck.SLOT_FIELDS}
    slots, ids, found = simple_step(values=[2, 0, 0, 0])
    without = found._replace(log_sum_exp=None)
    assert failed(run(slots, ids, without)) == {DeviceCheck.SLOT_FIELDS}


def test_all_rows_of_the_widest_slot_are_sent():
    words = one_slot(MOST, columns=1, num_tokens=MOST, num_rows=MOST, num_words=32 + 3 * MOST)
    assert failed(words) == set()
    assert wire.SLOT["num_rows"].get(words[wire.HEADER_WORDS :]) == MOST


def test_what_no_message_has_room_for_is_refused_in_tracing():
    for wrong, message in (
        ({"num_positions": MOST + 1}, r"num_positions = 65536 .*0 to 65535"),
        ({"rank": 2**32}, "process_rank = 4294967296"),
        ({"rank": -1}, "process_rank = -1"),
        ({"kind": 256}, "kind = 256"),
        ({"k": MOST + 1}, "max_num_logprobs = 65536"),
        ({"num_words": 12}, "header and 1 slot: 13 words"),
    ):
        with pytest.raises(wire.WireError, match=message):
            one_slot(**wrong)
    words = one_slot(k=MOST, kind=255, rank=2**32 - 1)
    assert wire.HEADER["kind"].get(words) == 255
    assert wire.HEADER["process_rank"].get(words) == 2**32 - 1

"""The packer on the device against the host encoder, its guards and its checks."""

import functools
from random import Random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import wire
from ipc.wire import DeviceCheck, Kind, LogprobsMode, SlotState
from jax_specdec.device.messages.pack import KeptRows, Rows, SlotFields, Stamp, pack, select_rows
from jax_specdec.device.worker.outgoing import DeviceCheckError, check
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode
from pallas_kernels import TopkLogprobs
from pallas_kernels.contract.rows import Outputs, skipped_rows
from tests.support import quick_compile
from tests.support.random_kept import random_counts, random_kept

pytestmark = pytest.mark.fast

B, S, K, C, V, M = 4, 3, 5, 2, 1000, 6


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


STEP = np.zeros(2, np.uint32)


def with_rows(slots, token_ids, found, order=None):
    """What `packed` takes: the kernel's rows in the order of the slots, or in another one."""
    rows = select(slots.num_rows, token_ids.shape[1])
    if order is not None:
        whole = np.concatenate([order, np.arange(len(order), len(rows.flat))])
        found = jax.tree.map(lambda x: x[whole], found)
        rows = Rows(rows.flat[whole], rows.num)
    return slots, token_ids, rows, found


NUMBERS = dict.fromkeys(SlotFields._fields, jnp.int32) | {"generation": jnp.uint32}
EDGES = (0, 1, 77, 2**31 - 1, 2**31, 2**32 - 1)  # of words


def random_step(seed, **fixed):
    """Slot fields, ids and kernel results of a random step, and the contents that they mean."""
    random, rng = np.random.default_rng(seed), Random(seed)
    most = {"columns": K + 2, "chosen": C + 1, "drafts": S, "cut": S, "kept": 2}
    drawn = {name: random.integers(0, n, B).tolist() for name, n in most.items()}
    drawn["states"] = [rng.choice(list(SlotState)) for _ in range(B)]
    drawn["generations"] = [rng.choice(EDGES) for _ in range(B)]
    one = SimpleNamespace(**drawn | {name: [value] * B for name, value in fixed.items()})
    ids = random.integers(0, V, (B, S), dtype=np.int32)
    empty = skipped_rows(B * S, Outputs(K), C)
    found = TopkLogprobs(*(None if x is None else np.array(x) for x in empty))
    contents, row = [], 0
    for b, state in enumerate(one.states):
        tokens, emitted = 0, 0
        if state == SlotState.TOKENS:
            tokens = emitted = 1 + min(one.drafts[b], one.cut[b])
        elif state == SlotState.PREFILL_FIRST_TOKEN:
            tokens, emitted = 1 + one.drafts[b], 1
        n = emitted if one.columns[b] else 0
        rows, width = slice(row, row + n), one.chosen[b] if one.columns[b] else 0
        found.logprobs[rows] = random.standard_normal((n, K + 1))
        found.extra_logprobs[rows] = random.standard_normal((n, C))
        found.token_ranks[rows] = random.integers(0, V, n)
        found.token_ids[rows] = random.integers(-1, V, (n, K + 1))
        columns = found.logprobs[rows, : one.columns[b]], found.extra_logprobs[rows, :width]
        sets = random_kept(rng, random_counts(rng, emitted, M), V) if one.kept[b] else None
        contents.append(
            SlotContents(
                state=state, generation=one.generations[b], mode=LogprobsMode(b % 3),
                num_drafts=one.drafts[b], columns=one.columns[b], num_chosen=width,
                token_ids=ids[b, :tokens], token_ranks=found.token_ranks[rows],
                logprobs=np.concatenate(columns, axis=1),
                topk_ids=found.token_ids[rows, 1 : max(one.columns[b], 1)], kept=sets,
            )
        )  # fmt: skip
        row += n
    fields = {
        name: [int(getattr(c, name, None) or 0) for c in contents]
        for name in NUMBERS
        if name != "kept"
    }
    fields["num_tokens"] = [len(c.token_ids) for c in contents]
    fields["num_rows"], fields["kept"] = [len(c.token_ranks) for c in contents], one.kept
    slots = {name: jnp.asarray(values, NUMBERS[name]) for name, values in fields.items()}
    return SlotFields(**slots), jnp.asarray(ids), jax.tree.map(jnp.asarray, found), contents


def kept_rows(contents):
    """The kept sets of these contents, as the packer takes them."""
    sets = KeptSets.joined([slot.kept for slot in contents if slot.kept is not None])
    rows = np.arange(B * S)
    padded = sets.padded(np.where(rows < len(sets), rows, -1), width=M)
    return KeptRows(jnp.int32(len(sets)), jax.tree.map(jnp.asarray, padded))


@given(seed=st.integers(0, 2**32 - 1))
def test_the_packed_words_are_the_host_encoders(seed):
    """Whatever the kernel's K, and in whatever order its rows come."""
    slots, ids, found, contents = random_step(seed)
    rng = Random(seed)
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


def simple_step(**changes):
    """One good step; `changes` replace slot fields."""
    slots, ids, found, _ = random_step(1, states=SlotState.TOKENS, columns=2, chosen=1, drafts=2,
                                       cut=1, kept=0)  # fmt: skip
    return slots._replace(**{k: jnp.asarray(v) for k, v in changes.items()}), ids, found


def run(*step, **options):
    return np.asarray(packed(*with_rows(*step), STEP, **options))


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        (DeviceCheck.SLOT_COUNTS, {"num_tokens": [2, S + 1, 2, 2]}),
        (DeviceCheck.SLOT_COUNTS, {"num_tokens": [2, -1, 2, 2]}),
        (DeviceCheck.SLOT_COUNTS, {"num_rows": [3, 2, 2, 2]}),
        (DeviceCheck.SLOT_COUNTS, {"num_rows": [-(2**31), 2, 2, 2]}),
        (DeviceCheck.SLOT_COUNTS, {"num_drafts": [2, 2, 2, S]}),
        (DeviceCheck.SLOT_COUNTS, {"columns": [2, 0, 2, 2]}),
        (DeviceCheck.SLOT_FIELDS, {"columns": [2, K + 2, 2, 2]}),
        (DeviceCheck.SLOT_FIELDS, {"columns": [2**31 - 1, 2, 2, 2]}),
        (DeviceCheck.SLOT_FIELDS, {"num_chosen": [1, 1, C + 1, 1]}),
        (DeviceCheck.SLOT_FIELDS, {"state": [0, 6, 0, 0]}),
        (DeviceCheck.SLOT_FIELDS, {"mode": [0, 0, 3, 0]}),
        (DeviceCheck.SLOT_FIELDS, {"kept": [0, 0, 0, 1]}),
    ],
)
def test_a_wrong_count_sets_its_bit_and_cannot_reach_the_header(check, changes):
    good = run(*simple_step())
    assert wire.HEADER["error"].get(good) == 0
    words = run(*simple_step(**changes))
    assert wire.HEADER["error"].get(words) == 1
    assert wire.HEADER["error_checks"].get(words) >> check & 1
    assert words[0] == good[0]
    assert wire.HEADER["kind"].get(words) == Kind.TARGET
    assert wire.HEADER["max_num_logprobs"].get(words) <= K
    with pytest.raises(MessageError, match=check.name):
        decode(words[: int(wire.HEADER["num_words"].get(words))])


@pytest.mark.parametrize("wrong", [-1, V, 2**31 - 1])
def test_an_id_outside_the_vocabulary_sets_its_bit(wrong):
    slots, ids, found = simple_step()
    words = run(slots, ids.at[1, 1].set(wrong), found)
    assert wire.HEADER["error_checks"].get(words) == 1 << DeviceCheck.TOKEN_ID
    # What is beyond the slot's tokens is not sent.
    words = run(slots, ids.at[1, 2].set(wrong), found)
    assert wire.HEADER["error"].get(words) == 0


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (DeviceCheck.SLOT_COUNTS, lambda x: x._replace(num=x.num + 1)),
        (DeviceCheck.SLOT_COUNTS, lambda x: x._replace(num=x.num - 1)),
        (DeviceCheck.SLOT_COUNTS, lambda x: with_value(x, "counts", 0)),
        (DeviceCheck.SLOT_COUNTS, lambda x: with_value(x, "counts", -3)),
        (DeviceCheck.SLOT_COUNTS, lambda x: with_value(x, "counts", M + 1)),
        (DeviceCheck.TOKEN_ID, lambda x: with_value(with_value(x, "counts", 1), "token_ids", V)),
        (DeviceCheck.TOKEN_ID, lambda x: with_value(with_value(x, "counts", 1), "token_ids", -1)),
    ],
)
def test_wrong_kept_sets_set_their_bit(check, change):
    *step, contents = random_step(2, states=SlotState.TOKENS, columns=0, chosen=0, drafts=2, cut=1,
                                  kept=1)  # fmt: skip
    good = kept_rows(contents)
    assert wire.HEADER["error"].get(run(*step, kept=good)) == 0
    words = run(*step, kept=change(good))
    assert wire.HEADER["error_checks"].get(words) >> check & 1
    assert words[0] == wire.MAGIC << 16 | wire.VERSION


def with_value(kept, name, value):
    """The kept sets with another count of row 0, or another first id."""
    changed = getattr(kept.sets, name).at[(0,) * getattr(kept.sets, name).ndim].set(value)
    return kept._replace(sets=kept.sets._replace(**{name: changed}))


def test_a_failed_check_names_the_whole_number_of_its_step():
    given = with_rows(*simple_step(num_tokens=[2, -1, 2, 2]))
    words = np.asarray(packed(*given, np.array([7, 3], np.uint32)))
    with pytest.raises(DeviceCheckError, match=rf"step {3 * 2**32 + 7} failed .*SLOT_COUNTS"):
        check(words)


def test_a_message_longer_than_its_bucket_sets_its_bit():
    step = simple_step()
    needed = int(wire.HEADER["num_words"].get(run(*step)))
    assert wire.HEADER["error"].get(run(*step, num_words=needed)) == 0
    words = run(*step, num_words=needed - 1)
    assert wire.HEADER["error_checks"].get(words) == 1 << DeviceCheck.WORDS


def one_slot(num_positions=1, k=0, num_extra=0, kind=Kind.TARGET, rank=0, num_words=None, **fields):
    """One slot's message at any size: one token without logprobs unless `fields` say more."""
    fields = {"num_tokens": 1} | fields
    slots = SlotFields(
        *(jnp.full(1, fields.pop(name, 0), jnp.int32) for name in SlotFields._fields[:-1]),
        generation=jnp.ones(1, jnp.uint32),
    )
    assert not fields
    found = TopkLogprobs(
        jnp.zeros((num_positions, k + 1), jnp.int32),
        jnp.zeros((num_positions, k + 1)),
        jnp.ones(num_positions, jnp.int32),
        jnp.zeros((num_positions, num_extra)),
    )
    num_words = num_words or 32 + num_positions + 2 * k + num_extra
    given = with_rows(slots, jnp.zeros((1, num_positions), jnp.int32), found)
    return np.asarray(packed(*given, STEP, kind=kind, num_words=num_words, rank=rank))


@pytest.mark.parametrize(
    ("field", "check", "shape"),
    [
        ("num_tokens", DeviceCheck.SLOT_COUNTS, {"num_positions": 65535}),
        ("num_drafts", DeviceCheck.SLOT_COUNTS, {"num_positions": 65535, "kind": Kind.DRAFT}),
        ("columns", DeviceCheck.SLOT_FIELDS, {"k": 65535, "num_rows": 1}),
        ("num_chosen", DeviceCheck.SLOT_FIELDS, {"num_extra": 65536}),
    ],
)
def test_a_count_beyond_its_field_sets_its_bit(field, check, shape):
    most = 65535
    words = one_slot(**shape, **{field: most})
    assert wire.HEADER["error"].get(words) == 0
    assert wire.SLOT[field].get(words[wire.HEADER_WORDS :]) == most
    words = one_slot(**shape, **{field: most + 1})
    assert wire.HEADER["error"].get(words) == 1
    assert wire.HEADER["error_checks"].get(words) >> check & 1


def test_all_rows_of_the_widest_slot_are_sent():
    words = one_slot(65535, columns=1, num_tokens=65535, num_rows=65535, num_words=32 + 3 * 65535)
    assert wire.HEADER["error"].get(words) == 0
    assert wire.SLOT["num_rows"].get(words[wire.HEADER_WORDS :]) == 65535


def test_a_shape_or_a_rank_beyond_its_field_is_refused():
    with pytest.raises(wire.WireError, match=r"num_positions = 65536 .*0 to 65535"):
        one_slot(65536)
    with pytest.raises(wire.WireError, match="process_rank = 4294967296"):
        one_slot(rank=2**32)
    with pytest.raises(wire.WireError, match="process_rank = -1"):
        one_slot(rank=-1)
    assert wire.HEADER["process_rank"].get(one_slot(rank=2**32 - 1)) == 2**32 - 1


def test_kind_and_k_are_refused_when_traced():
    words = one_slot(k=65535, kind=255)
    assert wire.HEADER["kind"].get(words) == 255
    with pytest.raises(wire.WireError, match="kind = 256"):
        one_slot(kind=256)
    with pytest.raises(wire.WireError, match="max_num_logprobs = 65536"):
        one_slot(k=65536)


def test_a_bucket_that_cannot_hold_the_slots_is_refused():
    with pytest.raises(wire.WireError, match="header and 4 slots: 25 words"):
        run(*simple_step(), num_words=23)

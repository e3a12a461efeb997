"""The packer on the device against the host encoder, its guards and its checks."""

import functools
from random import Random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import wire
from ipc.wire import DeviceCheck, Kind, LogprobsMode, SlotState
from jax_specdec.device.messages.pack import SlotFields, pack, select_rows
from jax_specdec.device.messages.pack_kept import KeptRows
from jax_specdec.device.worker import device_checks
from jax_specdec.device.worker.device_checks import DeviceCheckError
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.errors import MessageError
from jax_specdec.records.output_processor import ProcessorState, admit
from jax_specdec.records.output_processor import step as process
from pallas_kernels import TopkLogprobs, topk_logprobs
from pallas_kernels.testing import oracle
from tests.support import quick_compile
from tests.support.processor_messages import request
from tests.support.random_kept import random_counts, random_kept

pytestmark = pytest.mark.fast

B, S, K, C, V, M = 4, 3, 5, 2, 1000, 6


@functools.partial(quick_compile.jit, static_argnames=("kind", "num_words"))
def packed(
    slots,
    token_ids,
    found,
    step,
    running,
    draft_follows,
    process_rank,
    *,
    kind=Kind.TARGET,
    num_words=512,
    kept=None,
):
    return pack(
        slots,
        token_ids,
        select_rows(slots.num_rows, S),
        found,
        kind=kind,
        step=step,
        running=running,
        draft_follows=draft_follows,
        process_rank=process_rank,
        vocab_size=V,
        num_words=num_words,
        kept=kept,
    )


def random_step(seed, states, columns, chosen, drafts, cut, generations=range(B), kept=(0,) * B):
    """Slot fields, ids and kernel results of a random step, and the contents that they mean."""
    random, rng = np.random.default_rng(seed), Random(seed)
    num_tokens, num_rows, contents = [], [], []
    ids = random.integers(0, V, (B, S), dtype=np.int32)
    rows = {"logprobs": [], "extra": [], "ranks": [], "ids": []}
    for b in range(B):
        state = SlotState(states[b])
        tokens = 0
        if state == SlotState.TOKENS:
            tokens = 1 + min(drafts[b], cut[b])
        elif state == SlotState.PREFILL_FIRST_TOKEN:
            tokens = 1 + drafts[b]
        n = 0 if columns[b] == 0 else min(tokens, 1 if state != SlotState.TOKENS else tokens)
        logprobs = random.standard_normal((n, K + 1)).astype(np.float32)
        extra = random.standard_normal((n, C)).astype(np.float32)
        ranks = random.integers(0, V, n, dtype=np.int32)
        top = random.integers(-1, V, (n, K + 1), dtype=np.int32)
        for name, values in zip(rows, (logprobs, extra, ranks, top), strict=True):
            rows[name].append(values)
        k = max(columns[b] - 1, 0)
        width = chosen[b] if columns[b] else 0
        emitted = min(tokens, 1) if state == SlotState.PREFILL_FIRST_TOKEN else tokens
        contents.append(
            SlotContents(
                state=state,
                generation=generations[b],
                mode=LogprobsMode(b % 3),
                num_drafts=drafts[b],
                columns=columns[b],
                num_chosen=width,
                token_ids=ids[b, :tokens],
                token_ranks=ranks,
                logprobs=np.concatenate([logprobs[:, : columns[b]], extra[:, :width]], axis=1),
                topk_ids=top[:, 1 : 1 + k],
                kept=random_kept(rng, random_counts(rng, emitted, M), V) if kept[b] else None,
            )
        )
        num_tokens.append(tokens)
        num_rows.append(n)
    unused = {"logprobs": np.nan, "extra": np.nan, "ranks": 0, "ids": -1}
    arrays = {}
    for name, parts in rows.items():
        joined = np.concatenate(parts)
        whole = np.full((B * S, *joined.shape[1:]), unused[name], joined.dtype)
        whole[: len(joined)] = joined
        arrays[name] = jnp.asarray(whole)
    slots = SlotFields(
        state=jnp.asarray(states, jnp.int32),
        mode=jnp.arange(B, dtype=jnp.int32) % 3,
        columns=jnp.asarray(columns, jnp.int32),
        num_tokens=jnp.asarray(num_tokens, jnp.int32),
        num_rows=jnp.asarray(num_rows, jnp.int32),
        num_drafts=jnp.asarray(drafts, jnp.int32),
        num_chosen=jnp.asarray([c.num_chosen for c in contents], jnp.int32),
        kept=jnp.asarray(kept, jnp.int32),
        generation=jnp.asarray(generations, jnp.uint32),
    )
    found = TopkLogprobs(arrays["ids"], arrays["logprobs"], arrays["ranks"], arrays["extra"])
    return slots, jnp.asarray(ids), found, contents


def kept_rows(contents):
    """The kept sets of these contents, as the packer takes them."""
    sets = KeptSets.joined([slot.kept for slot in contents if slot.kept is not None])
    rows = np.arange(B * S)
    padded = sets.padded(np.where(rows < len(sets), rows, -1), width=M)
    return KeptRows(jnp.int32(len(sets)), jax.tree.map(jnp.asarray, padded))


per_slot = functools.partial(st.lists, min_size=B, max_size=B)
word32 = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)


@given(
    seed=st.integers(0, 1000),
    states=per_slot(st.sampled_from([int(state) for state in SlotState])),
    columns=per_slot(st.integers(0, K + 1)),
    chosen=per_slot(st.integers(0, C)),
    drafts=per_slot(st.integers(0, S - 1)),
    cut=per_slot(st.integers(0, S - 1)),
    step=st.integers(0, 2**64 - 1),
    flags=st.tuples(st.booleans(), st.booleans()),
    generations=per_slot(word32),
    process_rank=word32,
    kept=per_slot(st.integers(0, 1)),
)
def test_the_packed_words_are_the_host_encoders(
    seed, states, columns, chosen, drafts, cut, step, flags, generations, process_rank, kept
):
    slots, ids, found, contents = random_step(
        seed, states, columns, chosen, drafts, cut, generations, kept
    )
    halves = jnp.array([step & 0xFFFFFFFF, step >> 32], jnp.uint32)
    said = {"kept": kept_rows(contents)} if any(kept) else {}
    words = np.asarray(packed(slots, ids, found, halves, *flags, np.uint32(process_rank), **said))
    expected = encode(
        Kind.TARGET,
        step,
        contents,
        running=flags[0],
        draft_follows=flags[1],
        process_rank=process_rank,
    )
    used = int(wire.HEADER["num_words"].get(words))
    assert words[:used].tobytes() == expected
    assert not words[used:].any()
    decode(words[:used])


def simple_step(**changes):
    """One good step; `changes` replace slot fields."""
    slots, ids, found, _ = random_step(1, [0] * B, [2] * B, [1] * B, [2] * B, [1] * B)
    return slots._replace(**{k: jnp.asarray(v) for k, v in changes.items()}), ids, found


def run(slots, ids, found, **options):
    step = jnp.zeros(2, jnp.uint32)
    return np.asarray(packed(slots, ids, found, step, True, False, 0, **options))


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
    *step, contents = random_step(2, [0] * B, [0] * B, [0] * B, [2] * B, [1] * B, kept=[1, 0, 1, 1])
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
    slots, ids, found = simple_step(num_tokens=[2, -1, 2, 2])
    step = jnp.array([7, 3], jnp.uint32)
    words = np.asarray(packed(slots, ids, found, step, True, False, 0))
    with pytest.raises(DeviceCheckError, match=rf"step {3 * 2**32 + 7} failed .*SLOT_COUNTS"):
        device_checks.check(words)


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
    token_ids, step = jnp.zeros((1, num_positions), jnp.int32), jnp.zeros(2, jnp.uint32)
    return np.asarray(packed_slot(slots, token_ids, found, step, kind, rank, num_words))


@functools.partial(quick_compile.jit, static_argnums=(4, 5, 6))
def packed_slot(slots, token_ids, found, step, kind, rank, num_words):
    return pack(slots, token_ids, select_rows(slots.num_rows, token_ids.shape[1]), found,
                kind=kind, step=step, running=True, draft_follows=False, process_rank=rank,
                vocab_size=V, num_words=num_words)  # fmt: skip


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


@pytest.mark.parametrize(
    "jit",
    [quick_compile.jit, pytest.param(lambda function: function, marks=pytest.mark.slow)],
    ids=["with jit", "without jit"],
)
def test_kind_and_k_are_refused_when_traced(jit):
    def with_k(k, kind):
        def traced(step):
            found = TopkLogprobs(
                jnp.zeros((1, k + 1), jnp.int32),
                jnp.zeros((1, k + 1)),
                jnp.ones(1, jnp.int32),
                jnp.zeros((1, 0)),
            )
            one = jnp.ones(1, jnp.int32)
            slots = SlotFields(0 * one, 0 * one, 0 * one, one, one, one, 0 * one, 0 * one,
                               jnp.ones(1, jnp.uint32))  # fmt: skip
            return pack(slots, one[:, None], select_rows(one, 1), found, kind=kind, step=step,
                        running=True, draft_follows=False, process_rank=0, vocab_size=V,
                        num_words=32)  # fmt: skip

        return jit(traced)(jnp.zeros(2, jnp.uint32))

    words = np.asarray(with_k(65535, 255))
    assert wire.HEADER["kind"].get(words) == 255
    with pytest.raises(wire.WireError, match="kind = 256"):
        with_k(0, 256)
    with pytest.raises(wire.WireError, match="max_num_logprobs = 65536"):
        with_k(65536, 3)


def test_a_bucket_that_cannot_hold_the_slots_is_refused():
    with pytest.raises(wire.WireError, match="header and 4 slots: 25 words"):
        run(*simple_step(), num_words=23)


@pytest.mark.slow
class SelectRows(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_rows_are_compacted_in_message_order(self):
        select = self.variant(select_rows, static_argnums=1)
        rows = select(jnp.array([2, 0, 3, 1], jnp.int32), 3)
        assert rows.num == 6
        np.testing.assert_array_equal(rows.flat[:6], [0, 1, 6, 7, 8, 9])
        assert (np.asarray(rows.flat[6:]) == 12).all()  # out of bounds: skipped by the kernels


def test_chosen_ids_follow_the_top_k_in_the_order_of_the_request():
    """From the kernel through packer, bytes and processor; repeats and disorder stay as asked."""
    chosen = (7, 2, 7, 0)
    x = jax.random.normal(jax.random.key(2), (2, 9))
    token_ids = jnp.array([[4, 8]], jnp.int32)
    found = topk_logprobs(x, token_ids[0], 3, extra_token_ids=jnp.array([chosen] * 2, jnp.int32))
    one = jnp.ones(1, jnp.int32)
    slots = SlotFields(
        state=0 * one, mode=0 * one, kept=0 * one, columns=4 * one, num_tokens=2 * one,
        num_rows=2 * one, num_drafts=one, num_chosen=4 * one, generation=jnp.ones(1, jnp.uint32),
    )  # fmt: skip

    @quick_compile.jit
    def packed_ids(slots, token_ids, found):
        rows, step = select_rows(slots.num_rows, 2), jnp.zeros(2, jnp.uint32)
        return pack(slots, token_ids, rows, found, kind=Kind.TARGET, step=step, running=True,
                    draft_follows=False, process_rank=0, vocab_size=9, num_words=64)  # fmt: skip

    words = np.asarray(packed_ids(slots, token_ids, found))
    message = decode(words[: int(wire.HEADER["num_words"].get(words))])
    state = admit(ProcessorState.empty(1), 0, 1, request(logprobs=3, extra_token_ids=chosen))
    _, (record,) = process(state, message)
    expected = np.array([oracle.log_softmax(row) for row in np.asarray(x)])
    assert record.token_ids.tolist() == [4, 8]
    np.testing.assert_allclose(record.logprobs[:, 0], expected[[0, 1], [4, 8]], atol=1e-5)
    np.testing.assert_allclose(record.chosen_logprobs, expected[:, chosen], atol=1e-5)
    best = np.sort(expected, axis=1)[:, ::-1][:, :3]
    np.testing.assert_allclose(record.logprobs[:, 1:], best, atol=1e-5)

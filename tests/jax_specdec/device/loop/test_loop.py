"""The decoding loop through the worker's own code: equal to plain decoding, every value twice."""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import SlotState
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.model.params import named_arrays
from jax_specdec.device.worker import worker as worker_module
from jax_specdec.records.batch import FinishReason
from tests.support import in_mode, reference_model
from tests.support.decoding import VOCAB, mixed_requests, random_model, request, run
from tests.support.near_ties import NEAR_TIE, margins

DRAFTERS = ("mtp", "ngram", "none")


def requests(temperature=0.0):
    return mixed_requests(temperature=temperature, seed=3 if temperature else 0)


@functools.cache
def runs(name, temperature=0.0):
    return run(requests(temperature), name)


def counts(result):
    records = [record for found in result.records.values() for record in found]
    accepted = sum(record.num_accepted for record in records)
    return accepted, sum(record.num_drafts for record in records) - accepted


@pytest.mark.parametrize("name", ["mtp", "ngram"])
def test_greedy_ids_are_those_of_plain_decoding(name):
    assert min(counts(runs(name))) > 0
    assert counts(runs("none")) == (0, 0)
    for item in requests():
        assert runs(name).token_ids(item.id) == runs("none").token_ids(item.id)
        assert len(runs(name).token_ids(item.id)) == item.params.max_tokens


def check_against_teacher_forcing(result, items):
    """Against a cache-free float64 forward pass over the final ids: catches a row off by one."""
    params, config = random_model()
    weights, sizes = named_arrays(params), config.to_dict()
    for item in items:
        records = result.records[item.id]
        if item.params.logprobs is None:
            assert all(r.logprobs is r.cumulative_logprob is None for r in records)
            continue
        emitted = result.token_ids(item.id)
        table = reference_model.logprobs(weights, sizes, [*item.prompt_token_ids, *emitted])
        table = table[len(item.prompt_token_ids) - 1 : -1]
        got = np.concatenate([record.logprobs for record in records])
        best = np.sort(table, axis=1)[:, ::-1][:, : item.params.logprobs]
        expected = np.column_stack([table[np.arange(len(emitted)), emitted], best])
        np.testing.assert_allclose(got, expected, atol=1e-4)
        total = got[:, 0].astype(np.float64).sum()
        np.testing.assert_allclose(records[-1].cumulative_logprob, total, rtol=1e-12)


def check(result, items):
    """Every value against float64 on the very logits of its row, and against a forward pass."""
    seen, _ = in_mode.check_records(result, items)
    assert seen == sum(
        len(result.token_ids(r.id)) for r in items if r.params.logprobs is not None
    )  # fmt: skip
    check_against_teacher_forcing(result, items)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "name", ["mtp", "ngram", pytest.param("none", marks=pytest.mark.slow)]
)  # fmt: skip
def test_every_delivered_value_twice(name, temperature):
    check(runs(name, temperature), requests(temperature))


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
def test_logprobs_that_take_what_verification_has_read(temperature, monkeypatch):
    """Of a sampled batch, and of a greedy one as on a GPU."""
    monkeypatch.setattr(worker_module, "runs_on_gpu", lambda _: temperature == 0)
    items = mixed_requests(3, temperature=temperature)
    result = run(items, "ngram")
    assert any(output.read is not None for output in result.outputs)
    check(result, items)


@pytest.mark.slow
def test_teacher_forcing_notices_a_row_off_by_one():
    shifted = run(
        requests(), "mtp", distort=lambda o: o._replace(logits=jnp.roll(o.logits, 1, axis=1))
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_against_teacher_forcing(shifted, requests())


def test_only_asked_rows_are_sent():
    for message in runs("mtp").messages:
        rows = np.where(message.columns > 0, message.num_tokens, 0)
        np.testing.assert_array_equal(message.num_rows, rows)


def test_a_requests_tokens_do_not_depend_on_its_company():
    for item in requests(0.8)[3:5]:  # the second one has the programs of all
        assert run([item], "mtp").token_ids(item.id) == runs("mtp", 0.8).token_ids(item.id)


@pytest.mark.slow
def test_greedy_ids_across_batch_shapes_agree_up_to_a_near_tie():
    """[3, 4] steps with drafts against [1, 1] steps without, and other prefill chunks."""
    items = mixed_requests(4, max_tokens=(16, 24))
    wide = run(items, "ngram")
    narrow = run(items, NoDrafter(0), num_slots=1, chunk=16)
    shapes = [{output.logits.shape[:2] for output in one.outputs} for one in (wide, narrow)]
    assert shapes == [{(3, 4)}, {(1, 1)}]
    compared = 0
    for item in items:
        near = np.flatnonzero(np.array(margins(wide, item.id)) < NEAR_TIE)
        end = int(near[0]) if near.size else item.params.max_tokens
        assert wide.token_ids(item.id)[:end] == narrow.token_ids(item.id)[:end]
        compared += end
    assert compared > 40


def test_an_equal_seed_gives_equal_tokens_and_another_others():
    result = run(
        [
            request(name, [5, 6, 7], max_tokens=20, temperature=1.0, seed=seed)
            for name, seed in (("one", 9), ("same", 9), ("other", 10))
        ],
        "ngram",
    )
    assert result.token_ids("one") == result.token_ids("same") != result.token_ids("other")


def test_a_stop_token_ends_a_request_and_frees_its_slot_on_the_device():
    plain = requests()[5]
    emitted = runs("none").token_ids(plain.id)
    stop = emitted[len(emitted) // 2]
    params = replace(plain.params, logprobs=2, stop_token_ids=(stop,))
    result = run([replace(plain, params=params)], "mtp")
    assert result.token_ids(plain.id) == emitted[: emitted.index(stop) + 1]
    last = result.records[plain.id][-1]
    assert last.finish_reason is FinishReason.STOP_TOKEN
    assert last.logprobs.shape == (last.num_tokens, 3)
    # The device stopped the slot by itself: the steps after it emitted nothing.
    assert {int(m.state[0]) for m in result.messages[last.step + 1 :]} <= {SlotState.STOPPED}


def test_a_request_may_fill_its_slot_to_the_last_token():
    """The maximum length is where positions go wrong: the last token sits at T - 1.

    Beside it, one token is a whole request; and slots are given away while others run.
    """
    items = [
        request("full", np.arange(60) % VOCAB, max_tokens=36, logprobs=4),
        *(request(f"one{n}", [3], max_tokens=1, logprobs=0) for n in range(4)),
    ]
    for name in DRAFTERS:
        result = run(items, name, max_length=96)
        assert [len(result.token_ids(item.id)) for item in items] == [36, 1, 1, 1, 1]
        assert result.records["full"][-1].finish_reason is FinishReason.LENGTH
        assert result.messages[-1].generation.max() > 1
        check(result, items)


def test_long_prompts_are_prefilled_between_the_steps_of_others():
    short = request("short", [1, 2], max_tokens=30)
    long = request("long", np.arange(60) % VOCAB, max_tokens=5, logprobs=1)
    result = run([short, long], "ngram")
    states = [int(message.state[1]) for message in result.messages]
    assert SlotState.NOTHING in states
    assert states.index(SlotState.TOKENS) > states.index(SlotState.NOTHING)
    check(result, [short, long])


def test_invalid_logits_are_reported_and_stay_in_their_slot():
    """A kept set of such a row has its one token."""
    params, config = random_model()
    # Token 7's logit is NaN in every row.
    broken = replace(params, embedding=params.embedding.at[7].set(np.nan)), config
    items = [
        request("r", [1, 2, 3], max_tokens=6, logprobs=2),
        request("kept", [1, 2], max_tokens=3, temperature=1.0, top_p=0.8, kept_token_ids=True),
    ]
    result = run(items, "mtp", model=broken)
    assert [len(result.token_ids(item.id)) for item in items] == [6, 3]
    for record in result.records["r"]:
        assert record.num_tokens == 1  # verification stops at an invalid row
        assert not record.valid.any()
        assert np.isnan(record.logprobs).all()
        assert (record.topk_ids == -1).all()
    assert np.isnan(result.records["r"][-1].cumulative_logprob)
    for record in result.records["kept"]:
        sets = [record.kept.ids(n).tolist() for n in range(record.num_tokens)]
        assert sets == [[token] for token in record.token_ids.tolist()]

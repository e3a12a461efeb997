"""The decoding loop through the worker's own code: equal to plain decoding, every value twice."""

import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import SlotState
from jax_specdec.device.model.params import named_arrays
from jax_specdec.device.worker import worker as worker_module
from jax_specdec.records.batch import FinishReason
from pallas_kernels.testing import oracle
from tests.support import reference_model
from tests.support.decoding import (
    VOCAB,
    mixed_requests,
    random_model,
    request,
    run,
)

DRAFTERS = ("mtp", "ngram", "none")


@pytest.fixture(scope="module")
def runs():
    return {name: run(mixed_requests(), name) for name in DRAFTERS}


def accepted_and_rejected(result):
    records = [record for found in result.records.values() for record in found]
    accepted = sum(record.num_accepted for record in records)
    return accepted, sum(record.num_drafts for record in records) - accepted


@pytest.mark.parametrize("name", ["mtp", "ngram"])
def test_greedy_ids_are_those_of_plain_decoding(runs, name):
    accepted, rejected = accepted_and_rejected(runs[name])
    assert accepted > 0
    assert rejected > 0
    assert accepted_and_rejected(runs["none"]) == (0, 0)
    for item in mixed_requests():
        assert runs[name].token_ids(item.id) == runs["none"].token_ids(item.id)
        assert len(runs[name].token_ids(item.id)) == item.params.max_tokens


def check_against_captured_logits(result, requests):
    """Every delivered value against float64 on the very logits of its row. Returns rows seen."""
    asked = {item.id: item.params.logprobs for item in requests}
    seen = 0
    for request_id, records in result.records.items():
        k = asked[request_id]
        for record in records:
            output = result.outputs[record.step]
            if k is None:
                assert record.logprobs is None
                assert record.cumulative_logprob is None
                continue
            rows = output.logits[record.slot][: record.num_tokens]
            expected = oracle.topk_logprobs(rows, record.token_ids, k)
            np.testing.assert_array_equal(record.token_ids, expected.token_ids[:, 0])
            np.testing.assert_array_equal(record.topk_ids, expected.token_ids[:, 1:])
            np.testing.assert_array_equal(record.token_ranks, expected.token_ranks)
            oracle.assert_logprobs_close(record.logprobs, expected.logprobs)
            seen += len(rows)
    return seen


def check_against_teacher_forcing(result, requests, model=None):
    """Against a cache-free float64 forward pass over the final ids: catches a row off by one."""
    params, config = model or random_model()
    weights, sizes = named_arrays(params), config.to_dict()
    for item in requests:
        if item.params.logprobs is None:
            continue
        emitted = result.token_ids(item.id)
        table = reference_model.logprobs(weights, sizes, [*item.prompt_token_ids, *emitted])
        table = table[len(item.prompt_token_ids) - 1 : -1]
        got = np.concatenate([record.logprobs for record in result.records[item.id]])
        tops = np.concatenate([record.topk_ids for record in result.records[item.id]])
        expected = table[np.arange(len(emitted)), emitted]
        np.testing.assert_allclose(got[:, 0], expected, atol=1e-4)
        np.testing.assert_allclose(got[:, 1:], np.take_along_axis(table, tops, axis=1), atol=1e-4)
        if item.params.logprobs:
            best = np.sort(table, axis=1)[:, ::-1][:, : item.params.logprobs]
            np.testing.assert_allclose(got[:, 1:], best, atol=1e-4)
        total = result.records[item.id][-1].cumulative_logprob
        np.testing.assert_allclose(total, got[:, 0].astype(np.float64).sum(), rtol=1e-12)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_delivered_value_twice(runs, name):
    requests = mixed_requests()
    seen = check_against_captured_logits(runs[name], requests)
    assert seen == sum(r.params.max_tokens for r in requests if r.params.logprobs is not None)
    check_against_teacher_forcing(runs[name], requests)


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
def test_logprobs_that_take_what_verification_has_read(temperature, monkeypatch):
    """Of a sampled batch, and of a greedy one as on a GPU."""
    monkeypatch.setattr(worker_module, "runs_on_gpu", lambda _: temperature == 0)
    requests = mixed_requests(3, temperature=temperature)
    result = run(requests, "ngram")
    assert any(output.read is not None for output in result.outputs)
    check_against_captured_logits(result, requests)
    check_against_teacher_forcing(result, requests)


@pytest.mark.parametrize("name", ["mtp", "ngram", pytest.param("none", marks=pytest.mark.slow)])
def test_sampled_requests_too(name):
    requests = mixed_requests(temperature=0.8, seed=3)
    result = run(requests, name)
    check_against_captured_logits(result, requests)
    check_against_teacher_forcing(result, requests)


@pytest.mark.slow
def test_teacher_forcing_notices_a_row_off_by_one():
    requests = mixed_requests()
    shifted = run(
        requests, "mtp", distort=lambda o: o._replace(logits=jnp.roll(o.logits, 1, axis=1))
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_against_teacher_forcing(shifted, requests)


def test_only_asked_rows_are_sent(runs):
    for name in DRAFTERS:
        for message in runs[name].messages:
            rows = np.where(message.columns > 0, message.num_tokens, 0)
            np.testing.assert_array_equal(message.num_rows, rows)


def test_slots_are_reused_while_others_run(runs):
    first, last = runs["mtp"].messages[0], runs["mtp"].messages[-1]
    assert (first.generation == 1).all()
    assert last.generation.max() > 1
    mixed = [m for m in runs["mtp"].messages if len(set(m.generation.tolist())) > 1]
    assert any((m.state == SlotState.TOKENS).sum() > 1 for m in mixed)


def test_a_requests_tokens_do_not_depend_on_its_company():
    requests = mixed_requests(temperature=0.9, seed=5)
    together = run(requests, "mtp")
    for item in requests[:3]:
        alone = run([item], "mtp")
        assert alone.token_ids(item.id) == together.token_ids(item.id)


def test_an_equal_seed_gives_equal_tokens_and_another_others():
    one, same, other = (
        request(name, [5, 6, 7], max_tokens=20, temperature=1.0, seed=seed)
        for name, seed in (("one", 9), ("same", 9), ("other", 10))
    )
    result = run([one, same, other], "ngram")
    assert result.token_ids("one") == result.token_ids("same") != result.token_ids("other")


def test_a_stop_token_ends_a_request_and_frees_its_slot_on_the_device(runs):
    plain = mixed_requests()[5]
    emitted = runs["none"].token_ids(plain.id)
    stop = emitted[len(emitted) // 2]
    cut = emitted[: emitted.index(stop) + 1]
    stopping = request("stops", plain.prompt_token_ids, max_tokens=len(emitted), logprobs=2,
                       stop_token_ids=(stop,))  # fmt: skip
    for name in DRAFTERS:
        result = run([stopping], name)
        assert result.token_ids("stops") == cut
        last = result.records["stops"][-1]
        assert last.finish_reason is FinishReason.STOP_TOKEN
        assert last.logprobs.shape == (last.num_tokens, 3)
        # The device stopped the slot by itself: the steps after it emitted nothing.
        for message in result.messages[last.step + 1 :]:
            assert message.state[0] == SlotState.STOPPED


def test_a_request_may_fill_its_slot_to_the_last_token():
    """The maximum length is where positions go wrong: the last token sits at T - 1."""
    full = request("full", np.arange(60) % VOCAB, max_tokens=36, logprobs=4)
    for name in DRAFTERS:
        result = run([full], name, max_length=96)
        assert len(result.token_ids("full")) == 36
        assert result.records["full"][-1].finish_reason is FinishReason.LENGTH
        check_against_captured_logits(result, [full])
        check_against_teacher_forcing(result, [full])


def test_one_token_is_a_whole_request():
    result = run([request("one", [3], max_tokens=1, logprobs=0)], "mtp")
    assert len(result.token_ids("one")) == 1


def test_long_prompts_are_prefilled_between_the_steps_of_others():
    short = request("short", [1, 2], max_tokens=30)
    long = request("long", np.arange(60) % VOCAB, max_tokens=5, logprobs=1)
    result = run([short, long], "ngram")
    states = [int(message.state[1]) for message in result.messages]
    assert SlotState.NOTHING in states
    assert states.index(SlotState.TOKENS) > states.index(SlotState.NOTHING)
    check_against_teacher_forcing(result, [short, long])


def test_invalid_logits_are_reported_and_stay_in_their_slot():
    params, config = random_model()
    weights = params.embedding.at[7].set(np.nan)  # token 7's logit is NaN in every row
    broken = (type(params)(weights, params.layers, params.final_norm, params.head, params.mtp),
              config)  # fmt: skip
    item = request("r", [1, 2, 3], max_tokens=6, logprobs=2)
    result = run([item], "mtp", model=broken)
    records = result.records["r"]
    assert len(result.token_ids("r")) == 6
    for record in records:
        assert record.num_tokens == 1  # verification stops at an invalid row
        assert not record.valid.any()
        assert np.isnan(record.logprobs).all()
        assert (record.topk_ids == -1).all()
    assert np.isnan(records[-1].cumulative_logprob)

"""Kept sets through the loop: each against its row in float64, and a learner that uses them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import KEPT_ALL, LogprobsMode, SlotState
from jax_specdec.device import kept_logprobs
from jax_specdec.device.messages.batch_options import options_of_requests, widths_of
from jax_specdec.device.messages.step_messages import target_message
from jax_specdec.device.model.llama import forward, logits
from jax_specdec.device.model.params import init_cache
from jax_specdec.device.worker import worker as worker_module
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.decode import decode
from pallas_kernels.testing import oracle
from tests.support import in_mode, quick_compile
from tests.support.decoding import VOCAB, Local, random_model, request, run

PROCESSED = LogprobsMode.PROCESSED
NUMBER = np.zeros(2, np.uint32)
FILTERS = ({"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.95}, {})


def asking(count=8):
    """Greedy and sampled requests with every filter; some ask for logprobs, one not for sets.

    The first outlives the others and asks for the most: one program serves all steps.
    """
    return [
        request(
            f"r{index}", range(2 + index), max_tokens=9 if index else 45, seed=index,
            temperature=0.0 if index % 5 == 4 else 0.7 + 0.1 * index,
            logprobs=[3, None, 0][index % 3], logprobs_mode=PROCESSED,
            kept_token_ids=index != 3, **FILTERS[index % 4],
        )
        for index in range(count)
    ]  # fmt: skip


def expected_set(row, params):
    """The ids that processing keeps of a row [V], and log of their share, in float64."""
    processed = in_mode.logprobs(row, replace(params, logprobs_mode=PROCESSED))
    if not oracle.is_valid(row) or params.temperature == 0:
        return np.flatnonzero(processed == 0), 0.0
    kept = np.flatnonzero(processed > -np.inf)
    return kept, np.log(np.exp(oracle.log_softmax(row, params.temperature))[kept].sum())


def check_records(result, requests):
    """Every set against the logits of its row. Returns the counts that were seen."""
    counts = []
    for item in requests:
        for record in result.records[item.id]:
            if not item.params.kept_token_ids:
                assert record.kept is None
                continue
            rows = result.outputs[record.step].logits[record.slot][: record.num_tokens]
            assert len(record.kept) == len(rows)
            for n, row in enumerate(rows):
                ids, log_kept = expected_set(row, item.params)
                whole = len(ids) == VOCAB
                assert record.kept.counts[n] == (KEPT_ALL if whole else len(ids))
                assert record.kept.ids(n).tolist() == ([] if whole else ids.tolist())
                np.testing.assert_allclose(record.kept.log_kept[n], log_kept, atol=1e-5)
                assert record.token_ids[n] in ids
                counts.append(int(record.kept.counts[n]))
    return counts


@pytest.fixture(scope="module")
def kept():
    return run(asking(), "mtp")


def test_every_set_is_that_of_its_row(kept):
    counts = check_records(kept, asking())
    assert len(counts) == sum(r.params.max_tokens for r in asking() if r.params.kept_token_ids)
    assert {KEPT_ALL, 1} < set(counts)
    assert len(set(counts)) > 4
    accepted = sum(r.num_accepted for records in kept.records.values() for r in records)
    assert accepted > 10  # sets of accepted drafts are among them
    for message in kept.messages:  # each has the words of its sets and no more
        rows = message.num_tokens * message.kept
        assert len(message.kept_sets) == rows.sum()
        assert len(message.kept_sets.token_ids) == np.maximum(message.kept_sets.counts, 0).sum()


@pytest.mark.slow
def test_a_set_of_another_row_is_noticed():
    def shifted(output):
        return output._replace(cut=jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), output.cut))

    wrong = run(asking(), "mtp", distort=shifted)
    with pytest.raises(AssertionError):
        check_records(wrong, asking())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "none"])
def test_other_drafters_too(name):
    check_records(run(asking(), name), asking())


def test_greedy_tokens_keep_themselves_where_one_read_serves_all(monkeypatch):
    monkeypatch.setattr(worker_module, "runs_on_gpu", lambda _: True)
    greedy = [request(f"g{n}", [1, 2, n], max_tokens=6, logprobs=2, kept_token_ids=True)
              for n in range(3)]  # fmt: skip
    result = run(greedy, "mtp")
    assert set(check_records(result, greedy)) == {1}
    assert any(output.read is not None for output in result.outputs)


@pytest.mark.slow
def test_without_a_known_cut_a_search_finds_it(kept):
    """For a loop of one's own that keeps no cut of its verification."""
    requests = asking()[:3]
    params = [item.params for item in requests]
    widths = widths_of(params, VOCAB)
    message = quick_compile.jit(functools.partial(target_message, widths=widths))
    output = jax.tree.map(jnp.asarray, run(requests, "mtp").outputs[3])
    known, found = (
        decode(words[: int(words[4])])
        for one in (output, output._replace(cut=None))
        for words in [np.asarray(message(one, options_of_requests(params, widths), NUMBER))]
    )
    assert len(known.kept_sets)
    for name in ("token_ids", "counts"):
        np.testing.assert_array_equal(
            getattr(known.kept_sets, name), getattr(found.kept_sets, name)
        )
    np.testing.assert_allclose(known.kept_sets.log_kept, found.kept_sets.log_kept, atol=1e-6)


@pytest.mark.slow
def test_a_prefill_node_sends_the_set_of_its_first_token():
    item = request("r", [1, 2, 3], max_tokens=6, temperature=1.0, top_p=0.8, kept_token_ids=True)
    local = Local("mtp", prefill_only=True)
    local.admit(item)
    (record,) = [record for record in local.drain() if record.num_tokens]
    (message,) = [m for m in local.messages if (m.state == SlotState.PREFILL_FIRST_TOKEN).any()]
    assert message.num_tokens.max() > 1
    assert len(message.kept_sets) == len(record.kept) == 1
    ids, _ = expected_set(local.outputs[record.step].logits[record.slot][0], item.params)
    assert record.kept.ids(0).tolist() == ids.tolist()


def whole_sequences(requests, result):
    """The logits [N, L, V] of a forward pass over whole sequences, without cache or drafts."""
    params, config = random_model()
    length = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
    ids = np.zeros((len(requests), length), np.int32)
    for n, item in enumerate(requests):
        sequence = [*item.prompt_token_ids, *result.token_ids(item.id)]
        ids[n, : len(sequence)] = sequence

    @quick_compile.jit
    def scored(ids):
        places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
        cache = init_cache(config, len(requests), length)
        return logits(params, config, forward(params, config, ids, places, cache)[0])

    return ids, scored(jnp.asarray(ids))


@pytest.mark.slow
def test_the_ratio_of_truncated_rollouts_is_one_with_their_sets_and_not_without():
    """top-p 0.8: the learner's ratio is 1 within 1e-4; over the whole vocabulary it is not."""
    requests = [
        request(f"r{n}", [3, 1, 4 + n], max_tokens=16, temperature=1.2, top_p=0.8, seed=n,
                logprobs=0, logprobs_mode=PROCESSED, kept_token_ids=True)
        for n in range(6)
    ]  # fmt: skip
    result = run(requests, "mtp")
    ids, x = whole_sequences(requests, result)
    records = [result.records[item.id] for item in requests]
    sets = KeptSets.joined([record.kept for those in records for record in those])
    behavior = np.concatenate([r.logprobs[:, 0] for those in records for r in those])
    rows, tokens = x[:, 2:18], ids[:, 3:19]  # the row before each token
    kept = sets.padded(np.arange(96).reshape(6, 16))
    score = quick_compile.jit(kept_logprobs)

    def ratios(kept):
        found = score(rows, tokens, kept, np.float32(1.2)).reshape(-1)
        return np.exp(np.asarray(found, np.float64) - behavior)

    np.testing.assert_allclose(ratios(kept), 1, rtol=0, atol=1e-4)
    whole = kept._replace(counts=np.full_like(kept.counts, KEPT_ALL),
                          log_kept=np.zeros_like(kept.log_kept))  # fmt: skip
    without = ratios(whole)
    print(f"without kept sets: mean ratio {without.mean():.3f}, smallest {without.min():.3f}")
    np.testing.assert_allclose(np.log(without), sets.log_kept, atol=1e-4)
    assert without.mean() < 0.95

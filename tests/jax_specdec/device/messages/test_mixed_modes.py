"""Batches of requests in every mode through the loop: every value, of target and draft rows."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ipc.wire import Kind, LogprobsMode
from jax_specdec.device.model.llama import forward, logits
from jax_specdec.device.model.params import init_cache, named_arrays
from tests.support import in_mode, quick_compile, reference_model
from tests.support.decoding import VOCAB, random_model, request, run

RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED


def requests_in_every_mode(count=12):
    """Greedy and sampled, every mode, K from none to V, chosen ids, half with draft logprobs.

    The first outlives the others and asks for the most: one program serves all steps.
    """
    random = np.random.default_rng(4)
    filters = [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.95}]
    found = []
    for index in range(count):
        k = [VOCAB, 5, 0, 20, None, 2][index % 6]
        chosen = () if k is None or index % 2 else tuple(random.integers(0, VOCAB, 3).tolist())
        found.append(
            request(
                f"r{index}",
                random.integers(0, VOCAB, 3 + index).tolist(),
                max_tokens=10 if index else 40,
                temperature=0.0 if index % 5 == 4 else 0.6 + 0.1 * (index % 4),
                seed=index,
                logprobs=k,
                logprobs_mode=[PROCESSED, RAW, SCALED][index // 2 % 3],
                extra_token_ids=chosen,
                draft_logprobs=index % 4 < 2,
                **filters[index % 4],
            )
        )
    return found


pytestmark = pytest.mark.slow  # one batch of every mode, and all of its programs


@pytest.fixture(scope="module")
def mixed():
    return run(requests_in_every_mode(), "mtp")


def test_every_value_of_a_batch_of_mixed_modes(mixed):
    requests = requests_in_every_mode()
    seen, drafts_seen = in_mode.check_records(mixed, requests)
    asking = [item.params.max_tokens for item in requests if item.params.logprobs is not None]
    assert seen == sum(asking)
    assert drafts_seen > 30
    modes = {mode for message in mixed.messages for mode in message.mode[message.num_tokens > 0]}
    assert modes == set(LogprobsMode)
    for message in mixed.messages:
        assert (message.num_rows == message.num_tokens * (message.columns > 0)).all()


def test_draft_rows_have_the_chosen_ids_too(mixed):
    """The values are held against float64 above. Here: each draft has its own request's ids."""
    seen = 0
    for item in requests_in_every_mode():
        chosen = list(item.params.extra_token_ids)
        for record in mixed.records[item.id]:
            if record.draft is None or record.draft.logprobs is None:
                assert record.draft is None or record.draft.chosen_logprobs is None
                continue
            assert record.draft.chosen_logprobs.shape == (record.num_drafts, len(chosen))
            seen += len(chosen) * record.num_drafts
    assert seen > 30


def test_draft_messages_follow_their_target_where_a_request_asks(mixed):
    kinds = [(message.kind, message.step) for message in mixed.messages]
    asked = {item.id for item in requests_in_every_mode() if item.params.draft_logprobs}
    followed = [message.step for message in mixed.messages if message.draft_follows]
    assert [step for kind, step in kinds if kind is Kind.DRAFT] == followed
    assert {kinds[i - 1] for i, (kind, _) in enumerate(kinds) if kind is Kind.DRAFT} == {
        (Kind.TARGET, step) for step in followed
    }
    verified = rejected = 0
    for name, records in mixed.records.items():
        for record in records:
            sent = record.draft is not None
            assert sent == (name in asked and record.num_drafts > 0)
            if sent:
                verified += record.num_drafts
                rejected += record.num_drafts - record.num_accepted
    assert verified > rejected > 0  # accepted or not, all are there
    assert mixed.state.counters.late_drafts == 0


def test_without_a_request_or_without_logits_there_is_no_draft_message():
    plain = run([request("r", [1, 2], max_tokens=6, logprobs=20)], "mtp")
    asking = [request("r", [1, 2, 1, 2], max_tokens=8, logprobs=20, draft_logprobs=True)]
    for result in (plain, run(asking, "ngram"), run(asking, "none")):
        assert {message.kind for message in result.messages} == {Kind.TARGET}
        assert not any(message.draft_follows for message in result.messages)
    assert any(record.num_drafts for record in run(asking, "ngram").records["r"])


def test_processed_probabilities_of_all_tokens_sum_to_one(mixed):
    asked = [
        item for item in requests_in_every_mode()
        if item.params.logprobs == VOCAB and item.params.logprobs_mode is not RAW
    ]  # fmt: skip
    kept = []
    for item in asked:
        for record in mixed.records[item.id]:
            sums = np.exp(record.logprobs[:, 1:].astype(np.float64)).sum(axis=1)
            np.testing.assert_allclose(sums, 1, atol=1e-5)
            kept += (record.topk_ids >= 0).sum(axis=1).tolist()
    assert 1 <= min(kept) < VOCAB


def test_sampled_frequencies_are_the_processed_probabilities():
    """The first token of 1500 seeds against the probabilities that came with it."""
    count, vocab = 1500, 6
    params = {"temperature": 1.3, "top_p": 0.9, "min_p": 0.02, "logprobs": vocab,
              "logprobs_mode": PROCESSED, "max_tokens": 1}  # fmt: skip
    requests = [request(str(seed), [4] * 5, seed=seed, **params) for seed in range(count)]
    result = run(requests, "ngram", num_slots=500, max_length=16,
                 model=random_model(vocab, scale=2.0))  # fmt: skip
    first = result.records["0"][0]
    probs = np.zeros(vocab)
    kept = first.topk_ids[0] >= 0
    probs[first.topk_ids[0][kept]] = np.exp(first.logprobs[0, 1:][kept].astype(np.float64))
    assert 2 < kept.sum() < vocab
    observed = np.bincount([result.token_ids(item.id)[0] for item in requests], minlength=vocab)
    assert observed[probs == 0].sum() == 0
    expected = probs[probs > 0] / probs.sum() * count
    assert stats.chisquare(observed[probs > 0], expected).pvalue > 1e-3
    # A neighboring temperature's probabilities do not fit: the test can fail.
    other = expected**0.8 / (expected**0.8).sum() * count
    assert stats.chisquare(observed[probs > 0], other).pvalue < 1e-4


def scored_again(item, emitted, score):
    """Logprobs [n] of the emitted tokens from a forward pass over the whole sequence."""
    rows = score([*item.prompt_token_ids, *emitted])[len(item.prompt_token_ids) - 1 : -1]
    return np.array(
        [
            in_mode.logprobs(row, item.params)[token]
            for row, token in zip(rows, emitted, strict=True)
        ]
    )


def test_scoring_sequences_again_gives_the_same_logprobs(mixed):
    """|log ratio| <= 1e-4 in float32, in the request's own mode: RL training needs it.

    Once with a second implementation in float64, once with the model's own forward pass in float32,
    of another batch shape.
    """
    params, config = random_model()
    weights, sizes = named_arrays(params), config.to_dict()

    @quick_compile.jit
    def whole(ids):
        positions = jnp.arange(64, dtype=jnp.int32)[None]
        hidden, _ = forward(params, config, ids[None], positions, init_cache(config, 1, 64))
        return logits(params, config, hidden)[0]

    scorers = [
        functools.partial(reference_model.logits, weights, sizes),
        lambda ids: np.asarray(whole(jnp.array(ids + [0] * (64 - len(ids)))))[: len(ids)],
    ]
    compared = 0
    wrong = []
    for item in requests_in_every_mode():
        if item.params.logprobs is None:
            continue
        emitted = mixed.token_ids(item.id)
        got = np.concatenate([record.logprobs[:, 0] for record in mixed.records[item.id]])
        for score in scorers:
            expected = scored_again(item, emitted, score)
            np.testing.assert_allclose(got, expected, atol=1e-4)
            compared += len(got)
        wrong.append(
            max(
                abs(got - scored_again(
                    request("x", item.prompt_token_ids, temperature=item.params.temperature,
                            logprobs_mode=mode), emitted, scorers[1]))
            .max() for mode in LogprobsMode if mode is not item.params.logprobs_mode)
        )  # fmt: skip
    assert compared > 200
    assert max(wrong) > 0.1  # another mode's logprobs are not within the bound

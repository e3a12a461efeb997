"""Raw, scaled and processed logprobs, by request, for target and draft rows, in one batch."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ipc.wire import Kind, LogprobsMode, SlotState, WireError
from jax_specdec.device.drafting.drafters import MtpDrafter, no_drafts
from jax_specdec.device.loop.host_slots import Slot, asked_of_slots, wants_one_read, widths_of_slots
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages.asked import asked_of, widths_of
from jax_specdec.device.messages.buckets import chosen_bucket
from jax_specdec.device.messages.pack import select_rows
from jax_specdec.device.messages.row_logprobs import row_logprobs
from jax_specdec.device.messages.step_messages import (
    StepOutput,
    draft_message,
    step_output,
    target_message,
)
from jax_specdec.device.model.llama import forward, logits
from jax_specdec.device.model.params import init_cache, named_arrays
from jax_specdec.device.sampling.distribution import truncation
from jax_specdec.device.sampling.verify import Verified, verify
from jax_specdec.requests import SamplingParams
from pallas_kernels.finish import skipped_rows
from tests.support import in_mode, reference_model
from tests.support.decoding import VOCAB, random_model, request, run

RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED
S, V = 3, 7


@functools.partial(jax.jit, static_argnames="widths")
def jitted(x, token_ids, num_rows, asked, widths):
    return row_logprobs(x, token_ids, select_rows(num_rows, x.shape[1]), asked, widths)


def asked_by(*params):
    """(asked, widths) of requests with these parameters."""
    widths = widths_of(params, V)
    return asked_of(params, widths), widths


def check_found(found, x, token_ids, num_rows, params):
    """Every row of `found` against float64, in message order."""
    row = 0
    for b, one in enumerate(params):
        count, k, c = int(num_rows[b]), one.num_columns - 1, len(one.extra_token_ids)
        part = slice(row, row + count)
        in_mode.check_rows(
            np.asarray(x[b, :count]),
            one,
            np.asarray(token_ids[b, :count]),
            np.asarray(found.logprobs[part, : k + 1]),
            np.asarray(found.token_ids[part, 1 : k + 1]),
            np.asarray(found.token_ranks[part]),
            np.asarray(found.extra_logprobs[part, :c]),
        )
        row += count
    assert (np.asarray(found.token_ids[row:]) == -1).all()  # skipped


ties = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -1.5, -np.inf])
odd = ties | st.sampled_from([np.nan, np.inf])
row_values = st.lists(ties, min_size=V, max_size=V) | st.lists(odd, min_size=V, max_size=V)
asks = st.builds(
    SamplingParams,
    logprobs=st.integers(0, V),
    logprobs_mode=st.sampled_from(LogprobsMode),
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([1.0, 0.83, 0.41]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
    extra_token_ids=st.lists(st.integers(0, V - 1), max_size=5).map(tuple),
)


@pytest.mark.fast
@settings(max_examples=60)
@given(
    values=st.lists(row_values, min_size=2 * S, max_size=2 * S),
    token_ids=st.lists(st.integers(0, V - 1), min_size=2 * S, max_size=2 * S),
    num_rows=st.tuples(st.integers(0, S), st.integers(0, S)),
    params=st.tuples(asks, asks),
)
def test_any_two_requests_in_one_batch(values, token_ids, num_rows, params):
    """Ties at the boundary, -inf, invalid rows, T = 0, K beyond what is kept, chosen ids."""
    x = np.array(values, np.float32).reshape(2, S, V)
    token_ids = np.array(token_ids, np.int32).reshape(2, S)
    found = jitted(x, token_ids, np.array(num_rows, np.int32), *asked_by(*params))
    check_found(found, x, token_ids, num_rows, params)


def searches(function, *arguments):
    """How many searches for the end of a prefix (`cutoff`) a function's program has."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            is_loop = equation.primitive.name in ("scan", "while")
            yield is_loop and "search" in str(equation.source_info.name_stack)
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(value):
                    yield from walk(getattr(value, "jaxpr", value))

    def is_jaxpr(value):
        return hasattr(value, "eqns") or hasattr(value, "jaxpr")

    return sum(walk(jax.make_jaxpr(function)(*arguments).jaxpr))


@pytest.mark.fast
def test_each_distribution_is_cut_once():
    """A row's where it is verified, a draft's where it is drawn; logprobs of both come after."""
    params, model = random_model()
    config = LoopConfig(model, MtpDrafter(model, 2), num_slots=2, max_length=16)
    asks = SamplingParams(temperature=1.0, top_p=0.9, logprobs=3, logprobs_mode=PROCESSED,
                          draft_logprobs=True)  # fmt: skip
    asked, widths = asked_by(asks, asks)
    one_step = functools.partial(step, config, params)
    one_cut = searches(truncation, jnp.zeros((2, 3, VOCAB)), asked.sampling)
    assert one_cut == 4  # keys and ids, for top-k and for top-p
    state = init_state(config)
    assert searches(one_step, state) == (1 + 2) * one_cut
    output = jax.eval_shape(one_step, state)[1]
    number = jnp.zeros(2, jnp.uint32)
    told = [
        functools.partial(message, asked=asked, step_number=number, widths=widths)
        for message in (target_message, draft_message)
    ]
    assert [searches(message, output) for message in told] == [0, 0]
    # The controls: drafts and outputs that do not say how they were cut.
    unsaid = output._replace(cut=None, drafts=output.drafts._replace(cut=None))
    assert [searches(message, unsaid) for message in told] == [one_cut, one_cut]
    rows, lengths = jnp.zeros((2, 3, VOCAB)), jnp.zeros(2, jnp.int32)
    verified = [
        searches(lambda drafts: verify(rows, drafts, asked.sampling, lengths), drafts)
        for drafts in (state.drafts, state.drafts._replace(cut=None))
    ]
    assert verified == [one_cut, 2 * one_cut]


@pytest.mark.fast
def test_no_rounding_gives_a_probability_above_one():
    """Where top-k leaves one token, its logprob and the log of its share are rounded apart."""
    random = np.random.default_rng(0)
    x = random.normal(0, 3, (1, 64, 61)).astype(np.float32)
    token_ids, count = x.argmax(axis=-1).astype(np.int32), np.array([64], np.int32)
    params = SamplingParams(temperature=1.0, top_k=1, logprobs=0, logprobs_mode=PROCESSED)
    asked, widths = asked_by(params)
    processed = jitted(x, token_ids, count, asked, widths).logprobs
    np.testing.assert_allclose(processed, 0, atol=1e-6)
    assert (processed <= 0).all()
    # The control: the difference of the two is above 0 in some of these rows.
    scaled = jitted(x, token_ids, count, *asked_by(replace(params, logprobs_mode=SCALED))).logprobs
    log_kept = jax.jit(truncation)(x, asked.sampling).log_kept
    assert (scaled[:, 0] - log_kept[0] > 0).any()


class ByHand(chex.TestCase):
    """[0.5, 0.25, 0.25, 0] in every mode."""

    X = np.log(np.array([[[0.5, 0.25, 0.25, 0.0]]], np.float32), where=[True] * 3 + [False],
               out=np.full((1, 1, 4), -np.inf, np.float32))  # fmt: skip

    def found(self, token, **params):
        function = self.variant(row_logprobs, static_argnames="widths")
        asks = [SamplingParams(logprobs=4, **params)]
        widths = widths_of(asks, 4)
        rows = select_rows(jnp.ones(1, jnp.int32), 1)
        asked = asked_of(asks, widths)
        tokens = jnp.array([[token]], jnp.int32)
        got = function(jnp.asarray(self.X), tokens, rows, asked, widths=widths)
        # In twelfths, so that they can be written down.
        named = len(asks[0].extra_token_ids)
        logprobs = [
            np.asarray(x, np.float64) for x in (got.logprobs[0], got.extra_logprobs[0, :named])
        ]
        return got.token_ids[0].tolist(), *((np.exp(x) * 12).round(4).tolist() for x in logprobs)

    @chex.variants(with_jit=True, without_jit=True)
    def test_processed(self):
        # Of the two at the boundary, the lower id is kept.
        assert self.found(1, logprobs_mode=PROCESSED, temperature=1.0, top_p=0.7,
                          extra_token_ids=(2, 0)) == (
            [1, 0, 1, -1, -1], [4, 8, 4, 0, 0], [0, 8]
        )  # fmt: skip
        greedy = self.found(0, logprobs_mode=PROCESSED, extra_token_ids=(0, 3))
        assert greedy == ([0, 0, -1, -1, -1], [12, 12, 0, 0, 0], [12, 0])

    @chex.variants(with_jit=True, without_jit=True)
    def test_scaled(self):
        ids, probs, _ = self.found(2, logprobs_mode=SCALED, temperature=0.5)
        assert (ids, probs) == ([2, 0, 1, 2, -1], [2, 8, 2, 2, 0])
        ids, probs, _ = self.found(0, logprobs_mode=SCALED)  # greedy: T = 1
        assert probs == [6, 6, 3, 3, 0]


@pytest.mark.fast
def test_only_what_the_batch_asks_for_is_compiled():
    def widths(**params):
        return asked_by(SamplingParams(), SamplingParams(**params))[1]

    assert widths() == (None, 0, RAW)
    assert widths(logprobs=0) == (0, 0, RAW)
    # Without logprobs there is no mode to compute in.
    assert widths(logprobs_mode=PROCESSED) == (None, 0, RAW)
    assert widths(logprobs=3, logprobs_mode=SCALED, extra_token_ids=(1, 2)) == (5, 16, SCALED)
    buckets = {count: chosen_bucket(count) for count in (0, 1, 16, 17, 128)}
    assert buckets == {0: 0, 1: 16, 16: 16, 17: 128, 128: 128}
    with pytest.raises(WireError, match="129 chosen token ids"):
        chosen_bucket(129)


@pytest.mark.fast
def test_what_a_batch_asks_for_has_a_row_for_each_request():
    params = [SamplingParams(logprobs=3, extra_token_ids=(4, 2)), SamplingParams(temperature=0.5)]
    widths = widths_of(params, V)
    asked = asked_of(params, widths)
    assert asked.chosen_ids.shape == (2, widths.chosen)
    assert asked.chosen_ids[0, :2].tolist() == [4, 2]
    said = [asked.num_columns, asked.num_chosen, asked.generation, asked.verdict]
    assert [x.tolist() for x in said] == [[4, 0], [2, 0], [1, 1], [0, 0]]
    assert asked.sampling.temperature.tolist() == [0, 0.5]
    assert asked_of(params, widths, generation=[7, 9]).generation.tolist() == [7, 9]
    with pytest.raises(ValueError, match="3 generations for 2 requests"):
        asked_of(params, widths, generation=[7, 8, 9])


@pytest.mark.fast
def test_slots_that_do_not_decode_emit_nothing():
    logits, count = jnp.zeros((2, 3, V)), jnp.array([2, 3], jnp.int32)
    drafts = no_drafts(2, 2)._replace(num=jnp.array([2, 2], jnp.int32))
    verified = Verified(jnp.ones((2, 3), jnp.int32), count)
    active, running = jnp.array([True, False]), jnp.bool_(True)
    output = step_output(logits, drafts, verified, active=active, running=running)
    said = output.num_tokens, output.num_rows, output.num_drafts, output.drafts.num, output.state
    assert [x.tolist() for x in said] == [[2, 0], [2, 0], [2, 0], [2, 0],
                                          [SlotState.TOKENS, SlotState.STOPPED]]  # fmt: skip


@pytest.mark.fast
def test_one_read_serves_greedy_requests_that_ask_for_nothing_else():
    def fused(*params):
        return wants_one_read([Slot(params=SamplingParams(**one), most_tokens=1) for one in params])

    asks, silent = {"logprobs": 3}, {}
    assert fused(asks, silent)
    assert fused(asks, asks | {"logprobs_mode": SCALED})
    assert not fused(asks, silent, silent)
    assert not fused(asks, asks | {"temperature": 0.5})
    assert not fused(asks, asks | {"logprobs_mode": PROCESSED})
    assert not fused(asks, asks | {"extra_token_ids": (3,)})


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
                max_tokens=14 if index else 60,
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
    """The values are held against float64 above; here: they are there, and nobody else's."""
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


def test_logprobs_are_the_same_where_the_cut_is_not_told(mixed):
    """A caller of `row_logprobs` who has sampled elsewhere."""
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, logprobs=5,
                            logprobs_mode=PROCESSED)  # fmt: skip
    asked, widths = asked_by(params, params, params)
    read = jax.jit(functools.partial(row_logprobs, widths=widths))
    for output in mixed.outputs[:3]:
        rows = select_rows(jnp.asarray(output.num_rows), output.token_ids.shape[1])
        arguments = output.logits, output.token_ids, rows, asked
        cut = truncation(jnp.asarray(output.logits), asked.sampling)
        told, found = read(*arguments, cut=cut), read(*arguments)
        chex.assert_trees_all_close(told, found, rtol=0, atol=5e-7)
        # What is told is used: another cut, other logprobs.
        other = read(*arguments, cut=cut._replace(log_kept=cut.log_kept - 1))
        assert (np.asarray(other.logprobs) != np.asarray(found.logprobs)).any()


def test_draft_messages_follow_their_target_where_somebody_asked(mixed):
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


def test_nobody_asks_or_no_logits_no_draft_message():
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
    """The first token of 2500 seeds against the probabilities that came with it."""
    count, vocab = 2500, 6
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
    """What RL training needs: |log ratio| <= 1e-4 in float32, in the request's own mode.

    Once with a second implementation in float64, once with the model's own forward pass in float32,
    of another batch shape.
    """
    params, config = random_model()
    weights, sizes = named_arrays(params), config.to_dict()

    @jax.jit
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


def test_one_read_serves_scaled_greedy_requests_and_draft_messages_too():
    requests = [
        request(f"r{index}", [1, 2, index], max_tokens=8, logprobs=20, draft_logprobs=index < 2,
                logprobs_mode=[RAW, SCALED][index % 2])
        for index in range(3)
    ]  # fmt: skip
    result = run(requests, "mtp", fused=True)
    assert all(output.greedy_rows is not None for output in result.outputs[:4])
    seen, drafts_seen = in_mode.check_records(result, requests)
    assert seen == 24
    assert drafts_seen > 0


@pytest.mark.fast
def test_rows_that_nobody_asked_for_enter_no_kernel(monkeypatch):
    """Neither those of slots without logprobs nor those of rejected drafts."""
    output = StepOutput(
        logits=jnp.zeros((3, 2, 11)),
        token_ids=jnp.array([[1, 2], [3, -1], [4, 5]], jnp.int32),
        num_tokens=jnp.array([2, 1, 2], jnp.int32),
        num_rows=jnp.array([2, 1, 2], jnp.int32),
        num_drafts=jnp.ones(3, jnp.int32),
        drafts=no_drafts(3, 1),
        state=jnp.zeros(3, jnp.int32),
        running=jnp.bool_(True),
        greedy_rows=None,
    )
    calls = []

    def watched(logits, token_ids, k, *, row_ids, num_rows, **others):
        assert set(others.values()) == {None}  # raw, no chosen ids, one device
        count = int(num_rows)
        calls.append((k, row_ids[:count].tolist(), token_ids[:count].tolist()))
        return skipped_rows(len(row_ids), k, 0)

    messages = "jax_specdec.device.messages"
    monkeypatch.setattr(f"{messages}.row_logprobs.topk_logprobs", watched)
    # What is sent of it has tests of its own.
    monkeypatch.setattr(f"{messages}.step_messages.pack", lambda *_, **__: jnp.zeros(0, jnp.uint32))

    def message(*asked):
        slots = [Slot(params=SamplingParams(logprobs=k), most_tokens=2) for k in asked]
        widths = widths_of_slots(slots, 11)
        target_message(
            output, asked_of_slots(slots, widths), jnp.zeros(2, jnp.uint32), widths=widths
        )

    message(None, None, None)
    assert calls == []
    message(None, 2, 0)  # slot 1's only row and both of slot 2; nothing of slot 0
    assert calls == [(5, [2, 4, 5], [3, 4, 5])]

"""Penalties, biases and min_tokens through the loop, against the whole rule in float64.

Every row's changed logits, choice, logprobs and ranks are held against lists and dictionaries, and
sampled tokens against their exact distribution.
"""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.model.params import named_arrays
from jax_specdec.records.batch import FinishReason
from pallas_kernels.contract.changes import Changes, apply, prepared
from tests.support import in_mode, reference_model
from tests.support.changed_choice import changed_row
from tests.support.decoding import VOCAB, Local, random_model, request, run, tokens_of
from tests.support.expected_probs import expected_probs
from tests.support.token_statistics import p_value

RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED
STOPS = tuple(range(0, VOCAB, 3))  # the model would soon choose one of them
CHANGES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.4},  # tokens repeat themselves, and drafts are accepted
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {3: 4.0, 4: -6.0, 31: 0.5}},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": STOPS},
    "nothing": {},
}
ALL = {
    "presence_penalty": -1.0, "frequency_penalty": 0.3, "repetition_penalty": 0.8, "min_tokens": 4,
    "logit_bias": {3: 2.5, 4: -6.0, 5: 1.0}, "stop_token_ids": STOPS[1:],
}  # fmt: skip
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
CHANCES = {"temperature": 0.9, "top_p": 0.9, "min_tokens": 2}


def asking():
    """Each change alone, greedy and sampled in turn, and all of them together in every mode.

    The first request outlives the others and asks for the most: one program serves all steps.
    """
    kinds = [
        ALL | {"logprobs": 4, "logprobs_mode": PROCESSED, "stop_token_ids": ()} | SAMPLED,
        *(
            change | ({} if (n + sampled) % 2 else SAMPLED) | {"logprobs": n % 3}
            for sampled in (0, 1)
            for n, change in enumerate(CHANGES.values())
        ),
        ALL | {"logprobs": 4, "logprobs_mode": PROCESSED},
        ALL | {"logprobs": 2, "logprobs_mode": SCALED} | SAMPLED,
    ]
    return [
        request(f"r{n}", [*range(2 + n % 5), 5, 5], max_tokens=9 if n else 80, seed=n,
                kept_token_ids=n % 4 == 0, **kind)
        for n, kind in enumerate(kinds)
    ]  # fmt: skip


def chose(output):
    """The logits [B, S, V] that a step's tokens were chosen from."""
    if output.changes is None:
        return output.logits if output.changed is None else output.changed
    shape = output.logits.shape
    rows = Changes(
        *(x if x is None else jnp.asarray(x.reshape(-1, x.shape[-1])) for x in output.changes)
    )
    changed = apply(jnp.asarray(output.logits.reshape(-1, shape[-1])), prepared(rows, shape[-1]))
    return np.asarray(changed, np.float32).reshape(shape)


def check(result, requests):
    """Every row of every record. Returns the changed rows, and those behind an accepted draft."""
    seen = behind = 0
    for item in requests:
        params, emitted = item.params, []
        for record in result.records[item.id]:
            output, count = result.outputs[record.step], record.num_tokens
            own, changed = (x[record.slot][:count] for x in (output.logits, chose(output)))
            for n, token in enumerate(record.token_ids.tolist()):
                expected = changed_row(own[n], params, item.prompt_token_ids, emitted)
                np.testing.assert_allclose(changed[n], expected, rtol=1e-6, atol=1e-5)
                if params.temperature == 0:
                    assert expected[token] >= expected.max() - 1e-5
                else:
                    assert in_mode.logprobs(
                        changed[n], replace(params, logprobs_mode=PROCESSED)
                    )[token] > -np.inf  # fmt: skip
                emitted.append(token)
                seen += params.changes_logits
                behind += params.changes_logits and n > 0
            rows = changed if params.logprobs_mode is PROCESSED else own
            if count and params.logprobs is not None:
                in_mode.check_rows(rows, params, record.token_ids, record.logprobs,
                                   record.topk_ids, record.token_ranks)  # fmt: skip
            for n in range(count if params.kept_token_ids else 0):
                kept = in_mode.logprobs(changed[n], replace(params, logprobs_mode=PROCESSED))
                assert record.kept.ids(n).tolist() == np.flatnonzero(kept > -np.inf).tolist()
        if params.min_tokens:
            assert not {*emitted[: params.min_tokens]} & {*params.stop_token_ids}
    return seen, behind


@pytest.fixture(scope="module")
def changed():
    return run(asking(), "mtp")


def test_every_row_is_chosen_and_scored_as_the_contract_says(changed):
    """Raw logprobs are the model's own though the choice is another, and ranks say so."""
    seen, behind = check(changed, asking())
    assert seen > 120
    assert behind > 20
    ended = [changed.records[r.id][-1].finish_reason for r in asking() if r.params.min_tokens]
    assert FinishReason.STOP_TOKEN in ended  # once the first tokens are out
    ranks = [
        record.token_ranks
        for item in asking()
        if item.params.temperature == 0 and item.params.logprobs_mode is not PROCESSED
        for record in changed.records[item.id]
    ]
    assert (np.concatenate(ranks) > 1).sum() > 10


def test_masks_and_biases_alone_are_handed_down_and_make_no_copy():
    """Each kind alone and both, greedy and sampled, in every mode; no slot has penalties.

    The first request outlives the others and asks for the most, but for a mask: two programs.
    """
    changes = [CHANGES["bias"], CHANGES["min_tokens"], CHANGES["bias"] | CHANGES["min_tokens"], {}]
    modes = PROCESSED, RAW, SCALED
    requests = [
        request(f"r{n}", [*range(2 + n % 5), 5, 5], max_tokens=9 if n else 80, seed=n,
                kept_token_ids=n % 3 == 0, logprobs=2 - n % 3, logprobs_mode=modes[n // 3 % 3],
                **(changes[n % 4] if n else CHANGES["bias"]), **({} if n % 2 else SAMPLED))
        for n in range(12)
    ]  # fmt: skip
    result = run(requests, "ngram")
    assert all(output.changed is None for output in result.outputs)
    handed_down = [output.changes for output in result.outputs if output.changes is not None]
    assert {changes.allowed is None for changes in handed_down} == {True, False}
    seen, behind = check(result, requests)
    assert seen > 60
    assert behind > 5


@pytest.mark.parametrize("name", ["ngram", "none"])
@pytest.mark.slow
def test_greedy_tokens_are_those_of_any_drafter(changed, name):
    greedy = [item for item in asking() if item.params.temperature == 0]
    other = run([asking()[0], *greedy], name)
    check(other, [asking()[0], *greedy])
    for item in greedy:
        assert other.token_ids(item.id) == changed.token_ids(item.id)


@pytest.mark.slow
def test_prompts_and_drafts_are_scored_as_without_changes():
    """Prompts by the same request without changes, drafts by the draft model's own logits."""
    given = {"max_tokens": 9, "logprobs": 3, "logprobs_mode": PROCESSED, "draft_logprobs": True,
             "prompt_logprobs": 3}  # fmt: skip
    prompt = [3, 5, 3, 5, 4, 9]
    requests = [
        request(name, prompt, **given | SAMPLED | changes)
        for name, changes in (("changed", ALL | {"stop_token_ids": ()}), ("plain", {}))
    ]
    result = run(requests, "mtp")
    ours, theirs = (
        [record.prompt for record in result.records[name] if record.prompt is not None]
        for name in ("changed", "plain")
    )
    assert sum(len(part.token_ids) for part in theirs) == len(prompt) - 1
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.topk_ids, other.topk_ids)
    assert min(in_mode.check_records(result, requests, drafts_alone=["changed"])) > 0


@pytest.mark.slow
def test_a_row_of_which_nothing_is_left_ends_the_step():
    """Every token may not come yet: the lowest one comes, with the model's own logprob."""
    item = request("r", [1, 2, 3], max_tokens=9, min_tokens=3, logprobs=0, presence_penalty=1.0,
                   stop_token_ids=range(VOCAB))  # fmt: skip
    (record,) = [one for one in run([item], "ngram").records["r"] if one.num_tokens]
    assert record.token_ids.tolist() == [0]
    assert record.finish_reason is FinishReason.STOP_TOKEN
    assert np.isfinite(record.logprobs).all()
    assert record.valid.all()


def test_tokens_do_not_depend_on_the_company(changed):
    """Beside one other or many, in any slot: the same tokens, and logprobs bit for bit."""
    for n in (1, 5, 13):
        item = asking()[n]
        alone = run([item, asking()[0]], "mtp")
        assert alone.token_ids(item.id) == changed.token_ids(item.id)
        for ours, theirs in zip(alone.records[item.id], changed.records[item.id], strict=True):
            np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


@pytest.mark.slow
def test_a_request_without_changes_gets_the_same_beside_those_that_have_some(changed):
    """Alone, it runs the program that knows of none."""
    for item in (asking()[6], asking()[12]):
        alone = run([item], "mtp")
        assert all(output.changed is output.changes is None for output in alone.outputs)
        assert alone.token_ids(item.id) == changed.token_ids(item.id)


def test_a_request_that_goes_on_elsewhere_counts_what_was_emitted_there():
    """Evicted twice: emitted tokens are told from the prompt, and the first ones are counted.

    Next to the first request of `asking`, it has the programs of all of them.
    """
    changes = ALL | {"min_tokens": 14, "stop_token_ids": STOPS[2:], "presence_penalty": -0.5}
    item = request("r", [1, 2, 3], max_tokens=24, **changes)
    local, other = Local("mtp"), asking()[0]
    local.admit(other)
    emitted = tokens_of(local.decode_evicted(item, [4, 12]))
    assert emitted == run([other, item], "mtp").token_ids("r")
    assert not {*emitted[:14]} & {*STOPS[2:]}


PROMPT = (5, 9, 5)


@functools.cache
def conditional(prefix, changes=True):
    """Probabilities [V] float64 of the token after the prompt and `prefix`."""
    params, config = random_model()
    row = reference_model.logits(named_arrays(params), config.to_dict(), [*PROMPT, *prefix])[-1]
    asks = request("r", PROMPT, max_tokens=9, **ALL | CHANCES).params
    if changes:
        row = changed_row(row, asks, PROMPT, prefix)
    return expected_probs(row, asks.temperature, 0, asks.top_p, 0.0)


@pytest.mark.parametrize("name", ["mtp", pytest.param("ngram", marks=pytest.mark.slow)])
def test_sampled_tokens_follow_the_changed_distribution(name):
    requests = [request(str(n), PROMPT, seed=n, max_tokens=3, **ALL | CHANCES) for n in range(300)]
    result = run(requests, name)
    sequences = [tuple(result.token_ids(item.id)) for item in requests]
    assert 20 < result.state.statistics.num_accepted < result.state.statistics.num_drafts - 20
    assert p_value(sequences, conditional) > 1e-3
    assert p_value(sequences, functools.partial(conditional, changes=False)) < 1e-9

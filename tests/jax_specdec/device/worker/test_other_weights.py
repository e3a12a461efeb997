"""Weights that change while requests run: what a worker does with them between two of its steps."""

import functools

import jax
import numpy as np
import pytest

from jax_specdec.control import Commit, Discard, Prepare, Release
from jax_specdec.device.model.params import named_arrays
from tests.support import reference_model
from tests.support.decoding import VOCAB, Local, random_model, request, tokens_of
from tests.support.weights_by_version import check_scores

FACTORS = {0: 1.0, 1: 1.25, 2: 0.8}  # of the matrices, by version


@functools.cache
def scaled(factor):
    """The random model's weights with other matrices."""
    params, _ = random_model()
    return jax.tree.map(lambda x: x * factor if x.ndim > 2 else x, params)


def load(path, current):
    """What a worker reads: a version's weights, or such as do not fit."""
    if path == "missing":
        raise FileNotFoundError("no checkpoint at missing")
    params = scaled(FACTORS.get(path, 1.0))
    if path == "narrow":
        return jax.tree.map(lambda x: x[..., :-1], params)
    if path == "whole":
        return jax.tree.map(lambda x: x.astype("int32"), params)
    return params.layers if path == "headless" else params


class Updating(Local):
    """A worker that gets other weights."""

    def __init__(self, *items):
        super().__init__("ngram", load=load)
        self.number = 0
        for item in items:
            self.admit(item)

    def prepare(self, path):
        self.number += 1
        self.worker.apply(Prepare(number=self.number, path=path))
        return self.worker.next_weights.refusal

    def update(self, version):
        assert self.prepare(version) == ""
        self.worker.apply(Commit(number=self.number, version=version))

    def finish(self):
        while self.worker.busy:
            self.advance()

    def versions(self, item):
        """Those of a request's tokens, which they have their logprobs of."""
        weights = {version: scaled(factor) for version, factor in FACTORS.items()}
        return check_scores(weights, random_model()[1], [item], self.records)


def requests():
    """Of a greedy and a sampled request, and of one with a long prompt whose logprobs it wants."""
    random = np.random.default_rng(5)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (17, 3, 41)]
    return [
        request("greedy", prompts[0], max_tokens=60, logprobs=4, draft_logprobs=True),
        request("sampled", prompts[1], max_tokens=50, logprobs=0, temperature=0.8, seed=3),
        request("scored", prompts[2], max_tokens=14, logprobs=2, prompt_logprobs=1),
    ]


def test_every_token_is_scored_by_the_weights_that_it_names():
    """Of three requests and two updates: one inside the prompt whose logprobs are wanted."""
    *first, scores = requests()
    local = Updating(*first)
    local.advance(6)
    local.admit(scores)
    local.advance(3)  # of the prompt's six chunks
    local.update(1)
    local.advance(14)
    local.update(2)
    local.finish()
    for item in requests():
        found = [r for r in local.records[item.id] if r.num_tokens or r.prompt]
        met = [record.weights_version for record in found]
        assert met == sorted(met)
        assert {*met} == {0, 1, 2} >= local.versions(item) >= {2}, item.id
        assert len(tokens_of(found)) == item.params.max_tokens
    ids, sizes, rows = scores.prompt_token_ids, random_model()[1].to_dict(), []
    for record in [record for record in local.records["scored"] if record.prompt]:
        part, weights = record.prompt, named_arrays(scaled(FACTORS[record.weights_version]))
        places = range(part.start, part.start + len(part.token_ids))
        table = reference_model.logprobs(weights, sizes, ids)
        expected = [table[place - 1][ids[place]] for place in places]
        np.testing.assert_allclose(part.logprobs[:, 0], expected, atol=1e-4)
        assert part.token_ids.tolist() == [ids[place] for place in places]
        rows += places
    assert rows == [*range(1, 41)]


def test_a_request_whose_tokens_run_again_goes_on_counting_them():
    """Equal weights: penalties and `min_tokens` look at the prompt and the output as before."""
    changed = {"presence_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 30}
    stops = tuple(range(VOCAB // 2))
    item = request("a", [5, 6, 7], max_tokens=60, stop_token_ids=stops, **changed)

    def tokens(updates):
        local = Updating(item)
        for at in range(12):
            local.advance()
            if at in updates:
                local.update(0)
        local.finish()
        return tokens_of(local.records["a"])

    undisturbed = tokens(())
    assert 30 < len(undisturbed) < 60
    assert tokens((2, 9)) == undisturbed


def test_nothing_is_compiled_for_other_weights():
    local, sizes = Updating(*requests()[:2]), []
    for number in range(1, 7):  # what runs tokens again does so in chunks of every size
        local.advance(4)
        local.update(number % 3)
        local.advance()
        programs = vars(local.shared).values()
        sizes.append([each._cache_size() for each in programs if hasattr(each, "_cache_size")])
    assert sizes[2:] == 4 * [sizes[2]]


def test_what_does_not_fit_is_refused_and_changes_nothing():
    item = requests()[0]
    local = Updating(item)
    local.advance(4)
    for path, message in (
        ("missing", "no checkpoint at missing"),
        ("narrow", "embedding is float32 [32, 15]; the weights in use have float32 [32, 16]"),
        ("whole", "embedding is int32"),
        ("headless", "the weights are"),
    ):
        refusal = local.prepare(path)
        assert refusal.startswith(message), refusal
        with pytest.raises(ValueError, match=f"update {local.number} .* was not prepared"):
            local.worker.apply(Commit(number=local.number, version=9))
    assert local.prepare(1) == ""
    local.worker.apply(Discard(number=local.number))
    with pytest.raises(ValueError, match="was not prepared"):
        local.worker.apply(Commit(number=local.number, version=9))
    local.finish()
    assert local.versions(item) == {0}


def test_a_prompt_is_not_taken_over_from_caches_of_older_weights():
    prompt = list(range(1, 26))
    first, second = (request(name, prompt, max_tokens=8, logprobs=0) for name in "ab")
    local = Updating(first)
    local.finish()
    local.rank.leave("a")
    local.update(1)
    local.admit(second)
    local.finish()
    assert local.worker.prefixes.reused == 0
    assert local.versions(second) == {1}


def test_freed_and_evicted_slots_stay_as_they_are():
    local = Updating(*requests()[:2])
    local.advance(4)
    local.rank.evict("greedy", reschedule=True)
    slot = local.rank.slots["sampled"]
    local.worker.apply(Release(slot=slot, generation=local.rank.generations[slot]))
    local.update(1)
    local.finish()
    assert local.records["greedy"][-1].reschedule
    assert not local.worker.busy
    assert {r.weights_version for r in local.records["sampled"]} == {0}


def test_handed_over_drafts_outlive_an_update():
    local, item = Updating(), requests()[0]
    local.admit(item, draft_token_ids=(1, 2))
    local.update(1)
    local.finish()
    first = next(record for record in local.records["greedy"] if record.num_tokens)
    assert first.num_drafts == 2
    assert local.versions(item) == {1}

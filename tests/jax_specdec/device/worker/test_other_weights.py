"""Weights that change while requests run: what a worker does with them between two of its steps."""

import functools

import jax
import numpy as np
import pytest

from jax_specdec.control import Commit, Discard, Prepare, Release
from jax_specdec.device.model.params import named_arrays
from tests.support import reference_model
from tests.support.decoding import VOCAB, Local, random_model, request, tokens_of

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
    """A worker that gets other weights, its session, and the records of its requests."""

    def __init__(self, drafting, **options):
        super().__init__(drafting, load=load, **options)
        self.records, self.number = {}, 0

    def prepare(self, path):
        self.number += 1
        self.worker.apply(Prepare(number=self.number, path=path))
        return self.worker.next_weights.refusal

    def update(self, version):
        assert self.prepare(version) == ""
        self.worker.apply(Commit(number=self.number, version=version))

    def steps(self, count):
        for _ in range(count):
            for record in self.advance():
                self.records.setdefault(record.request_id, []).append(record)

    def finish(self):
        while self.worker.busy:
            self.steps(1)

    def emitted(self, name):
        return tokens_of(self.records[name])


def by_version(local, item):
    """Check the logprobs of a request's tokens, each under its version; returns the versions.

    Against a separate forward pass over the whole sequence, in float64.
    """
    ids, sizes = [*item.prompt_token_ids, *local.emitted(item.id)], random_model()[1].to_dict()
    tables = {
        version: reference_model.logprobs(named_arrays(scaled(factor)), sizes, ids)
        for version, factor in FACTORS.items()
    }
    place, versions = len(item.prompt_token_ids), []
    for record in local.records[item.id]:
        rows, start = (record, place) if record.prompt is None else (record.prompt, None)
        start = rows.start if start is None else start
        place += record.num_tokens
        if not (record.num_tokens or record.prompt):
            continue
        table = tables[record.weights_version][start - 1 :][: len(rows.token_ids)]
        expected = table[np.arange(len(table)), rows.token_ids]
        np.testing.assert_allclose(rows.logprobs[:, 0], expected, atol=1e-4)
        np.testing.assert_array_equal(rows.token_ids, ids[start : start + len(table)])
        versions.append(record.weights_version)
    return versions


def requests():
    """Of a greedy and a sampled request, and of one with a long prompt whose logprobs it wants."""
    random = np.random.default_rng(5)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (17, 3, 41)]
    return [
        request("greedy", prompts[0], max_tokens=60, logprobs=4, draft_logprobs=True),
        request("sampled", prompts[1], max_tokens=50, logprobs=0, temperature=0.8, seed=3),
        request("scored", prompts[2], max_tokens=14, logprobs=2, prompt_logprobs=1),
    ]


def updated_twice(drafting, **options):
    """Three requests and two updates: one of them inside the prompt whose logprobs are wanted."""
    local = Updating(drafting, **options)
    for item in requests()[:2]:
        local.admit(item)
    local.steps(6)
    local.admit(requests()[2])
    local.steps(3)  # of the prompt's six chunks
    local.update(1)
    local.steps(14)
    local.update(2)
    local.finish()
    return local


def test_every_token_is_scored_by_the_weights_that_it_names():
    local = updated_twice("ngram")
    for item in requests():
        versions = by_version(local, item)
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2}, item.id
        assert len(local.emitted(item.id)) == item.params.max_tokens
    prompt = [r.prompt for r in local.records["scored"] if r.prompt is not None]
    assert [row for part in prompt for row in range(part.start, part.start + len(part.token_ids))] \
        == list(range(1, 41))  # fmt: skip


def test_a_request_whose_tokens_run_again_goes_on_counting_them():
    """Equal weights: penalties and `min_tokens` look at the prompt and the output as before."""
    changed = {"presence_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 30}
    stops = tuple(range(VOCAB // 2))
    item = request("a", [5, 6, 7], max_tokens=60, stop_token_ids=stops, **changed)

    def tokens(updates):
        local = Updating("ngram")
        local.admit(item)
        for at in range(12):
            local.steps(1)
            if at in updates:
                local.update(0)
        local.finish()
        return local.emitted("a")

    undisturbed = tokens(())
    assert 30 < len(undisturbed) < 60
    assert tokens((2, 9)) == undisturbed


def test_nothing_is_compiled_for_other_weights():
    local = Updating("ngram")
    sizes = []
    for item in requests()[:2]:
        local.admit(item)
    for number in range(1, 7):  # what runs tokens again does so in chunks of every size
        local.steps(4)
        local.update(number % 3)
        local.steps(1)
        programs = vars(local.shared).values()
        sizes.append([each._cache_size() for each in programs if hasattr(each, "_cache_size")])
    assert sizes[2:] == 4 * [sizes[2]]


def test_what_does_not_fit_is_refused_and_changes_nothing():
    local = Updating("ngram")
    item = requests()[0]
    local.admit(item)
    local.steps(4)
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
    assert set(by_version(local, item)) == {0}


def test_a_prompt_is_not_taken_over_from_caches_of_older_weights():
    local = Updating("ngram")
    prompt = list(range(1, 26))
    first, second = (request(name, prompt, max_tokens=8, logprobs=0) for name in "ab")
    local.admit(first)
    local.finish()
    local.rank.leave("a")
    local.update(1)
    local.admit(second)
    local.finish()
    assert local.worker.prefixes.reused == 0
    assert set(by_version(local, second)) == {1}


def test_a_slot_that_was_freed_and_one_that_is_evicted_stay_as_they_are():
    local = Updating("ngram")
    for item in requests()[:2]:
        local.admit(item)
    local.steps(4)
    local.rank.evict("greedy", reschedule=True)
    slot = local.rank._slots["sampled"]
    local.worker.apply(Release(slot=slot, generation=local.rank._generations[slot]))
    local.update(1)
    local.finish()
    assert local.records["greedy"][-1].reschedule
    assert not local.worker.busy
    assert {r.weights_version for r in local.records["sampled"]} == {0}


def test_drafts_that_were_handed_over_outlive_an_update_until_they_are_verified():
    local = Updating("ngram")
    item = requests()[0]
    local.admit(item, draft_token_ids=(1, 2))
    local.update(1)
    local.finish()
    first = next(record for record in local.records["greedy"] if record.num_tokens)
    assert first.num_drafts == 2
    assert set(by_version(local, item)) == {1}

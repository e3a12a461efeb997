"""A smaller model that drafts: its drafts against float64, its cache, and what it may propose."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting import Chunk, DraftModel, make_drafter
from jax_specdec.device.model.params import named_arrays
from tests.support import decoding, hf_files, reference_model
from tests.support.shape_checks import as_users_run

V, DRAFTS, TOLERANCE = 32, 3, 1e-4
TARGET = ModelConfig.tiny(V, num_mtp_layers=0)
# Another family, with fewer ids: it slides, so a wrong position shows.
SMALL = ModelConfig.tiny(
    V - 5, num_layers=1, num_mtp_layers=0, head_dim=4, sliding_window=4, sliding_layers=(0,)
)
PROMPTS = {"a": list(range(2, 21)), "b": [7], "c": [3, 30, 31, 3]}


def model(small, seed=5):
    draft = hf_files.random_params(small, seed=seed)
    return dataclasses.replace(hf_files.random_params(TARGET), draft=draft), TARGET


def requests(**params):
    return [decoding.request(id, ids, max_tokens=24, **params) for id, ids in PROMPTS.items()]


def drafts_of(run, slot, prompt, ids):
    """The known tokens and the drafts that followed them, for each step of a slot."""
    known = len(prompt)
    for output in run.outputs:
        if output.num_tokens[slot]:
            number = int(output.num_drafts[slot])
            yield [*prompt, *ids][:known], output.drafts.token_ids[slot, :number].tolist()
            known += int(output.num_tokens[slot])
    assert known == len(prompt) + len(ids)


def test_every_draft_is_the_small_models_and_no_token_changes():
    params, config = model(SMALL)
    run = decoding.run(requests(), DraftModel(SMALL, TARGET, DRAFTS), model=(params, config))
    weights = {name: np.asarray(x) for name, x in named_arrays(params.draft).items()}
    own = {name: np.asarray(x) for name, x in named_arrays(params).items() if "draft" not in name}
    clear = other = 0
    for slot, (id, prompt) in enumerate(PROMPTS.items()):
        ids = run.token_ids(id)
        rows = reference_model.logits(own, TARGET.to_dict(), prompt + ids)[len(prompt) - 1 : -1]
        gap = np.diff(np.sort(rows, axis=1)[:, -2:], axis=1)[:, 0]
        assert (rows.argmax(axis=1) == ids)[gap > TOLERANCE].all()  # greedy: as without drafts
        for known, drafts in drafts_of(run, slot, prompt, ids):
            text = np.minimum([*known, *drafts], SMALL.vocab_size - 1)
            found = reference_model.logits(weights, SMALL.to_dict(), text)[len(known) - 1 : -1]
            for row, draft in zip(found, drafts, strict=True):
                second, best = np.sort(row)[-2:]
                if best - second > TOLERANCE:
                    clear += 1
                    other += draft != row.argmax()
    assert clear > 60
    assert other == 0


@pytest.mark.slow
def test_drafts_of_the_target_itself_are_all_accepted():
    """Greedy and sampled: then q is p, where a wrong cache entry or position would show."""
    params, config = model(TARGET, seed=0)  # the target's own weights
    drafter = DraftModel(TARGET, TARGET, DRAFTS)
    mixed = [*requests(), decoding.request("s", [4, 5], max_tokens=24, temperature=0.9, seed=3)]
    accepted = {}
    for name, draft in (("same", params.draft), ("other", hf_files.random_params(TARGET, seed=9))):
        weights = dataclasses.replace(params, draft=draft)
        run = decoding.run(mixed, drafter, model=(weights, config))
        statistics = [run.records[one.id][-1].statistics for one in mixed]
        assert all(one.num_drafts > 10 for one in statistics)
        accepted[name] = [one.num_accepted / one.num_drafts for one in statistics]
    assert min(accepted["same"]) > 0.9  # the last step's drafts may be cut by the length
    assert max(accepted["other"]) < 0.9  # negative control


@pytest.mark.fast
@pytest.mark.parametrize(("small", "target"), [(27, 32), (32, 27), (32, 32)])
@pytest.mark.parametrize("padding", [0, 3])
def test_ids_that_only_one_vocabulary_has_are_never_proposed(small, target, padding):
    configs = (
        ModelConfig.tiny(small, vocab_padding=padding), ModelConfig.tiny(target, vocab_padding=2)
    )  # fmt: skip
    drafter = DraftModel(*configs, 1)
    logits = jnp.arange(2.0 * (small + padding)).reshape(2, 1, -1)
    logits = jnp.where(jnp.arange(small + padding) < small, logits, -jnp.inf)
    found = np.asarray(drafter._in_target(logits))
    both = min(small, target)
    assert found.shape == (2, 1, target + 2)
    np.testing.assert_array_equal(found[..., :both], logits[..., :both])
    assert (found[..., both:] == -np.inf).all()


@pytest.mark.fast
def test_what_is_missing_is_said():
    with pytest.raises(ValueError, match="needs a draft_model: a smaller one"):
        make_drafter("model", 3, TARGET)
    with pytest.raises(ValueError, match="num_drafts = 0 must be positive"):
        DraftModel(SMALL, TARGET, 0)
    assert make_drafter("model", 2, TARGET, draft_model=SMALL) == DraftModel(SMALL, TARGET, 2)
    prefill = as_users_run(DraftModel.prefill)
    with pytest.raises(ValueError, match="these parameters have no draft model"):
        prefill(DraftModel(SMALL, TARGET, 1), model(SMALL)[0].draft, None, Chunk(*[None] * 6))

"""Models that draft, a smaller one and the MTP head: against NumPy without a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting import Chunk, DraftModel, make_drafter
from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop.host_slots import admission
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.model.params import named_arrays
from pallas_kernels.numbers.random_draws import DRAFT, Source, gumbel
from tests.support import decoding, hf_files, quick_compile, reference_model
from tests.support.decoding import VOCAB, compiled, random_model, request, run
from tests.support.expected_probs import expected_probs
from tests.support.shape_checks import as_users_run

V, DRAFTS, TOLERANCE = 32, 3, 1e-4
TARGET = ModelConfig.tiny(V, num_mtp_layers=0)
# Another family, with fewer ids: it slides, so a wrong position shows.
SMALL = ModelConfig.tiny(
    V - 5, num_layers=1, num_mtp_layers=0, head_dim=4, sliding_window=4, sliding_layers=(0,)
)
PROMPTS = {"a": list(range(2, 21)), "b": [7], "c": [3, 30, 31, 3]}


def params_with_draft():
    draft = hf_files.random_params(SMALL, seed=5)
    return dataclasses.replace(hf_files.random_params(TARGET), draft=draft)


def test_every_draft_is_the_small_models_and_no_token_changes():
    params = params_with_draft()
    requests = [decoding.request(id, ids, max_tokens=24) for id, ids in PROMPTS.items()]
    run = decoding.run(requests, DraftModel(SMALL, TARGET, DRAFTS), model=(params, TARGET))
    weights = {name: np.asarray(x) for name, x in named_arrays(params.draft).items()}
    own = {name: np.asarray(x) for name, x in named_arrays(params).items() if "draft" not in name}
    clear = other = 0
    for slot, (id, prompt) in enumerate(PROMPTS.items()):
        ids = run.token_ids(id)
        rows = reference_model.logits(own, TARGET.to_dict(), prompt + ids)[len(prompt) - 1 : -1]
        gap = np.diff(np.sort(rows, axis=1)[:, -2:], axis=1)[:, 0]
        assert (rows.argmax(axis=1) == ids)[gap > TOLERANCE].all()  # greedy: as without drafts
        known = len(prompt)
        for output in run.outputs:
            if not output.num_tokens[slot]:
                continue
            drafts = output.drafts.token_ids[slot, : output.num_drafts[slot]].tolist()
            text = np.minimum([*[*prompt, *ids][:known], *drafts], SMALL.vocab_size - 1)
            found = reference_model.logits(weights, SMALL.to_dict(), text)[known - 1 : -1]
            known += int(output.num_tokens[slot])
            for row, draft in zip(found, drafts, strict=True):
                second, best = np.sort(row)[-2:]
                if best - second > TOLERANCE:
                    clear += 1
                    other += draft != row.argmax()
        assert known == len(prompt) + len(ids)
    assert clear > 60
    assert other == 0


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
        prefill(DraftModel(SMALL, TARGET, 1), params_with_draft().draft, None, Chunk(*[None] * 6))


# The MTP head inside the loop: its drafts after each step ----------------------------------------

D, CHUNK, LENGTH, TEMPERATURE, SEED = 3, 8, 96, 0.8, 11


def draft_logits(ids, drafts):
    """The head's logits [D, V] for each of `drafts` after `ids`: it is fed its own output."""
    params, config = random_model()
    weights, sizes = named_arrays(params), config.to_dict()
    hidden = reference_model.hidden_states(weights, sizes, ids)[:-1]
    following, rows = list(ids[1:]), []
    head = weights.get("head", weights["embedding"].T)
    for draft in drafts:
        own = reference_model.mtp_hidden(weights, sizes, hidden, following)[-1:]
        rows.append(own[0] @ np.asarray(head, np.float64))
        hidden, following = np.concatenate([hidden, own]), [*following, draft]
    known = reference_model.mtp_logits(weights, sizes, ids)[-1]
    np.testing.assert_allclose(rows[0], known, atol=1e-9)
    return np.stack(rows)


def written_out(q, slot):
    """q of a slot's drafts over the whole vocabulary: [D, V]."""
    table = np.zeros((D, VOCAB))
    for row, ids, logprobs in zip(table, q.ids[slot], q.logprobs[slot], strict=True):
        row[ids[ids >= 0]] = np.exp(logprobs[ids >= 0])
    return table


@quick_compile.jit
def drawn_again(state):
    """The tokens [B, D] that noise of each token gives from the loop's own q."""
    places = state.lengths[:, None] + jnp.arange(D, dtype=jnp.int32)[None, :]
    source = Source(jnp.full(places.size, SEED, jnp.uint32), places.reshape(-1))
    ids = state.drafts.q.ids.reshape(places.size, -1)
    scores = state.drafts.q.logprobs.reshape(ids.shape) + gumbel(source, DRAFT, ids)
    best = jnp.take_along_axis(ids, jnp.argmax(scores, axis=1)[:, None], axis=1)
    return best.reshape(places.shape)


def texts(state):
    """The known tokens of each slot."""
    tokens, lengths = jax.device_get((state.tokens, state.lengths))
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


@pytest.mark.long
def test_the_loop_drafts_what_the_head_says_at_every_acceptance():
    """Prompts of several chunks; greedy slots accept 0 to 3 drafts, in every order."""
    params, model = random_model()
    config = LoopConfig(model, MtpDrafter(model, D), num_slots=3, max_length=LENGTH)
    functions = compiled(config)
    random, state = np.random.default_rng(4), init_state(config)
    items = [
        request(str(n), random.integers(0, VOCAB, n).tolist(), max_tokens=60, temperature=t,
                seed=SEED) for n, t in ((21, 0.0), (2, 0.0), (26, TEMPERATURE))
    ]  # fmt: skip
    plain = run(items[:2], "none")
    greedy = [[*item.prompt_token_ids, *plain.token_ids(item.id)] for item in items[:2]]
    for slot, item in enumerate(items):
        state = functions.admit(state, jnp.int32(slot), admission(item, LENGTH, D))
        for start in range(0, len(item.prompt_token_ids) - 1, CHUNK):
            state = functions.prefill_chunk(
                params, state, jnp.int32(slot), jnp.int32(start), chunk=CHUNK
            )
    accepted_then = set()
    for wanted in [(0, 0), (0, 3), None, (0, 0), (1, 2), (3, 1), (2, 0)]:
        if wanted is None:  # a step of width 0 draws none, and leaves what the next drafts need
            state, _ = functions.step(params, state, num_drafts=0)
            assert not state.drafts.num.any()
            continue
        right = np.array(state.drafts.token_ids)
        for slot, count in enumerate(wanted):
            right[slot] = greedy[slot][len(texts(state)[slot]) :][:D]
            right[slot, count:] = (right[slot, count:] + 1) % VOCAB
        verifies = bool(state.drafts.num.any())
        drafts = state.drafts._replace(token_ids=jnp.asarray(right))
        state, output = functions.step(params, state._replace(drafts=drafts))
        if verifies:
            assert tuple(np.asarray(output.num_tokens)[:2] - 1) == wanted
        accepted_then |= set(np.asarray(output.num_tokens).tolist())
        again, drafts = jax.device_get((drawn_again(state), state.drafts))
        for slot, text in enumerate(texts(state)):
            drafted = drafts.token_ids[slot]
            expected = draft_logits(text, drafted)
            temperature = TEMPERATURE if slot == 2 else 0.0
            q = np.stack([expected_probs(row, temperature, 0, 1.0, 0.0) for row in expected])
            # Float32 through three passes of the head; a wrong input would be off by about 1.
            np.testing.assert_allclose(written_out(drafts.q, slot), q, atol=1e-3)
            wanted_ids = again[slot] if slot == 2 else expected.argmax(axis=1)
            np.testing.assert_array_equal(drafted, wanted_ids)
    assert accepted_then == {1, 2, 3, 4}

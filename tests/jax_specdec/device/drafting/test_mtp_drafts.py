"""The MTP head inside the loop: its drafts after each step, against NumPy without any cache."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop.host_slots import admission
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.model.params import named_arrays
from pallas_kernels.numbers.random_draws import DRAFT, Source, gumbel
from tests.support import quick_compile, reference_model
from tests.support.decoding import VOCAB, compiled, random_model, request
from tests.support.expected_probs import expected_probs

D, CHUNK, LENGTH, TEMPERATURE, SEED = 3, 8, 96, 0.8, 11


def plain_continuation(ids, count):
    """The target's own greedy tokens after `ids`."""
    params, config = random_model()
    ids = list(ids)
    for _ in range(count):
        row = reference_model.logits(named_arrays(params), config.to_dict(), ids)[-1]
        ids.append(int(np.argmax(row)))
    return ids[-count:]


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


def test_the_loop_drafts_what_the_head_says_at_every_acceptance():
    """Prompts of several chunks; greedy slots accept 0 to 3 drafts, in every order."""
    params, model = random_model()
    config = LoopConfig(model, MtpDrafter(model, D), num_slots=3, max_length=LENGTH)
    functions = compiled(config)
    random = np.random.default_rng(4)
    state = init_state(config)
    for slot, (size, temperature) in enumerate([(21, 0.0), (2, 0.0), (26, TEMPERATURE)]):
        item = request("r", random.integers(0, VOCAB, size).tolist(), max_tokens=60,
                       temperature=temperature, seed=SEED)  # fmt: skip
        state = functions.admit(state, jnp.int32(slot), admission(item, LENGTH, D))
        for start in range(0, size - 1, CHUNK):
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
            right[slot] = plain_continuation(texts(state)[slot], D)
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

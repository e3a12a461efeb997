"""The joint law of (number, tokens) of D = 2 drafts against an exact enumeration in float64.

Certain drafts, a compact q, and a whole q of each form, by both rules, with filters, masks and
biases of the target. Slots are the samples: each has a seed of its own.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from pallas_kernels.sampling import CompactQ, DenseQ, Drafts, Sampling, verify
from tests.support import quick_compile
from tests.support.expected_probs import expected_probs

V, D, B = 6, 2, 8_000
FILTERS = {
    "plain": {"temperature": 1.3},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8, "temperature": 0.9},
    "min-p": {"min_p": 0.2},
    "changes": {"top_p": 0.95},
}
BIAS_IDS, BIAS, FORBIDDEN = [1, 4], [1.5, -0.7], 2


def target_rows():
    """Logits after each prefix of drafts: [], [a], [a, b]; the law needs them all."""
    rng = np.random.default_rng(3)
    shape = (1 + V + V * V, V)
    return rng.normal(0, 1.5, shape).astype(np.float32)


def q_rows():
    """q of the first draft, and of the second after each first one; some tokens it cannot draw."""
    rng = np.random.default_rng(4)
    q = rng.dirichlet(np.full(V, 0.8), 1 + V).astype(np.float32)
    q[:, 5] = 0
    return q / q.sum(axis=1, keepdims=True)


@functools.cache
def samples(seed=0):
    """Drafts [B, 2] of B slots, drawn of q by NumPy."""
    rng = np.random.default_rng(seed)
    q = q_rows().astype(np.float64)
    first = rng.choice(V, B, p=q[0] / q[0].sum())
    second = np.array([rng.choice(V, p=row / row.sum()) for row in q[1 + first]])
    return np.stack([first, second], axis=1).astype(np.int32)


def changed(rows, kind):
    if kind == "changes":
        rows = rows.copy()
        rows[:, BIAS_IDS] += np.float32(BIAS)
        rows[:, FORBIDDEN] = -np.inf
    return rows


def expected_law(kind, rule, form):
    """The probability of each (number, tokens), by enumeration of drafts and of choices."""
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[kind]
    p = np.array([expected_probs(row, **options) for row in changed(target_rows(), kind)])
    q = q_rows().astype(np.float64)
    law = {}

    def add(tokens, chance):
        law[tokens] = law.get(tokens, 0.0) + chance

    def add_all(tokens, weights, chance):
        for token, weight in enumerate(weights / weights.sum() if weights.sum() else weights):
            add((*tokens, token), chance * weight)

    for a, b in itertools.product(range(V), range(V)):
        drafted = q[0, a] * q[1 + a, b]
        if not drafted:
            continue
        p0, p1, p2 = p[0], p[1 + a], p[1 + V + V * a + b]
        q0, q1 = q[0], q[1 + a]
        if form == "certain":
            q0, q1 = np.eye(V)[a], np.eye(V)[b]
        if rule == "token":
            first, second = min(1, p0[a] / q0[a]), min(1, p1[b] / q1[b])
            stops = [(1 - first, np.maximum(p0 - q0, 0)), (first * (1 - second),
                     np.maximum(p1 - q1, 0)), (first * second, p2)]  # fmt: skip
        else:
            w1 = min(1, p0[a] / q0[a])
            w2 = min(1, w1 * p1[b] / q1[b])
            mass = np.maximum(w1 * p1 - q1, 0).sum()
            h1 = mass / (mass + 1 - w1) if mass + 1 - w1 > 0 else 0.0
            stops = [((1 - h1) * (1 - w2), np.maximum(p0 - q0, 0)),
                     (h1 * (1 - w2), np.maximum(w1 * p1 - q1, 0)), (w2, p2)]  # fmt: skip
        for number, (chance, left) in enumerate(stops):
            if chance > 1e-12:
                add_all((a, b)[:number], left, drafted * chance)
    assert abs(sum(law.values()) - 1) < 1e-6
    return law


def q_of(form, ids):
    """The q of every slot's drafts in a form of the door."""
    of_slots = np.stack([np.broadcast_to(q_rows()[0], (B, V)), q_rows()[1 + ids[:, 0]]], axis=1)
    if form == "certain":
        return None
    with np.errstate(divide="ignore"):
        logprobs = np.log(of_slots)
    if form == "compact":
        tokens = np.where(of_slots > 0, np.arange(V, dtype=np.int32), -1)
        return CompactQ(jnp.asarray(tokens), jnp.asarray(logprobs))
    if form == "flat":
        rows = np.stack([np.zeros(B, np.int32), 1 + ids[:, 0]], axis=1)
        return DenseQ(jnp.log(jnp.asarray(q_rows())), jnp.asarray(rows))
    if form == "probs":
        return DenseQ.of_probs(jnp.asarray(of_slots))
    if form == "logits":  # at twice the temperature
        return DenseQ.of_logits(jnp.asarray(2 * logprobs + 3), 2.0)
    return DenseQ(jnp.asarray(logprobs))


@quick_compile.jit
def emitted(logits, drafts, sampling, changes):
    return verify(logits, drafts, sampling, jnp.zeros(B, jnp.int32), **changes)[:2]


@functools.partial(quick_compile.jit)
def emitted_together(logits, drafts, sampling, changes):
    found = verify(logits, drafts, sampling, jnp.zeros(B, jnp.int32), rule="block", **changes)
    return found[:2]


CASES = [
    *(("plain", "token", form) for form in ("certain", "compact", "flat")),
    *((kind, "token", "flat") for kind in ("top-p", "changes")),
    ("changes", "token", "compact"),
    *(("plain", "block", form) for form in ("compact", "flat")),
]
LONG = [("changes", "block", form) for form in ("compact", "flat")]
MORE = [
    *(("plain", "token", form) for form in ("dense", "probs", "logits")),
    *((kind, "token", "flat") for kind in ("top-k", "min-p")),
    *(("top-p", "token", form) for form in ("certain", "compact")),
    ("changes", "token", "certain"),
    *(("plain", "block", form) for form in ("probs", "logits")),
    *((kind, "block", "flat") for kind in ("top-k", "top-p", "min-p")),
    *((kind, "block", "compact") for kind in ("top-k", "min-p")),
]
CASES += [pytest.param(*case, marks=pytest.mark.long) for case in LONG]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize(("kind", "rule", "form"), CASES)
def test_emitted_tokens_follow_the_exact_joint_law(kind, rule, form):
    ids = samples()
    rows = target_rows()
    logits = np.stack([np.broadcast_to(rows[0], (B, V)), rows[1 + ids[:, 0]],
                       rows[1 + V + V * ids[:, 0] + ids[:, 1]]], axis=1)  # fmt: skip
    changes = {}
    if kind == "changes":
        shape = (B, D + 1)
        changes = {
            "allowed": jnp.full((*shape, 1), 2**V - 1 - 2**FORBIDDEN, jnp.int32),
            "bias_token_ids": jnp.broadcast_to(jnp.int32(BIAS_IDS), (*shape, 2)),
            "bias": jnp.broadcast_to(jnp.float32(BIAS), (*shape, 2)),
        }
    drafts = Drafts(jnp.asarray(ids), jnp.full(B, D, jnp.int32), q_of(form, ids))
    sampling = Sampling.of(B, seed=np.arange(B), **FILTERS[kind])
    call = emitted if rule == "token" else emitted_together
    token_ids, numbers = jax.device_get(call(jnp.asarray(logits), drafts, sampling, changes))
    counts = {}
    for row, number in zip(token_ids.tolist(), numbers.tolist(), strict=True):
        key = tuple(row[:number])
        counts[key] = counts.get(key, 0) + 1
    law = expected_law(kind, rule, form)
    assert p_value(counts, law) > 1e-4
    if kind == "plain" and rule == "block":  # the control: the other rule has another law
        assert p_value(counts, expected_law(kind, "token", form)) < 1e-9


def p_value(counts, law):
    """Of a chi-square test; 0 where something was emitted that the law does not have."""
    impossible = [key for key in counts if law.get(key, 0.0) < 1e-9]
    if impossible:
        return 0.0
    # Rare ones together: a chi-square wants five of each.
    common = [key for key in law if law[key] * B >= 8]
    observed = [counts.get(key, 0) for key in common]
    expected = [law[key] * B for key in common]
    rest = 1 - sum(law[key] for key in common)
    if rest * B >= 8:
        observed.append(B - sum(observed))
        expected.append(rest * B)
    expected = np.array(expected) * (sum(observed) / sum(expected))
    return scipy.stats.chisquare(observed, expected).pvalue

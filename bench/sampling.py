"""Verification, drawing and raw logprobs of sampled rows, beside the logprobs alone.

What sampling costs is its time over that of `topk_logprobs` (K = 20) of the same rows, in the same
run. The other peer is the sampler that a JAX user would write: softmax, `lax.top_k` or a sort,
`jax.random.categorical`, rejection of drafts by p and q. Its logprobs are those of the plain way.

Logits have the shape of real ones: a few likely tokens far above a long tail. The token of rank r
has the logit -a log(r) plus normal noise of 0.3, at a random place; a is from 1.4 to 2.6 by row.
Flat logits (normal noise of 0.1) are the worst case.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jax import lax

from bench.timing import BenchError, Comparison, Target, compare
from jax_specdec.device import Drafts, Sampling, verify
from pallas_kernels import topk_logprobs
from pallas_kernels.sampling import emitted_logprobs
from pallas_kernels.testing import plain as reference

K, POSITIONS = 20, 4
BUDGET = 1.0  # seconds of a way in one case, except for three rounds: some take half a minute
# Of a way's round. Its first call waits for what the way before it pushed out of the caches, for as
# long as half a call of few rows.
MIN_SECONDS = 0.05
LOGPROBS, OURS, PLAIN = "topk_logprobs, K = 20", "verify, draw and logprobs", "plain JAX sampler"
Filters = dict[str, Any]  # of a slot, beside temperature 1
KINDS: dict[str, tuple[Filters, float]] = {
    # With the limit over the logprobs alone.
    "temperature 1": ({}, 1.5),
    "temperature 0.8": ({"temperature": 0.8}, 2.0),
    "top-k 50": ({"top_k": 50}, 2.0),
    "top-k 128": ({"top_k": 128}, 2.0),
    "top-p 0.9": ({"top_p": 0.9}, 2.5),
    "min-p 0.02": ({"min_p": 0.02}, 2.5),
}
MIXED: tuple[Filters, ...] = ({"temperature": 0.0}, {}, {"top_k": 50}, {"top_p": 0.9})
MIXED_LIMIT = 3.0


@dataclass(frozen=True)
class Case:
    """A batch to sample from."""

    rows: int
    vocabulary: int
    dtype: str
    kind: str
    flat: bool = False

    @property
    def slots(self) -> int:
        """Requests of four rows each."""
        return self.rows // POSITIONS

    def title(self) -> str:
        """What is measured."""
        shape = "flat" if self.flat else "real-like"
        return f"sampling R={self.rows} V={self.vocabulary} {self.dtype}, {self.kind}, {shape}"


QUICK = tuple(
    Case(64, 151_936, "bfloat16", kind) for kind in ("temperature 1", "top-k 50", "top-p 0.9")
)
GRID = tuple(
    Case(rows, vocabulary, dtype, kind, flat)
    for rows in (16, 64, 256)
    for vocabulary in (32_000, 151_936)
    for flat in (False, True)
    for dtype in ("bfloat16", "float32")
    for kind in (*KINDS, "mixed")
)


def run(quick: bool) -> list[Comparison]:
    """Measure the grid; `quick` takes three of it."""
    return [measure(case) for case in (QUICK if quick else GRID)]


def measure(case: Case, rounds: int = 9) -> Comparison:
    """Compare the three on one batch. Raises BenchError if they do not sample alike."""
    logits = jnp.asarray(rows_of(case.slots, case.vocabulary, case.flat), jnp.dtype(case.dtype))
    drafts, sampling = drafts_of(logits), sampling_of(case)
    positions = jnp.zeros(case.slots, jnp.int32)
    ours, plain = jax.jit(our_way), jax.jit(plain_way, static_argnums=3)
    check_alike(case.kind, case.flat)
    flat = logits.reshape(-1, case.vocabulary)
    ids = jnp.argmax(flat, axis=1).astype(jnp.int32)
    alone = jax.jit(lambda x, ids: topk_logprobs(x, ids, K))

    def bound(call: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(call(*arguments))

    contenders = {
        LOGPROBS: bound(alone, flat, ids),
        OURS: bound(ours, logits, drafts, sampling, positions),
        PLAIN: bound(plain, logits, drafts, sampling, filters_of(case)),
    }
    found = compare(
        case.title(), contenders, check=None, rounds=rounds, min_seconds=MIN_SECONDS, budget=BUDGET,
        settings={"rows": case.rows, "vocabulary": case.vocabulary, "dtype": case.dtype,
                  "kind": case.kind, "flat": case.flat},
    )  # fmt: skip
    return replace(found, targets=targets_of(found, case))


def targets_of(found: Comparison, case: Case) -> tuple[Target, ...]:
    """At most so many times the logprobs alone, and never slower than the plain sampler."""
    over = found[OURS].median / found[LOGPROBS].median
    beside = Target("time over the plain sampler's", 1.0, 1 / found.speedup(OURS, PLAIN), "x")
    limit = MIXED_LIMIT if case.kind == "mixed" else KINDS[case.kind][1]
    if case.flat:
        return (beside,)
    return (Target("time over the logprobs alone", limit, over, "x"), beside)


@functools.lru_cache(maxsize=2)
def rows_of(slots: int, vocabulary: int, flat: bool) -> np.ndarray:
    """Logits [B, S, V] float32, see the module."""
    random, shape = np.random.default_rng(vocabulary + slots), (slots, POSITIONS, vocabulary)
    if flat:
        return random.normal(0, 0.1, shape).astype(np.float32)
    found = np.empty(shape, np.float32)
    tail = np.log(np.arange(1, vocabulary + 1))
    for index in np.ndindex(shape[:2]):
        row = -random.uniform(1.4, 2.6) * tail + random.normal(0, 0.3, vocabulary)
        found[index] = random.permutation(row)
    return found


def drafts_of(logits: jax.Array) -> Drafts:
    """Certain drafts: the most likely tokens, as an n-gram drafter that is often right."""
    ids = jnp.argmax(logits[:, :-1], axis=-1).astype(jnp.int32)
    return Drafts(ids, jnp.full(len(logits), POSITIONS - 1, jnp.int32))


def filters_of(case: Case) -> tuple[str, ...]:
    """What a user's program is compiled for: the filters that a batch has."""
    slots = MIXED if case.kind == "mixed" else (KINDS[case.kind][0],)
    return tuple(name for name in ("top_k", "top_p", "min_p") if any(name in one for one in slots))


def sampling_of(case: Case) -> Sampling:
    """The slots' parameters; of a mixed batch in turn."""
    kinds = MIXED if case.kind == "mixed" else (KINDS[case.kind][0],)
    return parameters([kinds[slot % len(kinds)] for slot in range(case.slots)])


def parameters(each: Sequence[Filters]) -> Sampling:
    """Of a slot each; what one does not name is off, and its temperature 1."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    given: dict[str, Any] = {
        name: np.array([one.get(name, x) for one in each]) for name, x in off.items()
    }
    return Sampling.of(len(each), seed=np.arange(len(each)), **given)


def our_way(logits: jax.Array, drafts: Drafts, sampling: Sampling, positions: jax.Array) -> Any:
    """The tokens, and the raw logprobs of all rows."""
    found = verify(logits, drafts, sampling, positions, k=K)
    assert found.read is not None
    raw = emitted_logprobs(logits, found)
    return found.token_ids, found.num_tokens, raw


def plain_way(
    logits: jax.Array, drafts: Drafts, sampling: Sampling, filters: tuple[str, ...]
) -> Any:
    """The same job as one writes it: every filter on whole rows, a categorical draw of the last."""
    num_positions, vocab = logits.shape[1:]
    probs = plain_probs(logits, sampling, filters)
    ids = drafts.token_ids
    p = jnp.take_along_axis(probs[:, :-1], ids[..., None], axis=2)[..., 0]
    keys = jax.vmap(jax.random.key)(sampling.seed)
    u = jax.vmap(lambda key: jax.random.uniform(key, ids.shape[1:]))(keys)
    a = jnp.cumprod((u < p).astype(jnp.int32), axis=1).sum(axis=1)
    last = jnp.take_along_axis(probs, a[:, None, None], axis=1)[:, 0]
    rejected = jnp.take_along_axis(
        jnp.pad(ids, ((0, 0), (0, 1)), constant_values=-1), a[:, None], 1
    )
    last = jnp.where(jnp.arange(vocab)[None] == rejected, 0.0, last)
    more = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
    next_ids = jax.vmap(jax.random.categorical)(more, jnp.log(last)).astype(jnp.int32)
    place = jnp.arange(num_positions)[None]
    padded = jnp.pad(ids, ((0, 0), (0, 1)))
    tokens = jnp.where(
        place < a[:, None], padded, jnp.where(place == a[:, None], next_ids[:, None], -1)
    )
    raw = reference.topk_logprobs(logits.reshape(-1, vocab), jnp.maximum(tokens, 0).reshape(-1), K)
    return tokens, a + 1, raw


def plain_probs(logits: jax.Array, sampling: Sampling, filters: tuple[str, ...]) -> jax.Array:
    """The processed distribution [B, S, V] by sorting."""
    temperature = sampling.temperature[:, None, None]
    x = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)
    if "top_k" in filters:
        values, _ = lax.top_k(x, 128)
        k = jnp.clip(sampling.top_k, 1, 128)[:, None, None]
        least = jnp.take_along_axis(values, jnp.broadcast_to(k - 1, (*x.shape[:2], 1)), axis=2)
        x = jnp.where((sampling.top_k[:, None, None] > 0) & (x < least), -jnp.inf, x)
    if "top_p" in filters:
        ordered = -jnp.sort(-x, axis=-1)
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        count = (before < sampling.top_p[:, None, None]).sum(axis=-1, keepdims=True)
        least = jnp.take_along_axis(ordered, count - 1, axis=2)
        x = jnp.where(x < least, -jnp.inf, x)
    if "min_p" in filters:
        lowest = x.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)[:, None, None]
        x = jnp.where(x < lowest, -jnp.inf, x)
    sampled = jax.nn.softmax(x, axis=-1)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.where(temperature > 0, sampled, one_hot)


@functools.cache
def check_alike(kind: str, flat: bool) -> None:
    """Both samplers' first tokens follow one distribution: a small batch, many seeds.

    Raises:
      BenchError: a chi-square test tells them from the exact distribution.
    """
    small = Case(4, 600, "float32", kind, flat)
    count = 4000
    row = jnp.asarray(rows_of(small.slots, small.vocabulary, flat))
    logits = jnp.broadcast_to(lax.optimization_barrier(row), (count, *row.shape[1:]))
    for one in MIXED if kind == "mixed" else (KINDS[kind][0],):
        if one.get("temperature", 1.0) == 0.0:
            continue
        sampling = parameters([one] * count)
        exact = plain_probs(
            row, jax.tree.map(lambda x: x[:1], sampling), ("top_k", "top_p", "min_p")
        )
        expected = np.asarray(exact, np.float64)[0, 0] * count
        drafts, positions = drafts_of(logits), jnp.zeros(count, jnp.int32)
        draws = {
            OURS: jax.jit(our_way)(logits, drafts, sampling, positions),
            PLAIN: jax.jit(plain_way, static_argnums=3)(
                logits, drafts, sampling, filters_of(small)
            ),
        }
        for name, (tokens, *_) in draws.items():
            observed = np.bincount(np.asarray(tokens)[:, 0], minlength=small.vocabulary)
            _check_counts(name, observed, expected)


def _check_counts(name: str, observed: np.ndarray, expected: np.ndarray) -> None:
    """Raises BenchError where the counts are unlikely, by chi-square."""
    often = expected >= 5
    counts = np.append(observed[often], observed[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    kept = wanted > 0
    if counts[~kept].any() or observed[expected == 0].any():
        raise BenchError(f"{name} draws a token that no filter keeps")
    found = scipy.stats.chisquare(counts[kept], wanted[kept] * counts.sum() / wanted.sum())
    if found.pvalue < 1e-8:
        raise BenchError(f"{name} does not follow the distribution: {found}")

"""sglang-jax: the logprobs of sampled tokens that `return_logprob` asks for.

What differs is on the page `docs/sglang_jax.md`.
"""

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.adapters.proved import check_functions, compare
from jax_specdec.adapters.replacing import replaced
from pallas_kernels import topk_logprobs

MOST_AT_ONCE = 1 << 26  # logits
NAME = "sglang-jax"
_RUNNER, _SAMPLER = "sgl_jax.srt.model_executor.model_runner", "sgl_jax.srt.layers.sampler"
FUNCTIONS = (  # to be proved
    f"{_RUNNER}:ModelRunner.sample",
    f"{_SAMPLER}:Sampler.__call__",
    f"{_SAMPLER}:Sampler._process_logprob_results",
)


@contextmanager
def install() -> Iterator[tuple[str, ...]]:
    """`ModelRunner.sample` draws as it did and then adds logprobs, until the `with` ends.

    Yields:
      The full names that were replaced.

    Raises:
      ImportError: sglang-jax is not installed, or a function of it is not one that was proved, or
        gives another result than ours on eight rows. Nothing was changed.
    """
    check_functions(NAME, FUNCTIONS)
    _compare()
    theirs = importlib.import_module(_RUNNER).ModelRunner.sample

    def sample(self: Any, logits_output: Any, sampling_metadata: Any, positions: jax.Array) -> Any:
        # The jitted sampler can't hand logprobs over, and is traced for every other k: without.
        silent = dataclasses.replace(
            sampling_metadata, return_logprob=False, top_logprobs_nums=None, token_ids_logprobs=None
        )
        token_ids = theirs(self, logits_output, silent, positions)
        if sampling_metadata.return_logprob:
            add_logprobs(logits_output, sampling_metadata, token_ids)
        return token_ids

    with replaced("sgl_jax", {FUNCTIONS[0]: sample}) as names:
        yield names


def _compare() -> None:
    """Refuse other logprobs or lists than ours of eight rows."""
    logits = jax.random.normal(jax.random.key(0), (8, 40))
    metadata = SimpleNamespace(
        return_logprob=True,
        top_logprobs_nums=[3, 0, 1, 0, 2, 5, 0, 0],
        token_ids_logprobs=[[1, 39], None, [0], *[None] * 5],
        temperatures=jnp.ones((8, 1)),
        is_all_greedy=True,
        do_penalties=False,
        linear_penalty=None,
    )

    def theirs() -> Any:
        nnx, sampling = (importlib.import_module(name) for name in ("flax.nnx", _SAMPLER))
        sampler, output = sampling.Sampler(nnx.Rngs(0)), SimpleNamespace()
        token_ids, logprobs = sampler._greedy_sampling((logits, metadata, None, None))[:2]
        token_ids = token_ids.reshape(-1)
        sampler._process_logprob_results((output, metadata, token_ids, logprobs))
        return vars(output)

    def ours() -> Any:
        output = SimpleNamespace(next_token_logits=logits)
        add_logprobs(output, metadata, logits.argmax(axis=1))
        del output.next_token_logits
        return vars(output)

    compare(NAME, FUNCTIONS[2], theirs, ours)


def add_logprobs(logits_output: Any, sampling_metadata: Any, token_ids: jax.Array) -> None:
    """Logprobs of the drawn tokens, of the top K and of named ids, written into `logits_output`.

    As `Sampler._process_logprob_results`, with the same fields and lists: the logprobs after
    penalties, and divided by the temperature unless all requests are greedy. All are of one read.

    Args:
      logits_output: whose `next_token_logits` are [B, V].
      sampling_metadata: with `top_logprobs_nums` (k of each request, up to 512) and
        `token_ids_logprobs` (ids of each request, up to 512, or None).
      token_ids: [B] int32, which were drawn.

    Raises:
      ValueError: a k or a number of ids is above its limit.
    """
    logits = logits_output.next_token_logits.reshape(-1, logits_output.next_token_logits.shape[-1])
    counts = sampling_metadata.top_logprobs_nums or []
    named = [list(ids or ()) for ids in sampling_metadata.token_ids_logprobs or []]
    extra = np.full((logits.shape[0], max(map(len, named), default=0)), -1, np.int32)
    for row, ids in zip(extra, named, strict=False):  # rows of padding follow
        row[: len(ids)] = ids
    token_logprobs, *others = _read(
        logits,
        token_ids,
        sampling_metadata.linear_penalty if sampling_metadata.do_penalties else None,
        sampling_metadata.temperatures,
        sampling_metadata.is_all_greedy,
        extra,
        max(counts, default=0),
    )
    logits_output.next_token_logprobs = token_logprobs
    top_ids, top, of_named = jax.device_get(others)
    if any(counts):
        logits_output.next_token_top_logprobs_val = _cut(top, counts)
        logits_output.next_token_top_logprobs_idx = _cut(top_ids, counts)
    if any(ids is not None for ids in sampling_metadata.token_ids_logprobs or ()):
        logits_output.next_token_token_ids_logprobs_val = _cut(of_named, list(map(len, named)))
        logits_output.next_token_token_ids_logprobs_idx = named


@partial(jax.jit, static_argnames=("k",))
def _read(
    logits: jax.Array,
    token_ids: jax.Array,
    penalty: jax.Array | None,
    temperatures: jax.Array,
    is_all_greedy: jax.Array,
    extra: jax.Array,
    k: int,
) -> tuple[jax.Array, ...]:
    """Logprobs [B] of the tokens, top ids and logprobs [B, K], and logprobs of `extra`, [B, C]."""
    if penalty is not None:
        logits = logits + penalty.astype(logits.dtype)
    temperatures = jnp.where(is_all_greedy, 1.0, temperatures.reshape(-1).astype(jnp.float32))
    token_ids = token_ids.astype(jnp.int32)
    # Without a rank, this is less than a read that counts; beyond some 100 MB, blocks of rows are.
    if k == 0 and not extra.size and logits.size <= MOST_AT_ONCE:
        x, divisors = logits.astype(jnp.float32), temperatures[:, None]
        most = x.max(axis=1, keepdims=True)
        total = jnp.exp((x - most) * (1 / divisors)).sum(axis=1, keepdims=True)
        token_logprobs = (
            jnp.take_along_axis(x, token_ids[:, None], 1) - most
        ) / divisors - jnp.log(total)
        return token_logprobs[:, 0], extra, token_logprobs[:, :0], token_logprobs[:, :0]
    results = topk_logprobs(logits, token_ids, k, temperatures=temperatures, extra_token_ids=extra)
    logprobs = results.logprobs
    return logprobs[:, 0], results.token_ids[:, 1:], logprobs[:, 1:], results.extra_logprobs


def _cut(table: np.ndarray, counts: list[int]) -> list[list[Any]]:
    """The first `counts[i]` values of each row i."""
    return [row[:count].tolist() for row, count in zip(table, counts, strict=False)]

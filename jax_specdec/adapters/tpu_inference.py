"""tpu-inference: logprobs of sampled and prompt tokens, and of accepted drafts only.

Each function has tpu-inference's signature. What differs is on the page `docs/tpu_inference.md`.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_specdec.adapters.proved import check_functions, compare
from jax_specdec.adapters.replacing import replaced
from pallas_kernels import topk_logprobs

__all__ = [
    "install",
    "compute_and_gather_logprobs",
    "compute_and_gather_prompt_logprobs",
    "filter_speculative_logprobs",
]

NAME = "tpu-inference"
_SAMPLING = "tpu_inference.layers.jax.sample.sampling"
FUNCTIONS = (  # to be proved
    f"{_SAMPLING}:compute_and_gather_logprobs",
    f"{_SAMPLING}:compute_and_gather_prompt_logprobs",
    "tpu_inference.spec_decode.jax.utils:filter_speculative_logprobs",
)


@contextmanager
def install() -> Iterator[tuple[str, ...]]:
    """The functions of this module in tpu-inference's place, until the `with` ends.

    Yields:
      The full names that were replaced.

    Raises:
      ImportError: tpu-inference is not installed, or a function of it is not one that was proved,
        or gives another result than ours on eight rows. Nothing was changed.
    """
    check_functions(NAME, FUNCTIONS)
    new: tuple[Callable[..., Any], ...] = (
        compute_and_gather_logprobs,
        compute_and_gather_prompt_logprobs,
        filter_speculative_logprobs,
    )
    for name, ours, arguments in zip(FUNCTIONS, new, _rows(), strict=True):
        _compare(name, ours, arguments)
    with replaced("tpu_inference", dict(zip(FUNCTIONS, new, strict=True))) as names:
        yield names


def _rows() -> Iterator[tuple[Any, ...]]:
    """Arguments of eight rows for each function."""
    logits = jax.random.normal(jax.random.key(0), (8, 40))
    tokens = jnp.asarray([3, 0, 39, 1, 2, 2, 7, 8], jnp.int32)
    yield logits, tokens, 5
    yield logits, tokens, 5
    # Two shards: two drafts of request 0 and a bonus token each; the second draft is rejected.
    ids = np.asarray([[3, 1], [-1, 2], [4, 3], [9, 9], [5, 5], [6, 6], [7, 7], [9, 9]], np.int32)
    metadata = SimpleNamespace(
        final_logits_indices=np.zeros(4, np.int32),
        draft_lengths_cpu=np.asarray([2, 0, 1, 0]),
        req_indices_dp={0: [0], 1: [1]},
    )
    yield ids, ids * np.float32(-0.5), np.arange(8, dtype=np.int32), metadata, 40, 2, 2


def _compare(name: str, ours: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Refuse another result than that of ours."""
    module, _, function = name.partition(":")
    theirs = getattr(importlib.import_module(module), function)
    # The functions on logits are called under a mesh.
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1])):
        compare(NAME, name, lambda: theirs(*arguments), lambda: ours(*arguments))


# Under `jax.set_mesh`, as theirs: every process of a fleet gets all of the results.
_jit = partial(
    jax.jit,
    static_argnames=("max_logprobs",),
    out_shardings=PartitionSpec(),  # type: ignore[no-untyped-call]
)


@_jit
def compute_and_gather_logprobs(
    logits: jax.Array, next_tokens: jax.Array, max_logprobs: int
) -> Any:
    """Logprobs and ranks of the next tokens, and the top `max_logprobs`, in one read of the logits.

    Args:
      logits: [N, V] bfloat16, float16 or float32, N rows of requests or of drafts and bonuses.
      next_tokens: [N] int32. A row of -1 is a rejected draft or padding: it is not read.
      max_logprobs: K, 0 to 512; static.

    Returns:
      vLLM's `LogprobsTensors(logprob_token_ids [N, K + 1] int32, logprobs [N, K + 1] float32,
      selected_token_ranks [N] int32)`; ranks count ties, the token's own logit among them. A row
      that is not read has ids -1, logprobs NaN and rank 0.

    Raises:
      ValueError: `max_logprobs` is outside 0 .. min(512, V).
    """
    kind = importlib.import_module("vllm.v1.outputs").LogprobsTensors
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    next_tokens = next_tokens.astype(jnp.int32)
    read = jnp.where(next_tokens < 0, -1, rows)
    found = topk_logprobs(logits, next_tokens, max_logprobs, row_ids=read, rank_ties="inclusive")
    return kind(found.token_ids, found.logprobs, found.token_ranks)


@_jit
def compute_and_gather_prompt_logprobs(
    logits: jax.Array, prompt_target_ids: jax.Array, max_logprobs: int
) -> Any:
    """`compute_and_gather_logprobs` of each position's next prompt token."""
    return compute_and_gather_logprobs(logits, prompt_target_ids, max_logprobs)


def filter_speculative_logprobs(
    log_token_ids: np.ndarray,
    logprobs_arr: np.ndarray,
    selected_token_ranks: np.ndarray,
    spec_decode_metadata: Any,
    vocab_size: int,
    dp_size: int,
    num_reqs: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """The rows of accepted drafts and of bonus tokens, request by request, without a host loop.

    Args:
      log_token_ids, logprobs_arr: [N, K + 1], and selected_token_ranks: [N]; of each of `dp_size`
        shards the rows of drafts, then those of bonus tokens. Column 0 of a rejected draft is -1.
      spec_decode_metadata: whose drafts they are: `final_logits_indices`, `draft_lengths_cpu` and
        `req_indices_dp`.
      num_reqs: requests of higher numbers are padding.

    Returns:
      The three arrays with the M kept rows, and num_reqs + 1 numbers: request i has those from the
      i-th to the next.
    """
    num_drafts = spec_decode_metadata.final_logits_indices.shape[0] // dp_size
    owners = np.full((dp_size, log_token_ids.shape[0] // dp_size), num_reqs)
    lengths = np.asarray(spec_decode_metadata.draft_lengths_cpu).reshape(dp_size, -1)
    for shard, owner in enumerate(owners):
        requests = np.asarray(spec_decode_metadata.req_indices_dp[shard], np.intp)
        drafts = np.repeat(requests, lengths[shard, : requests.size])
        owner[: drafts.size] = drafts
        owner[num_drafts : num_drafts + requests.size] = requests
    owners = owners.reshape(-1)
    kept = (owners < num_reqs) & (log_token_ids[:, 0] != -1) & (log_token_ids[:, 0] < vocab_size)
    rows = np.flatnonzero(kept)
    rows = rows[np.argsort(owners[rows], kind="stable")]  # a request is in one shard
    ends = np.cumsum(np.bincount(owners[rows], minlength=num_reqs)[:num_reqs])
    return log_token_ids[rows], logprobs_arr[rows], selected_token_ranks[rows], [0, *ends.tolist()]

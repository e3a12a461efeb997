"""tpu-inference: its tokens, drawn and verified, and their logprobs, of accepted drafts only.

Each function has tpu-inference's signature. What differs is on the page `docs/tpu_inference.md`.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jax_specdec.adapters import tpu_inference_rows as rows
from jax_specdec.adapters.proved import check_functions, compare
from jax_specdec.adapters.replacing import object_of, replaced, without_refusal
from jax_specdec.adapters.tpu_inference_sampling import (
    RejectionSampler,
    axis_names,
    process_and_extend_logits,
    sample,
)
from pallas_kernels import topk_logprobs

__all__ = [
    "install",
    "compute_and_gather_logprobs",
    "compute_and_gather_prompt_logprobs",
    "filter_speculative_logprobs",
    "RejectionSampler",
    "sample",
    "process_and_extend_logits",
]

NAME = "tpu-inference"
_SAMPLING = "tpu_inference.layers.jax.sample.sampling"
_DRAFTS = "tpu_inference.spec_decode.jax.utils"
RUNNER = "tpu_inference.runner.tpu_runner:TPUModelRunner._execute_model"
REFUSAL = "prompt_logprobs is not supported with speculative decoding."
OF_LOGPROBS = (
    f"{_SAMPLING}:compute_and_gather_logprobs",
    f"{_SAMPLING}:compute_and_gather_prompt_logprobs",
    f"{_DRAFTS}:filter_speculative_logprobs",
)
OF_TOKENS = (
    "tpu_inference.layers.jax.sample.rejection_sampler:RejectionSampler.forward",
    f"{_SAMPLING}:sample",
    f"{_DRAFTS}:process_and_extend_logits",
)
OF_PROMPTS = (f"{_SAMPLING}:compute_prompt_logprobs",)
FUNCTIONS = (*OF_LOGPROBS, *OF_TOKENS, *OF_PROMPTS)  # to be proved


@contextmanager
def install(*, tokens: bool = True, prompt_logprobs: bool = False) -> Iterator[tuple[str, ...]]:
    """The functions of this module in tpu-inference's place, until the `with` ends.

    Args:
      tokens: whether this library draws and verifies; False: tpu-inference does, and the logprobs
        alone are this library's.
      prompt_logprobs: whether their runner takes requests for them with speculation too. All that
        it lacks for them is that it does not refuse.

    Yields:
      The full names that were replaced.

    Raises:
      ImportError: tpu-inference is not installed, or a function of it is not one that was proved,
        or gives another result than ours on eight rows. Nothing was changed.
      AttributeError: their runner has no such refusal, or more than one.
    """
    check_functions(NAME, (*OF_LOGPROBS, *(OF_PROMPTS if prompt_logprobs else ())))
    if tokens:
        try:
            check_functions(NAME, OF_TOKENS)
        except ImportError as error:
            raise ImportError(f"{error}; install(tokens=False) takes logprobs alone") from error
    new = _new(tokens=tokens)
    _compare(new)
    if prompt_logprobs:
        new[RUNNER] = without_refusal(RUNNER, REFUSAL)
    with replaced("tpu_inference", new) as names:
        yield names


def _new(*, tokens: bool) -> dict[str, Any]:
    """Our functions, by the names of those that they replace."""
    logprobs = compute_and_gather_logprobs, compute_and_gather_prompt_logprobs
    new = dict(zip(OF_LOGPROBS, (*logprobs, filter_speculative_logprobs), strict=True))
    if tokens:
        ours = RejectionSampler.forward, sample, process_and_extend_logits
        new |= zip(OF_TOKENS, ours, strict=True)
    return new


def _compare(new: Mapping[str, Any]) -> None:
    """Refuse functions whose results on eight rows are others than ours."""
    axes = tuple(chain(*axis_names()))
    kinds = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh((1,) * len(axes), axes, kinds, devices=jax.local_devices()[:1])
    of_rows: dict[str, list[tuple[Any, ...]]] = {
        OF_LOGPROBS[0]: [rows.of_logprobs()],
        OF_LOGPROBS[1]: [rows.of_logprobs()],
        OF_LOGPROBS[2]: [rows.of_filter()],
        OF_TOKENS[0]: [*rows.of_verification(mesh)],
        OF_TOKENS[1]: [rows.of_sample(mesh)],
        OF_TOKENS[2]: [rows.of_processed_logits(mesh)],
    }
    with jax.set_mesh(mesh):  # as their runner calls the functions on logits
        for name, ours in new.items():
            theirs = object_of(name)
            for arguments in of_rows[name]:
                compare(NAME, name, partial(theirs, *arguments), partial(ours, *arguments))


# Under `jax.set_mesh`, as theirs: every process of a fleet gets all of the results.
_jit = partial(
    jax.jit,
    static_argnames=("max_logprobs",),
    out_shardings=PartitionSpec(),
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
    places = jnp.arange(logits.shape[0], dtype=jnp.int32)
    next_tokens = next_tokens.astype(jnp.int32)
    read = jnp.where(next_tokens < 0, -1, places)
    results = topk_logprobs(logits, next_tokens, max_logprobs, row_ids=read, rank_ties="inclusive")
    return kind(results.token_ids, results.logprobs, results.token_ranks)


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
    is_kept = (owners < num_reqs) & (log_token_ids[:, 0] != -1) & (log_token_ids[:, 0] < vocab_size)
    rows = np.flatnonzero(is_kept)
    rows = rows[np.argsort(owners[rows], kind="stable")]  # a request is in one shard
    ends = np.cumsum(np.bincount(owners[rows], minlength=num_reqs)[:num_reqs])
    return log_token_ids[rows], logprobs_arr[rows], selected_token_ranks[rows], [0, *ends.tolist()]

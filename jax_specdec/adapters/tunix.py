"""tunix (google-tunix): logprobs and entropies of its RL losses, and logprobs without logits.

Each function has tunix's signature and results. What differs is on the page `docs/tunix.md`.
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.adapters.replacing import replaced
from jax_specdec.adapters.tunix_heads import linear_logprobs, without_head, wrapped
from jax_specdec.adapters.versions import check_version
from pallas_kernels import topk_logprobs


@contextmanager
def install(*, without_logits: bool = False) -> Iterator[tuple[str, ...]]:
    """The functions of this module in tunix's place, until the `with` ends.

    Args:
      without_logits: whether `compute_per_token_logps` is replaced too. Where a caller asks it for
        logits as well, tunix's own is called: the policy losses do, for their entropy.

    Yields:
      The full names that were replaced.

    Raises:
      ImportError: tunix is not installed, or not in a version that was tried.
    """
    check_version("google-tunix")
    new: dict[str, Any] = {
        "tunix.rl.common:selective_log_softmax": selective_log_softmax,
        "tunix.rl.algo_core:compute_entropy_from_logits": compute_entropy_from_logits,
    }
    if without_logits:
        theirs = importlib.import_module("tunix.rl.common").compute_per_token_logps

        @wraps(theirs)
        def either(*args: Any, **named: Any) -> Any:
            given = inspect.signature(compute_per_token_logps).bind(*args, **named).arguments
            return (theirs if given.get("return_logits") else compute_per_token_logps)(
                *args, **named
            )

        new["tunix.rl.common:compute_per_token_logps"] = either
    with replaced("tunix", new) as names:
        yield names


def selective_log_softmax(logits: jax.Array, input_ids: jax.Array) -> jax.Array:
    """Logprobs of the given ids, without a float32 copy of the logits.

    Args:
      logits: [..., V] bfloat16, float16 or float32.
      input_ids: [...] of any integer type; as `take_along_axis` has it, -V to -1 count from the
        end (padding of -1 gets the last token's logprob), and ids further out get NaN.

    Returns:
      [...] float32.
    """
    rows, ids = _rows(logits), wrapped(input_ids.reshape(-1), logits.shape[-1])
    return topk_logprobs(rows, ids, 0).logprobs[:, 0].reshape(input_ids.shape)


def compute_entropy_from_logits(logits: jax.Array) -> jax.Array:
    """Entropies of logits [..., V]: [...] of their dtype. A token of -inf adds nothing."""
    rows = _rows(logits)
    found = topk_logprobs(rows, jnp.zeros(rows.shape[0], jnp.int32), 0, entropy=True).entropy
    assert found is not None
    return found.reshape(logits.shape[:-1]).astype(logits.dtype)


@partial(
    jax.jit,
    static_argnames=("pad_id", "eos_id", "stop_gradient", "return_logits", "temperature"),
)
def compute_per_token_logps(
    graphdef: Any,
    state: Any,
    prompt_tokens: jax.Array,
    completion_tokens: jax.Array,
    pad_id: int,
    eos_id: int,
    images: jax.Array | None = None,
    stop_gradient: bool = True,
    return_logits: bool = False,
    segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Logprobs of completions from hidden states and head: logits [B, S, V] never exist.

    Args:
      graphdef, state: of a model of `tunix_heads.MODELS`, without LoRA or quantization of its head.
      return_logits: must be False.
      The others: as tunix has them.

    Returns:
      [B, S] float32, as tunix has them.

    Raises:
      NotImplementedError: a model, a head or logits that cannot be served; the message names it.
    """
    if return_logits:
        raise NotImplementedError("return_logits=True asks for [B, S, V]: call tunix's own")
    nnx, common = (importlib.import_module(name) for name in ("flax.nnx", "tunix.rl.common"))
    model, head = without_head(nnx.merge(graphdef, state))

    def of_hidden(hidden: jax.Array, input_ids: jax.Array) -> jax.Array:
        return linear_logprobs(hidden, head, input_ids, temperature)

    # tunix's own function on hidden states: it makes masks and positions, and cuts the rows.
    theirs = inspect.unwrap(common.compute_per_token_logps)
    ours = FunctionType(theirs.__code__, vars(common) | {"selective_log_softmax": of_hidden})
    found: jax.Array = ours(
        *nnx.split(model),
        prompt_tokens,
        completion_tokens,
        pad_id,
        eos_id,
        images,
        stop_gradient,
        False,
        segment_ids,
        segment_positions,
        1.0,
    )
    return found


def _rows(logits: jax.Array) -> jax.Array:
    """[N, V]."""
    return logits.reshape(-1, logits.shape[-1])

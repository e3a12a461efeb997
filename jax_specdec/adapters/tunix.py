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
from jax_specdec.adapters.tunix_heads import linear_logprobs, without_head
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
        "tunix.rl.algo_core:compute_entropy_from_logits": compute_entropy_from_logits
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


def compute_entropy_from_logits(logits: jax.Array) -> jax.Array:
    """Entropies of logits [..., V]: [...] of their dtype. A token of -inf adds nothing."""
    rows = logits.reshape(-1, logits.shape[-1])
    return _entropies(rows).reshape(logits.shape[:-1]).astype(logits.dtype)


@jax.custom_vjp
def _entropies(rows: jax.Array) -> jax.Array:
    """[N] float32 of logits [N, V]. The backward pass reads them once, and keeps no table."""
    return _read(rows)[0]


def _read(rows: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    ids = jnp.zeros(rows.shape[0], jnp.int32)
    found = topk_logprobs(rows, ids, 0, entropy=True, log_sum_exp=True)
    assert found.entropy is not None
    assert found.log_sum_exp is not None
    return found.entropy, (rows, found.entropy, found.log_sum_exp)


def _pulled(kept: tuple[jax.Array, jax.Array, jax.Array], change: jax.Array) -> tuple[jax.Array]:
    """-p (log p + entropy) of each token, 0 in a row without an entropy."""
    rows, entropy, total = kept
    logprobs = rows.astype(jnp.float32) - total[:, None]
    of_token = jnp.maximum(logprobs, jnp.float32(-1e30)) + entropy[:, None]
    found = -jnp.exp(logprobs) * of_token * change[:, None]
    return (jnp.where(jnp.isnan(entropy)[:, None], 0, found).astype(rows.dtype),)


_entropies.defvjp(_read, _pulled)


@partial(
    jax.jit, static_argnames=("pad_id", "eos_id", "stop_gradient", "return_logits", "temperature")
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

"""tunix (google-tunix): logprobs and entropies of its RL losses, and logprobs without logits.

Each function has tunix's signature and results. What differs is on the page `docs/tunix.md`.
"""

import importlib
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.adapters.heads import ModelHead, linear_logprobs
from jax_specdec.adapters.proved import check_functions, compare, has_function
from jax_specdec.adapters.replacing import replaced
from jax_specdec.adapters.tunix_distillation import support_strategy
from jax_specdec.adapters.tunix_heads import without_head
from pallas_kernels import topk_logprobs

__all__ = [
    "compute_entropy_from_logits",
    "compute_per_token_logps",
    "install",
    "support_strategy",
]

NAME = "google-tunix"
_COMMON, _LOSSES = "tunix.rl.common", "tunix.rl.algo_core"
_LOGPS, _SOFTMAX = f"{_COMMON}:compute_per_token_logps", f"{_COMMON}:selective_log_softmax"
# Where the entropy is: in 0.1.7, and since.
_ENTROPY = tuple(f"{module}:compute_entropy_from_logits" for module in (_LOSSES, _COMMON))
FUNCTIONS = (*_ENTROPY, _LOGPS, _SOFTMAX)  # to be proved, those that there are


@contextmanager
def install(*, without_logits: bool = False) -> Iterator[tuple[str, ...]]:
    """The functions of this module in tunix's place, until the `with` ends.

    Args:
      without_logits: whether `compute_per_token_logps` is replaced too. Where a caller asks it for
        logits as well, tunix's own is called: the policy losses of 0.1.7 do, for their entropy.

    Yields:
      The full names that were replaced.

    Raises:
      ImportError: tunix is not installed, or a function of it is not one that was proved, or gives
        another result than ours on eight rows. Nothing was changed.
    """
    entropy = next((name for name in _ENTROPY if has_function(NAME, name)), _ENTROPY[-1])
    check_functions(NAME, (entropy, *((_LOGPS, _SOFTMAX) if without_logits else ())))
    _compare(entropy, without_logits=without_logits)
    new: dict[str, Any] = {entropy: compute_entropy_from_logits}
    if without_logits:
        theirs = importlib.import_module(_COMMON).compute_per_token_logps
        form = inspect.signature(theirs)

        @wraps(theirs)
        def either(*args: Any, **named: Any) -> Any:
            arguments = form.bind(*args, **named).arguments
            if arguments.get("return_logits"):
                return theirs(*args, **named)
            return compute_per_token_logps(**arguments)

        new[_LOGPS] = either
    with replaced("tunix", new) as names:
        yield names


def _compare(entropy: str, *, without_logits: bool) -> None:
    """Refuse other entropies, and other logprobs of logits, than ours of eight rows."""
    hidden_key, head_key = jax.random.split(jax.random.key(0))
    hidden, head = jax.random.normal(hidden_key, (2, 4, 8)), jax.random.normal(head_key, (40, 8))
    logits, ids = hidden @ head.T, jnp.asarray([[3, 0, 39, 1], [2, 2, 7, -1]])
    module, _, name = entropy.partition(":")
    theirs = getattr(importlib.import_module(module), name)
    compare(NAME, entropy, lambda: theirs(logits), lambda: compute_entropy_from_logits(logits))
    if without_logits:
        softmax = importlib.import_module(_COMMON).selective_log_softmax
        weight = ModelHead(head, "VH", None, None)
        compare(
            NAME, _SOFTMAX, lambda: softmax(logits, ids),
            lambda: linear_logprobs(hidden, weight, ids, 1.0)[0],
        )  # fmt: skip


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
    results = topk_logprobs(rows, ids, 0, entropy=True, log_sum_exp=True)
    assert results.entropy is not None
    assert results.log_sum_exp is not None
    return results.entropy, (rows, results.entropy, results.log_sum_exp)


def _pulled(
    residuals: tuple[jax.Array, jax.Array, jax.Array], change: jax.Array
) -> tuple[jax.Array]:
    """-p (log p + entropy) of each token, 0 in a row without an entropy."""
    rows, entropy, total = residuals
    logprobs = rows.astype(jnp.float32) - total[:, None]
    of_token = jnp.maximum(logprobs, jnp.float32(-1e30)) + entropy[:, None]
    gradient = -jnp.exp(logprobs) * of_token * change[:, None]
    return (jnp.where(jnp.isnan(entropy)[:, None], 0, gradient).astype(rows.dtype),)


_entropies.defvjp(_read, _pulled)


@partial(
    jax.jit,
    static_argnames=(
        "pad_id", "eos_id", "stop_gradient", "return_logits", "temperature", "return_entropy",
        "chunk_size",
    ),
)  # fmt: skip
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
    *,
    return_entropy: bool = False,
    chunk_size: int = 0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Logprobs of completions from hidden states and head: logits [B, S, V] never exist.

    Args:
      graphdef, state: of a model of `tunix_heads.MODELS`, without LoRA or quantization of its head.
      return_logits: must be False.
      return_entropy: whether entropies are returned too, of the same read; in tunix's after 0.1.7.
      chunk_size: of tunix's way to save memory, which this one does not need.
      The others: as tunix has them.

    Returns:
      [B, S] float32, as tunix has them; with entropies a pair, the second in the logits' dtype.

    Raises:
      NotImplementedError: a model, a head or logits that cannot be served; the message names it.
    """
    if return_logits:
        raise NotImplementedError("return_logits=True asks for [B, S, V]: call tunix's own")
    nnx, common = (importlib.import_module(name) for name in ("flax.nnx", _COMMON))
    model, head = without_head(nnx.merge(graphdef, state))
    entropies: list[jax.Array] = []

    def of_hidden(hidden: jax.Array, input_ids: jax.Array) -> jax.Array:
        logprobs, *others = linear_logprobs(
            hidden, head, input_ids, temperature, entropy=return_entropy
        )
        entropies.extend(others)
        return logprobs

    # tunix's own function on hidden states: it makes masks and positions, and cuts the rows.
    theirs = inspect.unwrap(common.compute_per_token_logps)
    ours = FunctionType(
        theirs.__code__, vars(common) | {"selective_log_softmax": of_hidden},
        argdefs=theirs.__defaults__,
    )  # fmt: skip
    logprobs: jax.Array = ours(
        *nnx.split(model),
        prompt_tokens,
        completion_tokens,
        pad_id,
        eos_id,
        images,
        stop_gradient,
        segment_ids=segment_ids,
        segment_positions=segment_positions,
    )
    if not return_entropy:
        return logprobs
    (entropy,) = entropies
    if stop_gradient:
        entropy = jax.lax.stop_gradient(entropy)
    if segment_ids is not None:  # the column that tunix adds: of no logits, or of logits of 0
        first = 0.0 if chunk_size else math.log(head.num_tokens)
        entropy = jnp.pad(entropy, ((0, 0), (1, 0)), constant_values=first)
    return logprobs, entropy

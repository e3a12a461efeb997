"""What a row is sampled by: its request's parameters, and the cut that they make of it."""

from typing import Annotated, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pallas_kernels.backends.groups import keeps
from pallas_kernels.contract.arguments import (
    check_int,
    check_no_nan,
    check_within,
    numbers_of,
)
from pallas_kernels.contract.field_docs import with_field_docs
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import Tree, vary_like
from pallas_kernels.lowering.row_pieces import at_place
from pallas_kernels.numbers.logarithm import logarithm

_Values = TypeVar("_Values", bound=Tree)


@with_field_docs
class Sampling(NamedTuple):
    """Sampling parameters of each slot, on the device.

    Attributes:
      temperature: 0 or less is greedy.
      top_k: 0 or less keeps all.
      top_p: 1 keeps all.
      min_p: 0 keeps all.
      seed: of the slot's noise, with the position of a draw.
    """

    temperature: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    seed: UInt32[Array, " B"]

    @classmethod
    def of(
        cls,
        num_slots: int,
        *,
        temperature: ArrayLike = 1.0,
        top_k: ArrayLike = 0,
        top_p: ArrayLike = 1.0,
        min_p: ArrayLike = 0.0,
        seed: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> "Sampling":
        """The parameters of B = `num_slots` slots, each one number for all, or one a slot [B].

        A request with a seed repeats: its tokens are functions of the seed, of their positions and
        of its logits. A step with a key does not: its seeds are the bits of the key, so give each
        step a key of its own, and drafts another one than verification.

        Args:
          num_slots: B.
          temperature: 0 or less is greedy.
          top_k: 0 or less keeps all.
          top_p: from 0 to 1; 1 keeps all.
          min_p: from 0 to 1; 0 keeps all.
          seed: integers; 0 without it. Not together with `key`.
          key: a JAX key, of whose bits one seed a slot is made; or one key a slot, [B].

        Raises:
          TypeError: an argument is not of its kind.
          ValueError: it has another shape, or a value outside of its range where that is known.
        """
        num_slots = check_int("num_slots", num_slots, 0, 2**31 - 1, "the number of slots")
        if key is not None and seed is not None:
            raise ValueError("seed and key: give one of them; the seeds of a key are its bits")
        seeds = 0 if seed is None else seed

        def of_each(name: str, x: ArrayLike, dtype: DTypeLike) -> jax.Array:
            values = numbers_of(name, x, dtype)
            if values.shape not in ((), (num_slots,)):
                raise ValueError(
                    f"{name} {values.shape}: give one number for all slots, or one a slot, "
                    f"[B] = {(num_slots,)}"
                )
            return jnp.broadcast_to(values, (num_slots,))

        sampling = cls(
            of_each("temperature", temperature, jnp.float32),
            of_each("top_k", top_k, jnp.int32),
            of_each("top_p", top_p, jnp.float32),
            of_each("min_p", min_p, jnp.float32),
            _seeds(key, num_slots) if key is not None else of_each("seed", seeds, jnp.uint32),
        )
        check_values(sampling, "")
        return sampling

    @classmethod
    def greedy(cls, num_slots: int) -> "Sampling":
        """The parameters of slots that are all greedy."""
        return cls.of(num_slots, temperature=0.0)


def check_values(sampling: Sampling, prefix: str) -> None:
    """Refuse numbers outside of their ranges, where they are known."""
    for field in ("temperature", "top_p", "min_p"):
        check_no_nan(f"{prefix}{field}", getattr(sampling, field))
    for field, keeps_all in (("top_p", 1), ("min_p", 0)):
        way_out = f"a share, such as 0.95 for 95 %; {keeps_all} keeps all"
        check_within(f"{prefix}{field}", getattr(sampling, field), 0, 1, way_out)


def _seeds(key: jax.Array, num_slots: int) -> jax.Array:
    """Seeds [B] of one JAX key, typed or as two words of data, or of one a slot."""
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(f"key is a {type(key).__name__}: give a JAX key, as `jax.random.key(0)`")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and (key.dtype != jnp.uint32 or key.ndim == 0):
        raise TypeError(
            f"key is of {key.dtype} {key.shape}: give a JAX key, as `jax.random.key(0)`, or "
            "`seed` for integers"
        )
    keys = key if is_typed else jax.random.wrap_key_data(key)
    if keys.shape not in ((), (num_slots,)):
        raise ValueError(
            f"key {key.shape} holds keys {keys.shape}: give one key, or one for each of the "
            f"{num_slots} slots"
        )
    if not keys.shape:
        return jax.random.bits(keys, (num_slots,), jnp.uint32)
    return jax.vmap(lambda slot_key: jax.random.bits(slot_key, (), jnp.uint32))(keys)


@with_field_docs
class Truncation(NamedTuple):
    """The tokens of rows [...] that the filters keep; a value of this type is called a cut.

    Tokens are in descending order of their logits, equal logits lowest id first, and are kept down
    to the cut: a token t is kept if x[t] > cut_logit, or x[t] == cut_logit and t < cut_id, or t is
    cut_id. Its probability is its share of softmax((x - m) / T), times exp(-log_kept).

    Attributes:
      cut_logit: -inf where all are kept, inf where one is.
      cut_id: the last kept token; V - 1 where all are kept.
      log_kept: at most 0: log of the kept tokens' share.
    """

    cut_logit: Float32[Array, "..."]
    cut_id: Int32[Array, "..."]
    log_kept: Float32[Array, "..."]

    @classmethod
    def nothing(cls, rows: tuple[int, ...], vocab_size: int) -> "Truncation":
        """The cut of rows [...] that keep every token."""
        last = jnp.full(rows, vocab_size - 1, jnp.int32)
        return cls(jnp.full(rows, -jnp.inf, jnp.float32), last, jnp.zeros(rows, jnp.float32))

    @classmethod
    def greedy(cls, token_ids: Int32[Array, "..."]) -> "Truncation":
        """The cut of rows that keep one token each. It is known without a look at the logits."""
        rows = token_ids.shape
        cut = cls(jnp.full(rows, jnp.inf, jnp.float32), token_ids, jnp.zeros(rows, jnp.float32))
        return vary_like(cut, token_ids)

    def keeps(
        self, logits: Float32[Array, "*rows C"], ids: Int32[Array, "*rows C"]
    ) -> Bool[Array, "*rows C"]:
        """Which of the tokens `ids`, with these logits, are kept."""
        return keeps(logits, ids, self.cut_logit[..., None], self.cut_id[..., None])


def where(rows: Bool[Array, "..."], a: Truncation, b: Truncation) -> Truncation:
    """The cuts of `a` in these rows, those of `b` in the others."""
    return typed.tree_map(lambda x, y: jnp.where(rows, x, y), a, b)


def has_meaning(sampling: Sampling) -> Bool[Array, " B"]:
    """Which slots have no NaN for a parameter."""
    numbers = sampling.temperature, sampling.top_p, sampling.min_p
    return ~(jnp.isnan(numbers[0]) | jnp.isnan(numbers[1]) | jnp.isnan(numbers[2]))


def truncates(sampling: Sampling) -> Bool[Array, " B"]:
    """Whether a slot has a filter that can cut."""
    return (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)


def lowest_gap(sampling: Sampling) -> Float32[Array, " B"]:
    """The least x - m that min-p keeps.

    On logarithms: exp may round so that a smaller logit gets a larger weight.
    """
    some = sampling.min_p > 0
    lowest = sampling.temperature * logarithm(jnp.where(some, sampling.min_p, jnp.float32(1)))
    return jnp.where(some, lowest, -jnp.inf)


def of_each_row(sampling: Sampling, rows: tuple[int, ...]) -> Annotated[Sampling, "B = N"]:
    """The parameters [B] for B * ... rows: [N]."""

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x.reshape(-1, *[1] * (len(rows) - 1)), rows).reshape(-1)

    return typed.tree_map(repeated, sampling)


def at_rows(index: Int32[Array, " R"], values: _Values) -> _Values:
    """The values of the rows `index`, of a tree of arrays [N] of 32-bit numbers; in one loop."""
    rows = index.shape[0]
    tables = typed.tree_map(lambda x: jnp.broadcast_to(x[None], (rows, *x.shape)), values)
    return at_place(index, tables)

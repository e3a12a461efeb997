"""What a row is sampled by: its request's parameters, and the cut that they make of it."""

from typing import Annotated, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pallas_kernels.backends.groups import keeps
from pallas_kernels.contract.rows import to_device
from pallas_kernels.lowering.forms import Tree, at_place, logarithm, vary_like

Values = TypeVar("Values", bound=Tree)


class Sampling(NamedTuple):
    """Sampling parameters of each slot, on the device."""

    temperature: Float32[Array, " B"]  # 0 or less is greedy
    top_k: Int32[Array, " B"]  # 0 keeps all
    top_p: Float32[Array, " B"]  # 1 keeps all
    min_p: Float32[Array, " B"]  # 0 keeps all
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
        seed: ArrayLike = 0,
    ) -> "Sampling":
        """The parameters of B = `num_slots` slots, each one number for all, or one a slot [B]."""

        def of_each(x: ArrayLike, dtype: DTypeLike) -> jax.Array:
            return jnp.broadcast_to(to_device(x, dtype), (num_slots,))

        return cls(
            of_each(temperature, jnp.float32),
            of_each(top_k, jnp.int32),
            of_each(top_p, jnp.float32),
            of_each(min_p, jnp.float32),
            of_each(seed, jnp.uint32),
        )

    @classmethod
    def greedy(cls, num_slots: int) -> "Sampling":
        """The parameters of slots that are all greedy."""
        return cls.of(num_slots, temperature=0.0)


class Truncation(NamedTuple):
    """The tokens of rows [...] that the filters keep; a value of this type is called a cut.

    Tokens are in descending order of their logits, equal logits lowest id first, and are kept down
    to the cut: a token t is kept if x[t] > cut_logit, or x[t] == cut_logit and t < cut_id, or t is
    cut_id. Its probability is its share of softmax((x - m) / T), times exp(-log_kept).
    """

    cut_logit: Float32[Array, "..."]  # -inf where all are kept, inf where one is
    cut_id: Int32[Array, "..."]  # the last kept token; V - 1 where all are kept
    log_kept: Float32[Array, "..."]  # at most 0: log of the kept tokens' share

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
    return jax.tree.map(lambda x, y: jnp.where(rows, x, y), a, b)  # type: ignore[no-any-return]


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

    return jax.tree.map(repeated, sampling)  # type: ignore[no-any-return]


def at_rows(index: Int32[Array, " R"], values: Values) -> Values:
    """The values of the rows `index`, of a tree of arrays [N] of 32-bit numbers; in one loop."""
    rows = index.shape[0]
    return at_place(  # type: ignore[no-any-return]
        index, jax.tree.map(lambda x: jnp.broadcast_to(x[None], (rows, *x.shape)), values)
    )

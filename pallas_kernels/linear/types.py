"""Types of the linear calls' arguments and results, and the definition of their logits.

    logits = round(soft_cap(scale * (hidden @ head.T) + bias))

The product is accumulated in float32, all of the rest is float32, and `round` goes to the logits'
dtype, once. `soft_cap(u)` is cap * tanh(u / cap), as in Gemma 2 (arXiv 2408.00118).

Shapes: N rows of hidden states of size H, a head of V rows, R target rows, C ids a row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import register_namedtuple_serialization
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.contract.field_docs import with_field_docs
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.contract.types import AnyArray
from pallas_kernels.linear.schedule import LinearSchedule
from pallas_kernels.lowering.forms import barrier
from pallas_kernels.lowering.implementation import Implementation
from pallas_kernels.meshes.placement import VocabShard


class Definition(NamedTuple):
    """The static part of the definition. Hashable."""

    scale: float = 1.0
    soft_cap: float | None = None  # None: there is none
    logits_dtype: str = "float32"
    transposed: bool = False  # the head is [H, W], not [W, H]

    @property
    def axis(self) -> int:
        """The head's axis of tokens."""
        return int(self.transposed)

    def width(self, head: jax.Array) -> int:
        """W."""
        return head.shape[self.axis]

    def logits(self, hidden: jax.Array, head: jax.Array, bias: jax.Array | None) -> jax.Array:
        """hidden [N, H], head, bias [W] -> [N, W] of the logits' dtype."""
        u = self.before_cap(hidden, head, bias)
        return self.capped(u).astype(self.logits_dtype)

    def before_cap(self, hidden: jax.Array, head: jax.Array, bias: jax.Array | None) -> jax.Array:
        """scale * (hidden @ head.T) + bias: [N, W] float32."""
        return self.moved(
            tile_product(hidden, head, 1, 1 - self.axis), None if bias is None else bias[None]
        )

    def moved(self, products: jax.Array, bias: jax.Array | None) -> jax.Array:
        """scale * products + bias, float32 of shapes that broadcast."""
        if self.scale != 1:
            products = products * jnp.float32(self.scale)
        return products if bias is None else products + bias.astype(jnp.float32)

    def capped(self, u: jax.Array) -> jax.Array:
        """soft_cap(u), float32."""
        if self.soft_cap is None:
            return u
        cap = jnp.float32(self.soft_cap)
        capped: jax.Array = cap * jnp.tanh(u / cap)
        return capped

    def slope(self, u: jax.Array) -> jax.Array:
        """The derivative of soft_cap at u, float32."""
        if self.soft_cap is None:
            return jnp.ones_like(u)
        return 1 - jnp.square(jnp.tanh(u / jnp.float32(self.soft_cap)))


def tile_product(a: jax.Array, b: jax.Array, axis: int, other: int) -> jax.Array:
    """a times b, summed over this axis of a and the other of b, accumulated in float32."""
    axes = (((axis,), (other,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def head_rows(x: jax.Array, start: jax.Array, size: int, axis: int = 0) -> jax.Array:
    """`size` rows of x, or of this axis, from `start` on, copied for this trip of a loop alone."""
    # Else XLA would widen all of a bfloat16 head before the loop.
    pinned = barrier((x, start))[0]
    return barrier(lax.dynamic_slice_in_dim(pinned, start, size, axis))


def stored(x: jax.Array) -> jax.Array:
    """x as integers of its size if it has 16 bits, for an array that a loop updates in places.

    XLA's CPU compiler would widen all of a bfloat16 array for each update, and round it again.
    """
    if x.dtype.itemsize == 4:
        return x
    return lax.bitcast_convert_type(x, jnp.uint16)


def loaded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The values of this dtype that were `stored`."""
    return lax.bitcast_convert_type(x, dtype)


# The arguments of the door by name: signatures print these, and not what they stand for.
Hidden = Float[AnyArray, "N H"]

HiddenOfRows = Float[AnyArray, "R H"]

Head = Float[AnyArray, "V H"]

EitherHead = Float[AnyArray, "V H"] | Float[AnyArray, "H V"]

HeadBias = Float[AnyArray, " V"]

KeptIds = Int32[AnyArray, "R C"]

KeptLogprobs = Float32[AnyArray, "R C"]


@with_field_docs
class LinearKeptLogprobs(NamedTuple):
    """Logprobs of R target rows among the C tokens that each row keeps.

    Attributes:
      logprobs: of the given tokens; -inf where a token is not kept, NaN without an answer.
      kept_logprobs: of the kept tokens; NaN where there is none.
    """

    logprobs: Float32[Array, " R"]
    kept_logprobs: Float32[Array, "R C"]


register_namedtuple_serialization(
    LinearKeptLogprobs, serialized_name="pallas_kernels.LinearKeptLogprobs"
)


class Call(NamedTuple):
    """The static part of a call. Hashable."""

    definition: Definition
    k: int
    entropy: bool
    shard: VocabShard
    schedule: LinearSchedule | None = None  # None: as the sizes suggest
    implementation: Implementation | None = None  # of the read of logits
    row_tile: int | None = None  # rows of every product, see `tiles.py`; None: as the sizes suggest

    @property
    def outputs(self) -> Outputs:
        """The outputs; every call finds log_sum_exp, which the derivative needs."""
        return Outputs(self.k, log_sum_exp=True, entropy=self.entropy)


class LinearInputs(NamedTuple):
    """A device's own part of a call's arrays."""

    hidden: jax.Array  # [N, H]
    head: jax.Array  # [W, H], this device's rows of [V, H]; or [H, W], see `Definition`
    bias: jax.Array | None  # [W]
    token_ids: jax.Array  # [R] int32
    row_ids: jax.Array | None  # [R] int32
    num_rows: jax.Array | None  # [] int32
    temperatures: jax.Array | None  # [R] float32
    extra_token_ids: jax.Array  # [R, C] int32

    @property
    def num_targets(self) -> int:
        return self.token_ids.shape[0]


class LogprobScale(NamedTuple):
    """The scale of R rows' logprobs: they are (x - maximum) / T - log_sum."""

    maximum: jax.Array  # [R] float32; 0 in a row without an answer
    log_sum: jax.Array  # [R] float32, log(sum(exp((x - maximum) / T))); 0 there

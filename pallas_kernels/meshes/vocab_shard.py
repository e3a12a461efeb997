"""Which columns of a row of logits a device holds: all of them, or one shard of a mesh axis."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

AxisName = str | tuple[str, ...]  # one mesh axis, or several that split one dimension together


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary columns of a device, and reductions over those of all devices. Hashable.

    Inside `jax.shard_map`, the shards of the mesh axis hold equally many, contiguous columns, in
    order: shard i starts at id i * width. The last ones may end in padding columns.

    Reductions take this device's columns as the last axis and give every device the result of all
    of them. Their collectives carry one value a row.
    """

    axis_name: AxisName | None = None  # None: this device holds all columns
    vocab_size: int | None = None  # V; None: there are no padding columns

    def size(self, width: int) -> int:
        """V, where each shard holds `width` columns. Raises ValueError if V does not fit them."""
        columns: int = width if self.axis_name is None else width * lax.axis_size(self.axis_name)
        if self.vocab_size is None:
            return columns
        if not 0 < self.vocab_size <= columns:
            raise ValueError(
                f"vocab_size = {self.vocab_size} is outside 1 .. {columns}, the number of columns "
                "of all shards together"
            )
        return self.vocab_size

    def ids(self, width: int) -> jax.Array:
        """The token ids [width] int32 of this device's columns; from V on: padding."""
        columns = jnp.arange(width, dtype=jnp.int32)
        if self.axis_name is None:
            return columns
        return columns + lax.axis_index(self.axis_name) * width

    def masked(self, logits: jax.Array) -> jax.Array:
        """The logits [..., width] with -inf in padding columns."""
        width = logits.shape[-1]
        vocab_size = self.size(width)
        if vocab_size == VocabShard(self.axis_name).size(width):
            return logits  # there are none
        real = (self.ids(width) < vocab_size).reshape((1,) * (logits.ndim - 1) + (width,))
        return jnp.where(real, logits, jnp.asarray(-jnp.inf, logits.dtype))

    def at(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """x [..., width] float at one token id [...] each: [...]. NaN for an id outside [0, V)."""
        return self.looked_up(
            ids,
            x.shape[-1],
            lambda columns: jnp.take_along_axis(x, columns[..., None], axis=-1)[..., 0],
        )

    def looked_up(
        self, ids: jax.Array, width: int, read: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """What `read` has of token ids [...]: float [...]. NaN for an id outside [0, V).

        `read` takes columns [...] of this device's `width`; only those of ids that it holds count.
        """
        column = ids - self.ids(width)[0]
        mine = (column >= 0) & (column < width)
        found = read(jnp.clip(column, 0, width - 1))
        # The others add 0, which changes neither an infinity nor a NaN.
        found = self.across_sum(jnp.where(mine, found, jnp.zeros_like(found)))
        known = (ids >= 0) & (ids < self.size(width))
        return jnp.where(known, found, jnp.asarray(jnp.nan, found.dtype))

    def named_logits(
        self, logits: Float[Array, "N V"], rows: Int32[Array, " R"], ids: Int32[Array, "R C"]
    ) -> Float32[Array, "R C"]:
        """The logits [R, C] float32 of ids [R, C] in rows [R] of this device's columns [N, width].

        NaN for an id outside [0, V). A row outside [0, N) is clamped.
        """
        at = jnp.clip(rows, 0, logits.shape[0] - 1)[:, None]
        return self.looked_up(
            ids, logits.shape[1], lambda columns: logits.at[at, columns].get().astype(jnp.float32)
        )

    def maximum(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [...]."""
        return self.across_maximum(x.max(-1))

    def minimum(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [...]."""
        return self.across_minimum(x.min(-1))

    def sum(self, x: jax.Array) -> jax.Array:
        """[..., width] of any numeric dtype -> [...] of the same."""
        return self.across_sum(x.sum(-1, dtype=x.dtype))

    def any(self, x: jax.Array) -> jax.Array:
        """[..., width] bool -> [...] bool."""
        return self.maximum(x.astype(jnp.int32)) > 0

    def across_maximum(self, local: jax.Array) -> jax.Array:
        """The largest over the shards of one value each; the same shape."""
        return self._across(lax.pmax, local)

    def across_minimum(self, local: jax.Array) -> jax.Array:
        """The smallest over the shards of one value each; the same shape."""
        return self._across(lax.pmin, local)

    def across_sum(self, local: jax.Array) -> jax.Array:
        """The sum over the shards of one value each; the same shape."""
        return self._across(lax.psum, local)

    def gathered(self, local: jax.Array) -> jax.Array:
        """The shards' values [...] in their order: [shards, ...]."""
        if self.axis_name is None:
            return local[None]
        names = {self.axis_name} if isinstance(self.axis_name, str) else {*self.axis_name}
        # Only `shard_map` keeps track of what varies; what the compiler splits itself does not.
        tracked = names <= {*jax.sharding.get_abstract_mesh().manual_axes}
        to = {"to": "invarying"} if tracked else {}
        every: jax.Array = lax.all_gather(local, self.axis_name, **to)
        return every

    def _across(self, collective: Callable[..., jax.Array], local: jax.Array) -> jax.Array:
        return local if self.axis_name is None else collective(local, self.axis_name)


WHOLE = VocabShard()

"""What the linear calls take, behind the door, and return.

Shapes: N rows of hidden states of size H, a head of V rows, R target rows, C ids a row.
"""

from typing import NamedTuple

import jax
from jax.export import register_namedtuple_serialization
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.contract.types import AnyArray, Outputs
from pallas_kernels.linear.definition import Definition
from pallas_kernels.linear.plan import Plan
from pallas_kernels.meshes.vocab_shard import VocabShard

# The arguments of the door by name: signatures print these, and not what they stand for.
Hidden = Float[AnyArray, "N H"]
HiddenOfRows = Float[AnyArray, "R H"]
Head = Float[AnyArray, "V H"]
EitherHead = Float[AnyArray, "V H"] | Float[AnyArray, "H V"]
HeadBias = Float[AnyArray, " V"]
KeptIds = Int32[AnyArray, "R C"]


class LinearKeptLogprobs(NamedTuple):
    """Logprobs of R target rows among the C tokens that each row keeps.

    logprobs: of the given tokens; -inf where a token is not kept, NaN without an answer.
    kept_logprobs: of the kept tokens; NaN where there is none.
    """

    logprobs: Float32[Array, " R"]
    kept_logprobs: Float32[Array, "R C"]


register_namedtuple_serialization(
    LinearKeptLogprobs, serialized_name="pallas_kernels.LinearKeptLogprobs"
)


class Call(NamedTuple):
    """What is static of a call. Hashable."""

    definition: Definition
    k: int
    entropy: bool
    shard: VocabShard
    plan: Plan | None = None  # None: as the sizes suggest

    @property
    def outputs(self) -> Outputs:
        """What is wanted; every call finds log_sum_exp, which the derivative needs."""
        return Outputs(self.k, log_sum_exp=True, entropy=self.entropy)


class Inputs(NamedTuple):
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


class RowScale(NamedTuple):
    """What the logprobs of R rows are relative to: they are (x - maximum) / T - log_sum."""

    maximum: jax.Array  # [R] float32; 0 in a row without an answer
    log_sum: jax.Array  # [R] float32, log(sum(exp((x - maximum) / T))); 0 there

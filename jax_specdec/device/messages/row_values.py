"""Entropy and log-sum-exp of processed rows: those of the tokens that a row keeps.

Raw and scaled ones are sums of the read that makes the logprobs. What a filter cuts away is no part
of the processed distribution, so its sums take a second read, of rows whose cut tokens are -inf.

Axes: R rows, N flat rows of logits, V vocabulary.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ipc.wire import LogprobsMode
from jax_specdec.device.messages.batch_options import BatchOptions
from jax_specdec.device.messages.logit_changes import RowChanges, changed_rows
from jax_specdec.device.model.sharding import Parallel
from jax_specdec.requests import ROW_VALUES
from pallas_kernels import TopkLogprobs, VocabShard, topk_logprobs
from pallas_kernels.sampling import Truncation


def value_names(values: int) -> tuple[str, ...]:
    """The sums of `topk_logprobs` that the bits of `RowValue` name."""
    return tuple(name for name, value in ROW_VALUES.items() if values >> value & 1)


def with_processed_values(
    results: TopkLogprobs,
    placed: tuple[Float[Array, "N V"], Int32[Array, " R"], Int32[Array, ""]],
    changes: Annotated[RowChanges | None, "B S = R"],
    slot: Int32[Array, " R"],
    options: BatchOptions,
    cut: Annotated[Truncation, "[R]"],
    parallel: Parallel,
) -> TopkLogprobs:
    """`results` with the values of the kept tokens where a row's slot asked for processed logprobs.

    A greedy row keeps one token: its entropy is 0, and its log-sum-exp, at T = 1, is the token's
    logit.

    Args:
      results: of R rows, with their scaled values.
      placed: all rows of the logits, the place of each of the R rows among them, and how many of
        the R count.
      changes: of the R rows' logits, by which the tokens were chosen.
      slot: of each row.
      options: by slot.
      cut: of each row.
      parallel: the devices among which the vocabulary is split.
    """
    flat_logits, place, num_rows = placed
    is_processed = (options.mode == LogprobsMode.PROCESSED)[slot]
    temperatures = options.sampling.temperature[slot]

    def kept_alone(
        shard: VocabShard,
        logits: Float[Array, "N C"],
        by_row: tuple[Int32[Array, " R"], Truncation, RowChanges | None],
    ) -> Float32[Array, "R C"]:
        place, cut, changes = by_row
        x = logits.at[place].get(mode="fill", fill_value=-jnp.inf).astype(jnp.float32)
        if changes is not None:
            x = changed_rows(x, changes, shard)
        ids = jnp.broadcast_to(shard.ids(x.shape[1]), x.shape)
        return jnp.where(cut.keeps(x, ids), x, -jnp.inf)

    kept_logits = parallel.over_vocabulary(
        kept_alone, flat_logits, (place, cut, changes), split_result=True
    )
    names = [name for name in ROW_VALUES if getattr(results, name) is not None]
    flags: dict[str, Any] = dict.fromkeys(names, True)
    sums = topk_logprobs(
        kept_logits,
        jnp.full(place.shape, -1, jnp.int32),
        0,
        num_rows=num_rows,
        temperatures=temperatures,
        mesh=parallel.mesh,
        axis_name=parallel.axis_name,
        **flags,
    )

    def of_processed(scaled: Float32[Array, " R"], processed: Float32[Array, " R"]) -> jax.Array:
        has_own: Bool[Array, " R"] = is_processed & ~jnp.isnan(scaled)  # NaN: an invalid row
        return jnp.where(has_own, processed, scaled)

    return results._replace(
        **{name: of_processed(getattr(results, name), getattr(sums, name)) for name in names}
    )

"""Who draws and who counts larger logits, without a GPU or an interpreter: lowering, choice.

What the machine code looks like is checked by `python -m bench.aot --options --check`.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.backends import read
from pallas_kernels.backends.groups import Drawn, ListedRows, RowsToDraw
from pallas_kernels.lowering import choose

ROWS, SLOTS = 8, 2


def drawn_by_xla(slots):
    """Anything of the right shape."""
    return Drawn(slots.astype(jnp.float32), slots)


def draws(logits, slots, floats, groups, taken):
    given = RowsToDraw(
        rows=slots,
        cut_logit=floats,
        cut_id=slots,
        excluded_ids=taken,
        seed=slots.astype(jnp.uint32),
        position=slots,
        maxima=groups,
        sums=groups,
        largest=groups[:, 0],
        inverse=groups[:, 0],
    )
    return read.draw(given, slots, (3, 1), drawn_by_xla, logits, lambda drawn, _: drawn)


def counts(logits, slots, floats, groups, taken):
    ids = jnp.zeros(ROWS, jnp.int32)
    return read.num_larger(logits, groups, ids), slots, floats, taken


def kernels_of(function, vocabulary, platform="cuda", taken=1, batch=()):
    """How many kernels a program for the platform has."""

    def array(shape, dtype):
        return jax.ShapeDtypeStruct((*batch, *shape), dtype)

    program = jax.jit(function).trace(
        array((ROWS, vocabulary), jnp.bfloat16),
        array((SLOTS,), jnp.int32),
        array((SLOTS,), jnp.float32),
        array((ROWS, -(-vocabulary // 256)), jnp.float32),
        array((SLOTS, taken), jnp.int32),
    )
    text = program.lower(lowering_platforms=(platform,)).as_text()
    return text.count("custom_call @mosaic_gpu")


@pytest.mark.fast
@pytest.mark.parametrize("function", [draws, counts])
def test_who_is_chosen(function, monkeypatch):
    assert kernels_of(function, 151_936) == 1
    assert kernels_of(function, 4099, "cpu") == 0
    assert kernels_of(function, 2000) == 0  # too short
    assert kernels_of(function, 2**20 + 1) == 0  # too many groups
    assert kernels_of(jax.vmap(function), 4099, batch=(2,)) == 0
    monkeypatch.setattr(choose, "cuda_capability", lambda: 8.9)
    assert kernels_of(function, 4099) == 0


@pytest.mark.fast
def test_candidates_of_valid_rows_are_the_kernels():
    def call(valid):
        def candidates(logits, slots, *_):
            return read.candidates(ListedRows(logits, slots, slots[0]), 5, valid=valid)

        return candidates

    assert kernels_of(call(True), 4099) == 2
    assert kernels_of(call(False), 4099) == 0
    assert kernels_of(call(True), 4099, "cpu") == 0


def test_taken_tokens_that_are_too_many():
    assert kernels_of(draws, 4099, taken=128) == 1
    assert kernels_of(draws, 4099, taken=129) == 0

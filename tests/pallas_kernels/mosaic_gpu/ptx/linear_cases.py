"""What the fused kernel does with a product, to be executed as PTX: sums, counts, own logits.

The product itself needs a matrix unit, which the machine here lacks: products are loaded instead,
in the registers where wgmma leaves them.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, linear_groups, linear_tiles
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.linear_groups import Groups, Of, Rounding
from pallas_kernels.backends.mosaic_gpu.linear_tiles import GROUP, HALF, ROWS, Tiles
from pallas_kernels.backends.mosaic_gpu.tiling import Tiling
from pallas_kernels.linear import on_gpu
from tests.pallas_kernels.mosaic_gpu.ptx.cases import Case

ERROR = 2e-6  # of sums, as `sampled_cases` has it
HALVES = ROWS // HALF


def sums_of_products(tiles: Tiles, rounding: Rounding, entropy: bool, products: Any, of: Of) -> Any:
    """The groups' results of products [R, W] float32: a program for each half of a tile."""

    def kernel(products_ref: Any, *refs: Any) -> None:
        given, out = Of(*refs[: len(Of._fields)]), Groups(*refs[len(Of._fields) :])
        program = lax.axis_index("program")
        half, tile = program % HALVES, program // HALVES
        row_tile, group = tile // tiles.groups, tile % tiles.groups
        rows = pl.ds(tiles.first_row(row_tile) + half * HALF, HALF)
        tokens = pl.ds(tiles.first_token(group), GROUP)
        x = compat.load(products_ref.at[rows, tokens], GPU.Layout.WGMMA)
        linear_groups.sums_of_tiles(tiles, rounding, given, out, False)(row_tile, group, half, x)

    one = compat.shape((tiles.groups * tiles.places,), jnp.float32)
    found = GPU.kernel(
        functools.partial(kernel),
        out_type=[one] * (5 if entropy else 4),
        grid=(tiles.row_tiles * tiles.groups * HALVES,),
        grid_names=("program",),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="sums_of_products",
    )(products, *of)
    return Groups(*found)


def case(
    name: str,
    dtype: str = "float32",
    scale: float = 1.0,
    bias: bool = False,
    temperatures: bool = False,
    entropy: bool = False,
    limit: int = 600,
    rows: int = 136,
) -> Case:
    """Random products and every kind of row, against float64."""
    width = 600
    rng = np.random.default_rng(len(name))
    products = (rng.normal(size=(rows, width)) * 4).astype(np.float32)
    products[1, 3], products[2, 300], products[3, 5] = np.nan, np.inf, -np.inf
    products[4], products[5, :256], products[70, 256:512] = -np.inf, -np.inf, 7.0
    tiles = linear_tiles.choose_tiles(rows, width, linear_tiles.STEP)
    tokens = rng.integers(0, limit, rows).astype(np.int32)
    tokens[6:9] = -1, limit - 1, 255
    added = rng.normal(size=width).astype(np.float32)
    inverse = rng.uniform(0.5, 2, rows).astype(np.float32) if temperatures else None
    with np.errstate(invalid="ignore", over="ignore"):
        # A product and a sum are rounded once: an fma.
        exact = products.astype(np.float64) * np.float32(scale) + (added if bias else 0)
        logits = np.array(jnp.asarray(exact.astype(np.float32)).astype(dtype), np.float32)
    given = np.take_along_axis(logits, np.clip(tokens, 0, None)[:, None], 1)[:, 0]
    special = on_gpu.special_of(tiles, jnp.asarray(tokens), jnp.int32(limit))
    of = Of(
        None, None, jnp.asarray(added) if bias else None, jnp.asarray(given), jnp.asarray(tokens),
        None if inverse is None else jnp.asarray(inverse), special, jnp.asarray([limit], jnp.int32),
    )  # fmt: skip

    def call() -> Any:
        found = sums_of_products(tiles, Rounding(scale, dtype), entropy, jnp.asarray(products), of)

        def by_row(x: Any) -> np.ndarray:
            return np.asarray(tiles.of_rows(np.asarray(x).reshape(tiles.groups, tiles.places)))

        *most, own, weighted = (None if x is None else by_row(x) for x in found)
        assert own is not None
        chosen = own[np.clip(tokens, 0, None) // GROUP, np.arange(rows)]
        return (*most, np.where(tokens < 0, 0, chosen), weighted)

    def check(found: Any) -> None:
        maxima, sums, larger, own, weighted = found
        np.testing.assert_array_equal(own, np.where(tokens < 0, 0, given))
        for group in range(tiles.groups):
            x = logits[:, group * GROUP : min((group + 1) * GROUP, limit)].astype(np.float64)
            if not x.shape[1]:
                x = np.full((rows, 1), -np.inf)
            with np.errstate(invalid="ignore"):
                largest = x.max(axis=1)
                moved = x - np.where(largest == -np.inf, 0, largest)[:, None]
                s = moved * (1 if inverse is None else inverse.astype(np.float64)[:, None])
                np.testing.assert_array_equal(maxima[group], largest)
                np.testing.assert_allclose(sums[group], np.exp(s).sum(1), rtol=ERROR, atol=1e-30)
                np.testing.assert_array_equal(larger[group], (x > given[:, None]).sum(1))
                if weighted is not None:
                    terms = (np.exp(s) * np.maximum(s, -200)).sum(1)
                    np.testing.assert_allclose(weighted[group], terms, rtol=3e-6, atol=1e-5)

    module = __import__(__name__, fromlist=["GPU"])
    tiling = Tiling(8448, "float32", 256, 1, 1)  # of other kernels; named in the table alone
    return Case(name, tiling, 0, rows, call, check, (module,))


def linear_cases() -> list[Any]:
    """Every way through the epilogue."""
    return [
        lambda: case("linear"),
        lambda: case("linear, bfloat16", dtype="bfloat16", temperatures=True, entropy=True),
        lambda: case("linear, float16", dtype="float16", scale=0.7, bias=True, limit=500),
        lambda: case("linear, all", "bfloat16", 0.3, True, True, True, limit=256, rows=264),
    ]

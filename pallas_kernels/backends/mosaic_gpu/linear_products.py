"""Products of hidden states and a head, tile by tile, as an H100 multiplies them.

One warpgroup loads steps of both into a ring of shared memory, by TMA; two programs of a pair share
what they load of the head. Two other warpgroups multiply them by wgmma, 64 rows each. While those
work on what they multiplied, the ring fills with the steps of the next tile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.linear_tiles import GROUP, HALF, ROWS, STAGES, STEP, Tiles

# Of 168 registers for each of 384 threads, those that load give most to those that multiply.
LOADING, MULTIPLYING = 40, 232
MULTIPLIERS = 2  # warpgroups
PLAIN = compat.VERSION < (0, 12)  # an interpreter that multiplies no transposed reference
PAIR = "pair"

# Of a tile of rows, a group, a half, and its products [HALF, GROUP] float32.
Finish = Callable[[Any, Any, Any, jax.Array], None]


def call(tiles: Tiles, kernel: Any, out_type: Any, name: str, programs: int, interpret: Any) -> Any:
    """A kernel of programs that multiply, before its arguments."""
    return GPU.kernel(
        kernel,
        out_type=out_type,
        grid=(programs,),
        grid_names=("program",),
        cluster=(tiles.together,) if tiles.together > 1 else (),
        cluster_names=(PAIR,) if tiles.together > 1 else (),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name=name,
        interpret=interpret,
    )


def products_of(
    tiles: Tiles,
    programs: int,
    interpreted: bool,
    hidden_ref: Any,
    head_ref: Any,
    finish: Finish,
) -> None:
    """Call `finish` with the products of every tile's halves."""
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    paired = tiles.together > 1
    second = lax.axis_index(PAIR) if paired else 0
    steps = tiles.steps
    mine = (tiles.number - program + programs - 1) // programs
    swizzled = (GPU.TilingTransform((8, STEP)), GPU.SwizzleTransform(2 * STEP))

    def place(i: Any) -> tuple[Any, Any]:
        row_tile, group = tiles.place(program + i * programs)
        return row_tile + second, group

    @functools.partial(
        pl.run_scoped,
        rows=GPU.SMEM((STAGES, ROWS, STEP), hidden_ref.dtype, transforms=swizzled),
        tokens=GPU.SMEM((STAGES, GROUP, STEP), head_ref.dtype, transforms=swizzled),
        full=GPU.Barrier(num_arrivals=2, num_barriers=STAGES),
        free=_free_barrier(paired and not interpreted),
        collective_axes="warpgroup",
    )
    def _(rows: Any, tokens: Any, full: Any, free: Any) -> None:
        @pl.when(warpgroup == MULTIPLIERS)
        def _() -> None:
            GPU.set_max_registers(LOADING, action="decrease")

            def tile(i: Any, _: None) -> None:
                row_tile, group = place(i)
                row, token = tiles.first_row(row_tile), tiles.first_token(group)

                def step(k: Any, _: None) -> None:
                    number = i * steps + k
                    stage = lax.rem(number, STAGES)
                    pl.when(number >= STAGES)(functools.partial(_wait_until_free, free, stage))
                    part = pl.ds(k * STEP, STEP)
                    GPU.copy_gmem_to_smem(
                        hidden_ref.at[pl.ds(row, ROWS), part], rows.at[stage], full.at[stage]
                    )
                    GPU.copy_gmem_to_smem(
                        head_ref.at[pl.ds(token, GROUP), part],
                        tokens.at[stage],
                        full.at[stage],
                        collective_axes=PAIR if paired else None,
                    )

                lax.fori_loop(0, steps, step, None)

            lax.fori_loop(0, mine, tile, None)
            # The other program of a pair still tells this one what it has read.
            read = mine * steps
            for stage in range(STAGES):
                pl.when(stage < read)(functools.partial(_wait_until_free, free, stage))

        @pl.when(warpgroup < MULTIPLIERS)
        def _() -> None:
            GPU.set_max_registers(MULTIPLYING, action="increase")
            half = pl.ds(warpgroup * HALF, HALF)

            def tile(i: Any, _: None) -> None:
                multiply = _product_on_cpu if interpreted and PLAIN else _product
                products = multiply(steps, i * steps, rows, tokens, full, free, half)
                finish(*place(i), warpgroup, products)

            lax.fori_loop(0, mine, tile, None)


def _free_barrier(paired: bool) -> Any:
    """What tells that a stage has been read: by both programs of a pair, as both write there."""
    if paired:
        return GPU.ClusterBarrier(
            collective_axes=(PAIR,), num_arrivals=MULTIPLIERS, num_barriers=STAGES
        )
    return GPU.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STAGES)


def _wait_until_free(free: Any, stage: Any) -> None:
    GPU.barrier_wait(free.at[stage])


def _product(
    steps: int, before: Any, rows: Any, tokens: Any, full: Any, free: Any, half: Any
) -> jax.Array:
    """A tile's products [HALF, GROUP] float32, by wgmma; `before`: steps of earlier tiles."""

    def run(products: Any) -> jax.Array:
        def step(k: Any, _: None) -> None:
            stage = lax.rem(before + k, STAGES)
            GPU.barrier_wait(full.at[stage])
            GPU.wgmma(products, rows.at[stage, half], compat.transposed(tokens.at[stage]))
            GPU.wgmma_wait(1)  # the step before this one is through with its memory
            last = lax.rem(before + k + STAGES - 1, STAGES)
            pl.when(k > 0)(lambda: GPU.barrier_arrive(free.at[last]))

        lax.fori_loop(0, steps, step, None)
        found = compat.asarray(products[...])
        GPU.barrier_arrive(free.at[lax.rem(before + steps - 1, STAGES)])
        return found

    return compat.asarray(pl.run_scoped(run, GPU.ACC((HALF, GROUP), jnp.float32)))


def _product_on_cpu(
    steps: int, before: Any, rows: Any, tokens: Any, full: Any, free: Any, half: Any
) -> jax.Array:
    """`_product`, where the interpreter has no wgmma of a transposed reference."""

    def step(k: Any, products: jax.Array) -> jax.Array:
        stage = lax.rem(before + k, STAGES)
        GPU.barrier_wait(full.at[stage])
        more = lax.dot_general(
            rows[stage, half],
            tokens[stage],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        GPU.barrier_arrive(free.at[stage])
        return products + more

    found: jax.Array = lax.fori_loop(0, steps, step, jnp.zeros((HALF, GROUP), jnp.float32))
    return found

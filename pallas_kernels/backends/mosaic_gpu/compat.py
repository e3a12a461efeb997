"""Pallas Mosaic GPU as the kernels need it: what differs between the supported jax versions
(0.10.2 to 0.12), in one place.
"""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.backends.mosaic_gpu.schedule import Index, Layout

GPU: Any = plgpu  # untyped: its members change between versions

JAX_VERSION = jax.__version_info__
Readable: TypeAlias = jax.Ref | jax.Array  # a reference in a kernel; outside of it, the array


def asarray(value: Any) -> jax.Array:
    """The same value, typed: what is traced in a kernel has no type of its own."""
    return value  # type: ignore[no-any-return]


def cast(value: jax.Array, layout: Layout) -> jax.Array:
    """The value in registers of this layout."""
    return asarray(GPU.layout_cast(value, layout))


def shape(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """An output's type."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _load(ref: Readable, layout: Layout, optimized: bool = False) -> jax.Array:
    """A vector from a reference into registers of this layout."""
    if JAX_VERSION >= (0, 11):
        return asarray(GPU.load(ref, layout=layout, optimized=optimized))
    return asarray(GPU.load(ref, (), layout=layout, optimized=optimized))


def store_vector(ref: jax.Ref, value: jax.Array) -> None:
    """A vector to a reference, even where it does not fill whole 32-byte sectors."""
    if JAX_VERSION >= (0, 12):
        GPU.store(ref, value, optimized=False)
    else:
        ref[...] = value


def store_some(ref: jax.Ref, start: Index, size: int, value: jax.Array) -> None:
    """A vector to `size` elements from `start` of a flat reference."""
    store_vector(ref.at[pl.ds(start, size)], value)


def _some(ref: Readable, start: Index, size: int) -> Any:
    """`size` elements from `start` of a flat reference, as one."""
    return ref.at[pl.ds(start, size)]


def load_block(
    ref: Readable,
    start: Index,
    shape: tuple[int, int],
    width: int,
    layout: Layout,
) -> list[jax.Array]:
    """rows * columns words from `start` of a flat reference, as pieces [rows, width]."""
    rows, columns = shape
    here = _some(ref, start, rows * columns).reshape(shape)
    return [_load(here.at[:, pl.ds(i, width)], layout) for i in range(0, columns, width)]


def load_vector(ref: Readable, start: Index, size: int) -> jax.Array:
    """`size` elements from `start` of a flat reference, one element a thread at a time."""
    return _load(_some(ref, start, size), vector_layout())


def compiler_params(approx_math: bool) -> Any:
    """Warpgroup semantics (jax 0.11's default) by name.

    approx_math: exponentials in one instruction, ex2.approx.ftz.f32: a relative error of 2**-22,
        and 0 for results below 2**-126.

    Pallas would put barriers around every store, which no load may pass. They are left out: what a
    thread of these kernels reads, another one has written only before a `commit_smem`, which is a
    barrier; reductions across warps bring their own.
    """
    return GPU.CompilerParams(
        lowering_semantics=GPU.LoweringSemantics.Warpgroup,
        approx_math=approx_math,
        unsafe_no_auto_barriers=True,
    )


def iota(shape: tuple[int, ...], dimension: int, layout: Layout) -> jax.Array:
    """int32 indices along one dimension, in registers of this layout."""
    return cast(jax.lax.broadcasted_iota(jnp.int32, shape, dimension), layout)


def vector_layout() -> Layout:
    """Registers of a flat vector: element i in thread i % 128, as `WG_STRIDED` would have it.

    Written as a tiling, because only of these an integer reduction is one instruction a warp
    (`redux`) and not five shuffles.
    """
    tiling = GPU.Tiling(((128,), (32,), (1,)))
    return GPU.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)  # type: ignore[no-any-return]


def run_layout(size: int, itemsize: int) -> Layout:
    """Registers of a flat vector of which each thread holds a run: of 128 * n elements, thread t
    has those from t * n on. It loads them in vectors of at most 16 bytes.
    """
    run = size // 128
    vector = math.gcd(run, 16 // itemsize)
    if vector == run:
        tiling = GPU.Tiling(((128 * run,), (32 * run,), (run,)))
        return GPU.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)  # type: ignore[no-any-return]
    tiling = GPU.Tiling(((128 * run,), (32 * run,), (run,), (vector,)))
    return GPU.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3,), vector_dim=-1)  # type: ignore[no-any-return]


def warp_layout() -> Layout:
    """Registers of a flat vector that every warp holds: element i in lane i % 32."""
    tiling = GPU.Tiling(((32,), (1,)))
    return GPU.Layout.TILED(tiling, warp_dims=(GPU.Replicated(4),), lane_dims=(-2,), vector_dim=-1)  # type: ignore[no-any-return]


def vector_iota(size: int) -> jax.Array:
    """[size] int32 indices, one element a thread at a time."""
    layout = vector_layout()
    return iota((size,), 0, layout)


def full(size: int, value: int) -> jax.Array:
    """[size] int32, all equal, one element a thread at a time."""
    layout = vector_layout()
    return cast(jnp.full((size,), value, jnp.int32), layout)


def splat(size: int, value: jax.Array) -> jax.Array:
    """[size], all equal to a scalar of the kernel, one element a thread at a time."""
    return cast(lax.broadcast_in_dim(value, (size,), ()), vector_layout())

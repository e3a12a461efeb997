"""Where hidden states and a head are: on one device, or split over a mesh.

inside `jax.shard_map`   the caller names the vocabulary's axis; rows are the device's own
mesh and axes named      `shard_map` on them, under any `jit`
sharding known           explicit axes, or arrays that exist: the same on theirs
"""

import jax
from jax.sharding import Mesh, NamedSharding

from pallas_kernels.meshes import placement
from pallas_kernels.meshes.placement import Layout


def placed(
    hidden: jax.Array,
    head: jax.Array,
    mesh: Mesh | None,
    axis_name: placement.AxisName | None,
    row_axis_name: placement.AxisName | None,
    vocab_size: int | None,
    head_axis: int = 0,
) -> placement.Place:
    """Where the arrays are, from what the caller says and they tell.

    Args:
      hidden: [N, H].
      head: with the vocabulary as its axis `head_axis`.
      mesh, axis_name, row_axis_name, vocab_size: as `linear_topk_logprobs` has them.
      head_axis: 0 or 1.

    Raises:
      ValueError: a mesh without an axis, an axis that does not exist, rows that do not divide.
    """
    layout = Layout(placement.names_of(row_axis_name), placement.names_of(axis_name))
    width = head.shape[head_axis]
    if mesh is None and row_axis_name is not None:
        raise ValueError(
            f"row_axis_name = {row_axis_name!r} without mesh; inside a shard_map the rows are the "
            "device's own and need no name, outside pass mesh too"
        )
    if mesh is None and axis_name is not None and layout.vocabulary:
        return placement.on_shard(axis_name, width, vocab_size)
    found: placement.AnyMesh | None = mesh
    if mesh is None:
        found, layout = _sharding_of(hidden, head, head_axis)
    elif layout == Layout():
        raise ValueError(
            f"mesh {dict(mesh.shape)} without axis_name or row_axis_name; name the vocabulary's "
            "axis, or the rows'"
        )
    if found is not None:
        _check_axes(found, layout)
        _check_divides("hidden", hidden.shape[0], found, layout.rows, "pad them")
        way_out = f"pad them, vocab_size = {width}"
        _check_divides("head", width, found, layout.vocabulary, way_out)
    return placement.Place(
        found, layout, placement.VocabShard(None, vocab_size).size(width), vocab_size is not None
    )


def _sharding_of(
    hidden: jax.Array, head: jax.Array, head_axis: int
) -> tuple[placement.AnyMesh | None, Layout]:
    """The mesh and the axes that the arrays tell; no mesh where they are whole or do not tell."""
    meshes: list[placement.AnyMesh] = []
    found: list[placement.MeshAxes] = []
    for x, axis in ((hidden, 0), (head, head_axis)):
        sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
        found.append(())
        if isinstance(sharding, NamedSharding):
            found[-1] = placement.names_of((*sharding.spec, None, None)[axis])
            meshes += [sharding.mesh] if found[-1] else []
    return (meshes[0] if meshes else None), Layout(*found)


def _check_axes(mesh: placement.AnyMesh, layout: Layout) -> None:
    rows, vocabulary = layout
    for axis in (*rows, *vocabulary):
        if axis not in mesh.shape:
            raise ValueError(f"{axis!r} is not an axis of the mesh {dict(mesh.shape)}")
    if {*rows} & {*vocabulary}:
        raise ValueError(
            f"rows over {rows} and the vocabulary over {vocabulary} share a mesh axis; split them "
            "over different ones"
        )


def _check_divides(
    name: str, size: int, mesh: placement.AnyMesh, axes: placement.MeshAxes, way_out: str
) -> None:
    count = placement.num_shards(mesh, axes)
    if size % count:
        raise ValueError(
            f"{size} rows of {name} do not divide into the {count} shards of {axes}; {way_out}"
        )

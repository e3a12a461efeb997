"""Where hidden states and a head are: on one device, or split over a mesh.

inside `jax.shard_map`   the caller names the vocabulary's axis; rows are the device's own
mesh and axes named      `shard_map` on them, under any `jit`
sharding known           explicit axes, or arrays that exist: the same on theirs
"""

import jax
from jax.sharding import Mesh

from pallas_kernels.contract.arguments import check_mesh
from pallas_kernels.meshes import placement
from pallas_kernels.meshes.placement import MeshLayout


def placed_product(
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
    check_mesh(mesh, vocab_size, axis_name=axis_name, row_axis_name=row_axis_name)
    layout = MeshLayout(placement.names_of(row_axis_name), placement.names_of(axis_name))
    width = head.shape[head_axis]
    if mesh is None and row_axis_name is not None:
        raise ValueError(
            f"row_axis_name = {row_axis_name!r} without mesh; inside a shard_map the rows are the "
            "device's own and need no name, outside pass mesh too"
        )
    if mesh is None and axis_name is not None and layout.vocabulary:
        return placement.on_shard(axis_name, width, vocab_size)
    mesh_of_arrays: placement.AnyMesh | None = mesh
    if mesh is None:
        # The mesh and the axes that the arrays tell.
        (row_mesh, hidden_layout), (column_mesh, head_layout) = map(
            placement.sharding_of, (hidden, head)
        )
        layout = MeshLayout(hidden_layout.rows, head_layout[head_axis])
        mesh_of_arrays = row_mesh if layout.rows else column_mesh if layout.vocabulary else None
    elif layout == MeshLayout():
        raise ValueError(
            f"mesh {dict(mesh.shape)} without axis_name or row_axis_name; name the vocabulary's "
            "axis, or the rows'"
        )
    if mesh_of_arrays is not None:
        _check_axes(mesh_of_arrays, layout)
        rows = hidden.shape[0]
        placement.check_divides("rows of hidden", rows, mesh_of_arrays, layout.rows, "pad them")
        placement.check_divides("rows of head", width, mesh_of_arrays, layout.vocabulary)
    return placement.Place(
        mesh_of_arrays,
        layout,
        placement.VocabShard(None, vocab_size).size(width),
        vocab_size is not None,
    )


def _check_axes(mesh: placement.AnyMesh, layout: MeshLayout) -> None:
    rows, vocabulary = layout
    for axis in (*rows, *vocabulary):
        if axis not in mesh.shape:
            raise ValueError(f"{axis!r} is not an axis of the mesh {dict(mesh.shape)}")
    if {*rows} & {*vocabulary}:
        raise ValueError(
            f"rows over {rows} and the vocabulary over {vocabulary} share a mesh axis; split them "
            "over different ones"
        )

"""Meshes from rendered depth: truncated signed distances (Curless and Levoy 1996), fused by Open3D.

Memory is bounded: the scene is cut into slabs with a limited number of blocks of voxels, which are fused one after the
other.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import trimesh

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.cleaning import join
from f3rm_ext.mesh.open3d_conversion import from_open3d
from f3rm_ext.mesh.views import NO_DEPTH, StoredViews
from f3rm_ext.utils.open3d_library import open3d

TRUNCATION_VOXELS = 5.0
"""Distance from the surface up to which voxels are filled, in voxels."""
BLOCK = 16
"""Voxels along each side of a block."""
MOST_BLOCKS = 8192
"""Blocks that are in memory at once: 20 bytes per voxel, 640 MiB."""
MOST_VERTICES = 1_000_000
"""Vertices of a mesh, about, above which voxels become wider than pixels."""
VERTICES_PER_BLOCK = 200
"""Vertices per block at the voxels of pixels; 180 to 240 were measured on photos, after short trainings."""
_FAR = 1e6


def choose_voxel(stored: StoredViews, pixel: float, wanted: Callable[[np.ndarray], np.ndarray] | None = None) -> float:
    """Returns the width of a pixel or, where the mesh would have more vertices than :data:`MOST_VERTICES`, more.

    Args:
        pixel: median width of a pixel on the surface, scene units.
        wanted: see :func:`fuse_depth`.
    """
    blocks = _all_blocks(stored, pixel, wanted)
    return pixel * max(1.0, float(np.sqrt(len(blocks) * VERTICES_PER_BLOCK / MOST_VERTICES)))


def fuse_depth(
    stored: StoredViews,
    voxel: float,
    min_weight: float = 1.0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    wanted: Callable[[np.ndarray], np.ndarray] | None = None,
) -> trimesh.Trimesh:
    """Fuses the depth and colours of all views into a mesh.

    Args:
        voxel: side of a voxel, scene units.
        min_weight: number of views that must have filled a voxel.
        on_progress: called with the number of views done and to do; slabs multiply them.
        wanted: tells which blocks are filled from their middles, (blocks, 3); by default all.

    Raises:
        MeshError: no view has depth.
    """
    blocks = _all_blocks(stored, voxel, wanted, on_progress)
    if not len(blocks):
        raise MeshError(NO_DEPTH)
    slabs = _slabs(blocks, MOST_BLOCKS)
    total = len(stored) * (1 + len(slabs))
    parts = []
    for number, slab in enumerate(slabs, 1):
        done = len(stored) * number
        parts.append(
            _fuse_slab(stored, voxel, min_weight, blocks, slab, lambda view, d=done: on_progress(d + view, total))
        )
    parts = [part for part in parts if len(part.faces)]
    if not parts:
        raise MeshError(
            "No surface is left: voxels are seen by too few views, so lower --min-views or enlarge --voxel."
        )
    if len(parts) == 1:
        return parts[0]
    joined = join(parts)
    # Vertices on the borders of slabs are in both, to the last bit.
    _, first, place = np.unique(joined.vertices, axis=0, return_index=True, return_inverse=True)
    joined.update_vertices(first, inverse=place.reshape(-1))
    return joined


def _grid(voxel: float, blocks: int) -> Any:
    o3d = open3d()
    kind = o3d.core.float32
    return o3d.t.geometry.VoxelBlockGrid(
        ("tsdf", "weight", "color"), (kind, kind, kind), ((1), (1), (3)), voxel, BLOCK, blocks
    )


def _touched_blocks(grid: Any, stored: StoredViews, index: int) -> tuple[np.ndarray, tuple[Any, Any, Any]]:
    """Coordinates of the blocks that a view touches, (blocks, 3) int32, and its depth image, intrinsics and pose.

    Open3D's voxel grid rounds pixels down as we do, and looks at every fourth of them.
    """
    tensor, depth = open3d().core.Tensor, np.array(stored.depth(index), np.float32)
    matrices = (stored.cameras.Ks[index], stored.cameras.viewmats[index])
    K, pose = (tensor(np.ascontiguousarray(matrix.double().numpy())) for matrix in matrices)
    frame = open3d().t.geometry.Image(tensor(depth)), K, pose
    touched = np.zeros((0, 3), np.int32)
    if (depth > 0).any():
        try:
            touched = grid.compute_unique_block_coordinates(*frame, 1.0, _FAR, TRUNCATION_VOXELS).numpy()
        except RuntimeError as error:
            if "No block is touched" not in str(error):
                raise
    return touched.astype(np.int32), frame


def _all_blocks(
    stored: StoredViews,
    voxel: float,
    wanted: Callable[[np.ndarray], np.ndarray] | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """Coordinates of all blocks that some view touches and that are wanted, (blocks, 3) int32."""
    grid, blocks = _grid(voxel, 1), np.zeros((0, 3), np.int32)  # the grid only computes coordinates, and stays empty
    for index in range(len(stored)):
        blocks = np.unique(np.concatenate([blocks, _touched_blocks(grid, stored, index)[0]]), axis=0)
        on_progress(index + 1, 2 * len(stored))
    return blocks if wanted is None else blocks[wanted((blocks + 0.5) * (voxel * BLOCK))]


def _slabs(blocks: np.ndarray, most: int) -> list[tuple[int, int, int]]:
    """Axis, first and end of block coordinates of slabs with at most this many blocks, but at least one layer."""
    axis = int(np.ptp(blocks, axis=0).argmax())
    first = int(blocks[:, axis].min())
    layers = np.bincount(blocks[:, axis] - first)
    slabs, begin, count = [], 0, 0
    for layer, size in enumerate(layers):
        if count and count + size > most:
            slabs.append((axis, first + begin, first + layer))
            begin, count = layer, 0
        count += int(size)
    slabs.append((axis, first + begin, first + len(layers)))
    return slabs


def _fuse_slab(
    stored: StoredViews,
    voxel: float,
    min_weight: float,
    blocks: np.ndarray,
    slab: tuple[int, int, int],
    on_view: Callable[[int], None],
) -> trimesh.Trimesh:
    """The mesh of one of :func:`_slabs`."""
    o3d, (axis, low, high) = open3d(), slab
    # The cubes of the last layer reach into the first voxels of the next one.
    slab_blocks = blocks[(blocks[:, axis] >= low) & (blocks[:, axis] <= high)]
    keys = {tuple(block) for block in slab_blocks.tolist()}
    grid = _grid(voxel, len(slab_blocks))
    for index in range(len(stored)):
        touched, (depth, K, pose) = _touched_blocks(grid, stored, index)
        inside = np.array([block for block in touched.tolist() if tuple(block) in keys], np.int32).reshape(-1, 3)
        if len(inside):
            color = o3d.t.geometry.Image(o3d.core.Tensor(stored.color(index).astype(np.float32) / 255.0))
            grid.integrate(o3d.core.Tensor(inside), depth, color, K, K, pose, 1.0, _FAR, TRUNCATION_VOXELS)
        on_view(index + 1)
    # Weights are whole numbers of views: half a view less keeps voxels with exactly as many as are wanted.
    mesh = from_open3d(grid.extract_triangle_mesh(min_weight - 0.5).to_legacy())
    if len(mesh.faces):
        middle = mesh.triangles_center[:, axis] / (voxel * BLOCK)
        mesh.update_faces((middle >= low) & (middle < high))
        mesh.remove_unreferenced_vertices()
    return mesh

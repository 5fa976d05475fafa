"""Meshes and point clouds of Open3D from ours, and back."""

from typing import Any

import numpy as np
import trimesh

from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.utils.open3d_library import open3d


def point_cloud(positions: np.ndarray, normals: np.ndarray | None = None, colors: np.ndarray | None = None) -> Any:
    """Returns Open3D's point cloud; normals and colours (0 to 1) are optional."""
    o3d = open3d()
    cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(np.asarray(positions, np.float64)))
    if normals is not None:
        cloud.normals = o3d.utility.Vector3dVector(np.asarray(normals, np.float64))
    if colors is not None:
        cloud.colors = o3d.utility.Vector3dVector(np.asarray(colors, np.float64))
    return cloud


def to_open3d(mesh: trimesh.Trimesh) -> Any:
    """Returns Open3D's triangle mesh with the same vertices, faces and vertex colours."""
    o3d = open3d()
    result = o3d.geometry.TriangleMesh(
        o3d.utility.Vector3dVector(np.asarray(mesh.vertices, np.float64)),
        o3d.utility.Vector3iVector(np.asarray(mesh.faces, np.int32)),
    )
    colors = vertex_colors(mesh)
    if colors is not None:
        result.vertex_colors = o3d.utility.Vector3dVector(colors / 255.0)
    return result


def from_open3d(mesh: Any) -> trimesh.Trimesh:
    """Returns the mesh of Open3D's triangle mesh, with its vertex colours if it has any."""
    colors = None
    if mesh.has_vertex_colors():
        colors = np.rint(255 * np.clip(np.asarray(mesh.vertex_colors), 0, 1)).astype(np.uint8)
    return trimesh.Trimesh(
        np.array(mesh.vertices), np.array(mesh.triangles, dtype=np.int64), vertex_colors=colors, process=False
    )

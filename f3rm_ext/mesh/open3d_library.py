"""Open3D, imported where it is used: it takes a second, and needs a library that bare machines lack."""

from typing import Any

import numpy as np
import trimesh

from f3rm_ext.errors import ConfigError, reason_of
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.utils.libusb import provide_libusb


def open3d() -> Any:
    """Returns the module.

    Raises:
        ConfigError: it is not installed, or a library of the system that it needs is not.
    """
    provide_libusb()
    try:
        import open3d as module
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"Open3D cannot be imported ({reason_of(error)}), and meshes need it: `pip install open3d libusb-package`, "
            "or install the library that is named here with the system's package manager."
        ) from error
    module.utility.set_verbosity_level(module.utility.VerbosityLevel.Error)
    return module


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
    made = o3d.geometry.TriangleMesh(
        o3d.utility.Vector3dVector(np.asarray(mesh.vertices, np.float64)),
        o3d.utility.Vector3iVector(np.asarray(mesh.faces, np.int32)),
    )
    colors = vertex_colors(mesh)
    if colors is not None:
        made.vertex_colors = o3d.utility.Vector3dVector(colors / 255.0)
    return made


def raycasting_scene(vertices: np.ndarray, faces: np.ndarray) -> Any:
    """Returns Open3D's scene for casting rays at triangles: vertices (vertices, 3) and their indices (faces, 3)."""
    o3d = open3d()
    scene = o3d.t.geometry.RaycastingScene()
    scene.add_triangles(
        o3d.core.Tensor(np.asarray(vertices, np.float32)), o3d.core.Tensor(np.asarray(faces, np.uint32))
    )
    return scene


def from_open3d(mesh: Any) -> trimesh.Trimesh:
    """Returns the mesh of Open3D's triangle mesh, with its vertex colours if it has any."""
    colors = None
    if mesh.has_vertex_colors():
        colors = np.rint(255 * np.clip(np.asarray(mesh.vertex_colors), 0, 1)).astype(np.uint8)
    return trimesh.Trimesh(
        np.array(mesh.vertices), np.array(mesh.triangles, dtype=np.int64), vertex_colors=colors, process=False
    )

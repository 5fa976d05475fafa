"""The mesh that a refinement starts from, in the scene frame."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.bound.gaussians import BoundGaussians
from f3rm_ext.mesh.bound.layout import barycentric_weights
from f3rm_ext.mesh.texture.photos import Photos
from f3rm_ext.utils.open3d_library import RayCaster

_THINNEST = 1e-7
"""Triangles are dropped whose height is a smaller share of their longest edge: float32 gives them no normal."""


@dataclass(frozen=True)
class StartMesh:
    """A mesh to bind Gaussians to."""

    vertices: Float[Tensor, "verts 3"]
    """Scene frame; each belongs to a triangle, and no two lie at the same place."""
    faces: Int[Tensor, "faces 3"]
    """Vertex indices; every triangle has an area."""
    corner_colors: Float[Tensor, "faces 3 3"] | None
    """Colours of the triangles' corners, 0 to 1; None where the mesh has none."""
    frame: Literal["capture", "scene"]
    """Frame of the file."""


def read_start_mesh(
    path: Path, frame: Literal["auto", "capture", "scene"], find_capture: Callable[[], CaptureFrame] | None
) -> StartMesh:
    """Reads a mesh and brings it to the scene frame.

    Args:
        path: .ply, .obj, .glb …
        frame: of the file; auto takes what the file says of itself, else capture.
        find_capture: gives the map between the frames; None for a mesh in the scene frame.

    Raises:
        MeshError: there is no such file, it cannot be read, it has no triangles with an area, or it is in the scene
            frame of another capture.
    """
    from f3rm_ext.mesh.mesh_files import find_frame, read_mesh, vertex_colors

    mesh, frame = read_mesh(path), find_frame(path, frame, find_capture)
    vertices, faces = np.asarray(mesh.vertices, np.float64), np.asarray(mesh.faces, np.int64)
    if frame == "capture":
        assert find_capture is not None
        vertices = find_capture().to_scene(vertices)
    vertices = vertices.astype(np.float32)
    solid = _have_area(vertices[faces].astype(np.float64))
    if not solid.any():
        raise MeshError(f"None of the {len(faces)} triangles of {path} has an area: give another mesh.")
    faces = faces[solid]
    colors = vertex_colors(mesh)
    corners = None if colors is None else torch.from_numpy(colors[faces].astype(np.float32) / 255)
    # Vertices doubled at seams and sharp edges would drift apart.
    places, number = np.unique(vertices[faces].reshape(-1, 3), axis=0, return_inverse=True)
    return StartMesh(torch.from_numpy(places), torch.from_numpy(number.reshape(-1, 3)), corners, frame)


def far_from_mesh(
    points: Float[Tensor, "points 3"], mesh: StartMesh, cameras: Float[Tensor, "cams 3"], share: float
) -> Bool[Tensor, " points"]:
    """Returns which points are farther from a mesh than a share, above 0, of their distance from the nearest camera.

    All are in the scene frame and on the CPU.
    """
    from scipy.spatial import KDTree

    *_, away = RayCaster(mesh.vertices.numpy(), mesh.faces.numpy()).nearest(points.numpy())
    return torch.from_numpy(away > share * KDTree(cameras.numpy()).query(points.numpy())[0])


def _have_area(corners: Float[np.ndarray, "faces 3 3"]) -> np.ndarray:
    edges = corners - np.roll(corners, 1, axis=1)
    longest = np.square(edges).sum(axis=2).max(axis=1)
    doubled = np.linalg.norm(np.cross(edges[:, 0], edges[:, 1]), axis=1)
    return doubled > np.maximum(_THINNEST * longest, 1e-20)


def photo_colors(bound: BoundGaussians, photos: Photos) -> Float[Tensor, "bound 3"]:
    """Returns the colours of the Gaussians on triangles, 0 to 1, blended from photos as those of texels are.

    A short run could not find them: a step of Adam changes a colour by no more than its learning rate. At least one
    photo must see the mesh, which is in their frame and on the CPU.
    """
    import trimesh  # slow to import

    from f3rm_ext.mesh.texture.atlas import Texels
    from f3rm_ext.mesh.texture.blending import blend_photos

    count, faces = bound.per_triangle, bound.faces.numpy()
    mesh = trimesh.Trimesh(bound.vertices.double().numpy(), faces, process=False)
    weights = np.tile(barycentric_weights(count)[:, 1:].numpy(), (len(faces), 1))
    centers = Texels(np.repeat(np.arange(len(faces)), count), weights, np.arange(len(weights)))
    blend = blend_photos(mesh, centers, np.asarray(mesh.area_faces / count, np.float32), photos, balance=False)
    return torch.from_numpy(blend.colors / 255).float()

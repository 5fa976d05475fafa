"""What a fused mesh misses: leaves and other thin things, and surfaces on which too few views agree.

A thing thinner than the truncation has no inside: the distances that views from its two sides give to a voxel cancel
out, and it is gone. So pixels whose depth lies in front of the mesh are fused again, apart from all others, and apart
from those of other directions of sight: what is seen from one side is one sheet.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import trimesh
from jaxtyping import Bool, Float32, UInt8

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.cleaning import clean, face_components, select_faces
from f3rm_ext.mesh.views import StoredViews, write_values
from f3rm_ext.utils.open3d_library import RayCaster

GAP = 0.03
"""How far in front of the mesh a pixel's depth is that the mesh misses, as a share of the depth."""
FEWEST_FACES = 20
"""Smaller pieces of what was missed are dropped."""
Fuse = Callable[[StoredViews], trimesh.Trimesh]
"""Fuses views; raises MeshError where they show no surface."""
Report = Callable[[int], None]
"""Called with the number of views done."""


Completion = tuple[list[trimesh.Trimesh], float]
"""Parts that a mesh lacks, scene frame, and the share of all pixels that they were made of."""


def thin_parts(
    stored: StoredViews, mesh: trimesh.Trimesh, fuse: Fuse, on_progress: Report = lambda done: None
) -> Completion:
    """Fuses what views agree on and the mesh does not show, from each of six sides by itself.

    Args:
        stored: the views that the mesh was made of, with the depth that was fused.
        mesh: scene frame.
    """

    def choose(index: int, away: np.ndarray, inside: np.ndarray) -> UInt8[np.ndarray, "h w"]:
        depth = stored.depth(index)
        missed = (depth > 0) & (away > (1 + GAP) * depth)
        return np.where(missed, 1 + _sides(stored.cameras, index), 0).astype(np.uint8)

    return _fuse_selected(stored, mesh, choose, stored.depth, fuse, on_progress)


def hole_parts(
    stored: StoredViews, mesh: trimesh.Trimesh, fuse: Fuse, on_progress: Report = lambda done: None
) -> Completion:
    """Fuses what was rendered where photos look through holes of a mesh, although too few views agree on it.

    Through a hole a camera sees nothing of the mesh, or its inside.

    Args:
        stored: the views that the mesh was made of.
        mesh: scene frame, triangles counter-clockwise from outside.
    """

    def choose(index: int, away: np.ndarray, inside: np.ndarray) -> UInt8[np.ndarray, "h w"]:
        rendered = stored.rendered_depth(index)
        sees_past = np.isinf(away) | (inside & (away > (1 + GAP) * rendered))
        return ((rendered > 0) & sees_past).astype(np.uint8)

    return _fuse_selected(stored, mesh, choose, stored.rendered_depth, fuse, on_progress)


class _SelectedPixels(StoredViews):
    """Views in which only some pixels have depth."""

    def __init__(self, stored: StoredViews, depth: Callable[[int], Float32[np.ndarray, "h w"]]) -> None:
        self.cameras, self._stored, self._depth = stored.cameras, stored, depth

    def color(self, index: int) -> UInt8[np.ndarray, "h w 3"]:
        return self._stored.color(index)

    def depth(self, index: int) -> Float32[np.ndarray, "h w"]:
        return self._depth(index)


def _fuse_selected(
    stored: StoredViews,
    mesh: trimesh.Trimesh,
    choose: Callable[[int, Float32[np.ndarray, "h w"], Bool[np.ndarray, "h w"]], UInt8[np.ndarray, "h w"]],
    depth: Callable[[int], Float32[np.ndarray, "h w"]],
    fuse: Fuse,
    on_progress: Report,
) -> Completion:
    """Fuses pixels that are chosen by what is seen of the mesh, those of each number above 0 by themselves.

    Args:
        choose: is given a view, the mesh's depth in it, infinite where there is none, and whether that is the back of a
            triangle.
    """
    caster = RayCaster(mesh.vertices, mesh.faces)
    counts = np.zeros(256, np.int64)
    with tempfile.TemporaryDirectory(prefix="f3rm-ext-completion-") as folder:
        for index in range(len(stored)):
            origin, directions = Camera.of(stored.cameras, index).pixel_rays()
            hit = caster.cast(origin, directions)
            inside = (hit["primitive_normals"] * directions).sum(axis=-1) > 0
            chosen = choose(index, hit["t_hit"], inside)
            counts += np.bincount(chosen.reshape(-1), minlength=256)
            write_values(Path(folder, str(index)), chosen)
            on_progress(index + 1)
        parts = []
        for number in np.flatnonzero(counts[1:]) + 1:

            def chosen_depth(index: int, number: int = int(number)) -> Float32[np.ndarray, "h w"]:
                values = depth(index)
                chosen = np.fromfile(Path(folder, str(index)), np.uint8).reshape(values.shape)
                return np.where(chosen == number, values, np.float32(0))

            try:
                part = clean(fuse(_SelectedPixels(stored, chosen_depth)))
            except MeshError:  # a few pixels alone make no surface
                continue
            pieces = face_components(part)
            part = select_faces(part, (np.bincount(pieces) >= FEWEST_FACES)[pieces])
            if len(part.faces):
                parts.append(part)
    return parts, float(counts[1:].sum() / max(counts.sum(), 1))


def _sides(cameras: PinholeCameras, index: int) -> UInt8[np.ndarray, "h w"]:
    """Which axis of the scene each pixel's ray follows most, and in which direction: 0 to 5."""
    _, rays = Camera.of(cameras, index).pixel_rays()
    axis = np.abs(rays).argmax(axis=-1)
    backwards = np.take_along_axis(rays, axis[..., None], axis=-1)[..., 0] < 0
    return (2 * axis + backwards).astype(np.uint8)

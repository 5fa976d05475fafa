"""Triangle meshes of the scene, and functions that move and join them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, Int

Real = int | float


@dataclass(frozen=True)
class Mesh:
    """A triangle mesh with smooth normals; vertices are doubled at sharp edges."""

    vertices: Float[np.ndarray, "verts 3"]
    """Metres, z up."""
    normals: Float[np.ndarray, "verts 3"]
    """Outward unit normals of the smooth surface that the mesh approximates."""
    faces: Int[np.ndarray, "faces 3"]
    """Vertex indices, counter-clockwise seen from outside."""
    coords: Float[np.ndarray, "verts 3"]
    """Texture coordinates, the arguments of the patterns in :mod:`f3rm_ext.synthetic.patterns`."""
    material: Int[np.ndarray, "_"] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Material index of each face; empty until the mesh is given a material."""
    label: Int[np.ndarray, "_"] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Object id of each face; empty until the mesh is given a label."""

    def move(self, transform: Float[np.ndarray, "4 4"]) -> "Mesh":
        """Returns the mesh under a similarity transform. Texture coordinates move with the surface."""
        normals = self.normals @ transform[:3, :3].T
        return replace(
            self,
            vertices=self.vertices @ transform[:3, :3].T + transform[:3, 3],
            normals=normals / np.linalg.norm(normals, axis=1, keepdims=True),
        )

    def place(self, x: Real = 0.0, y: Real = 0.0, z: Real = 0.0, turn_deg: Real = 0.0, tilt_deg: Real = 0.0) -> "Mesh":
        """Returns the mesh tilted about x, then turned about z, then shifted by (x, y, z) metres."""
        return self.move(placement(x, y, z, turn_deg, tilt_deg))

    def texture(self, coords: np.ndarray) -> "Mesh":
        """Returns the mesh with other texture coordinates."""
        return replace(self, coords=np.asarray(coords, np.float64))

    def paint(self, material: int) -> "Mesh":
        """Returns the mesh with one material on every face."""
        return replace(self, material=np.full(len(self.faces), material, np.int32))

    def compact(self) -> "Mesh":
        """Returns the mesh without vertices that no face uses."""
        used = np.unique(self.faces)
        number = np.zeros(len(self.vertices), np.int32)
        number[used] = np.arange(len(used))
        return replace(
            self,
            vertices=self.vertices[used],
            normals=self.normals[used],
            coords=self.coords[used],
            faces=number[self.faces],
        )

    def tag(self, label: int) -> "Mesh":
        """Returns the mesh with the label of one object on every face."""
        return replace(self, label=np.full(len(self.faces), label, np.int32))


def placement(x: Real, y: Real, z: Real, turn_deg: Real = 0.0, tilt_deg: Real = 0.0) -> Float[np.ndarray, "4 4"]:
    """Returns the rigid transform that tilts about x, then turns about z, then shifts.

    >>> placement(1, 2, 3)[:3, 3].tolist()
    [1.0, 2.0, 3.0]
    """
    turn, tilt = np.deg2rad(turn_deg), np.deg2rad(tilt_deg)
    about_z = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
    about_x = np.array([[1, 0, 0], [0, np.cos(tilt), -np.sin(tilt)], [0, np.sin(tilt), np.cos(tilt)]])
    transform = np.eye(4)
    transform[:3, :3] = about_z @ about_x
    transform[:3, 3] = (x, y, z)
    return transform


def join_meshes(meshes: Sequence[Mesh]) -> Mesh:
    """Joins several meshes into one, in order."""
    offsets = np.cumsum([0] + [len(mesh.vertices) for mesh in meshes[:-1]])
    joined = {name: np.concatenate([getattr(mesh, name) for mesh in meshes]) for name in vars(meshes[0])}
    joined["faces"] = np.concatenate([mesh.faces + offset for mesh, offset in zip(meshes, offsets, strict=True)])
    return Mesh(**joined)

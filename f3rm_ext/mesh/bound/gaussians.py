"""Flat Gaussians as a function of the mesh that they are bound to."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext.memory.shapes import fits_numba
from f3rm_ext.mesh.bound.layout import INITIAL_SIZES, barycentric_weights
from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh, sh_rest_count, sh_to_rgb

if TYPE_CHECKING:
    import trimesh

THICKNESS = 1e-6
"""Standard deviation of a flat Gaussian along its triangle's normal, in units of the extent of the scene."""
GREY = 0.5
"""Colour, 0 to 1, where a mesh has none."""
_EQUILATERAL = ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.5, 3**0.5 / 2, 0.0))
"""Corners of a triangle of side 1."""


@dataclass(frozen=True)
class BoundGaussians:
    """Gaussians that lie flat on triangles, the same number on each, in the order of the triangles; then free ones."""

    vertices: Float[Tensor, "verts 3"]
    """Scene frame."""
    faces: Int[Tensor, "faces 3"]
    """Vertex indices."""
    scales: Float[Tensor, "bound 2"]
    """Natural logarithms of the standard deviations in the plane, scene units."""
    turns: Float[Tensor, "bound 2"]
    """Rotations in the plane as complex numbers (real, imaginary) of any length; 1 is along the triangle's frame."""
    opacities: Float[Tensor, "gaussians 1"]
    """Logits."""
    features_dc: Float[Tensor, "gaussians 3"]
    """SH coefficients of degree 0."""
    features_rest: Float[Tensor, "gaussians coeffs 3"]
    """SH coefficients of degrees 1 and up."""
    thickness: float
    """Standard deviation along the normal, scene units, > 0."""
    free_means: Float[Tensor, "free 3"] = field(default_factory=lambda: torch.zeros(0, 3))
    """Centres of the Gaussians that belong to no triangle, scene frame."""
    free_scales: Float[Tensor, "free 3"] = field(default_factory=lambda: torch.zeros(0, 3))
    """Natural logarithms of their standard deviations, scene units."""
    free_quats: Float[Tensor, "free 4"] = field(default_factory=lambda: torch.zeros(0, 4))
    """Their rotations (w, x, y, z)."""

    def __len__(self) -> int:
        return len(self.opacities)

    @property
    def per_triangle(self) -> int:
        """Number of Gaussians on each triangle."""
        return len(self.scales) // max(len(self.faces), 1)

    def gaussians(self) -> Gaussians:
        """Returns the Gaussians in the scene frame; differentiable. Harmonics and opacities are the same tensors."""
        thin = torch.full_like(self.scales[:, :1], self.thickness).log()
        scales = torch.cat([self.scales, thin], dim=1)
        means, quats = self._places()
        if len(self.free_means):
            means = torch.cat([means, self.free_means])
            scales, quats = torch.cat([scales, self.free_scales]), torch.cat([quats, self.free_quats])
        return Gaussians(means, scales, quats, self.opacities, self.features_dc, self.features_rest)

    def _places(self) -> tuple[Float[Tensor, "bound 3"], Float[Tensor, "bound 4"]]:
        """Returns the centres and rotations of the Gaussians on triangles."""
        vertices, faces, turns, count = self.vertices, self.faces, self.turns, self.per_triangle
        # The viewer looks at a model before it has its mesh.
        weights = barycentric_weights(count, vertices.device, vertices.dtype) if count else vertices.new_zeros(0, 3)
        if fits_numba(vertices, turns):
            # numba loads slowly, and every ns-* command loads this module to register the method.
            from f3rm_ext.mesh.bound.kernels import BoundGeometry

            return BoundGeometry.apply(vertices, turns, faces, weights)  # type: ignore[return-value]
        corners = vertices[faces]
        frames = frame_quats(triangle_frames(corners)).repeat_interleave(count, dim=0)
        means = torch.einsum("nk,fkc->fnc", weights, corners).reshape(-1, 3)
        return means, rotate_in_plane(frames, functional.normalize(turns, dim=1))

    def join_free(self, gaussians: Gaussians) -> "BoundGaussians":
        """Returns these Gaussians and free ones, of the same SH degree."""
        shared = ("opacities", "features_dc", "features_rest")
        both = {name: torch.cat([getattr(self, name), getattr(gaussians, name)]) for name in shared}
        free = {f"free_{name}": getattr(gaussians, name) for name in ("means", "scales", "quats")}
        return replace(self, **both, **free)

    @torch.no_grad()
    def deform(self, vertices: Float[Tensor, "verts 3"]) -> "BoundGaussians":
        """Returns the Gaussians on the mesh with its vertices elsewhere.

        Each is mapped in the plane as its triangle is, so it is stretched, sheared and turned with it; it stays as
        flat. Free ones stay where they are. The dependence of colours on the viewing direction stays in the scene
        frame, and the vertices stay as many.
        """
        old, new = (_in_plane_edges(places[self.faces]) for places in (self.vertices, vertices))
        stretch = (new @ torch.linalg.inv(old)).repeat_interleave(self.per_triangle, dim=0)
        x, y = functional.normalize(self.turns, dim=1).unbind(1)
        turn = torch.stack([torch.stack([x, -y], dim=1), torch.stack([y, x], dim=1)], dim=1)
        axes, sizes = _ellipses(stretch @ turn * self.scales.exp()[:, None, :])
        return replace(self, vertices=vertices, scales=sizes.log(), turns=axes)


def bind(
    vertices: Float[Tensor, "verts 3"],
    faces: Int[Tensor, "faces 3"],
    corner_colors: Float[Tensor, "faces 3 3"] | None,
    per_triangle: int,
    sh_degree: int,
    alpha: float,
    thickness: float,
) -> BoundGaussians:
    """Lays Gaussians on the triangles of a mesh that fill them, whatever their shapes.

    They are the circles of :mod:`f3rm_ext.mesh.bound.layout` in an equilateral triangle, mapped as that triangle is.

    Args:
        vertices: scene frame.
        faces: vertex indices; no triangle has an area of 0.
        corner_colors: colours at the triangles' corners, 0 to 1; None for grey.
        per_triangle: 1, 3, 4 or 6.
        sh_degree: of the colours, 0 to 3.
        alpha: opacity of each, between 0 and 1.
        thickness: standard deviation along the normal, scene units.
    """
    count = len(faces) * per_triangle
    stretch = _in_plane_edges(vertices[faces]) @ torch.linalg.inv(_in_plane_edges(torch.tensor([_EQUILATERAL])))
    axes, sizes = _ellipses(INITIAL_SIZES[per_triangle] * stretch)
    if corner_colors is None:
        colors = torch.full((count, 3), GREY)
    else:
        colors = torch.einsum("nk,fkc->fnc", barycentric_weights(per_triangle), corner_colors).reshape(-1, 3)
    return BoundGaussians(
        vertices=vertices,
        faces=faces,
        scales=sizes.log().repeat_interleave(per_triangle, dim=0),
        turns=axes.repeat_interleave(per_triangle, dim=0),
        opacities=torch.full((count, 1), alpha).logit(),
        features_dc=rgb_to_sh(colors),
        features_rest=torch.zeros(count, sh_rest_count(sh_degree), 3),
        thickness=thickness,
    )


def triangle_normals(corners: Float[Tensor, "faces 3 3"]) -> Float[Tensor, "faces 3"]:
    """Returns the unit normals of triangles, towards the side from which their corners run counter-clockwise."""
    first, second, third = corners.unbind(1)
    return functional.normalize(torch.linalg.cross(second - first, third - first), dim=1, eps=1e-20)


def triangle_frames(corners: Float[Tensor, "faces 3 3"]) -> Float[Tensor, "faces 3 3"]:
    """Returns rotations whose columns are e = (v0 − v1) / |v0 − v1|, n × e and the normal n."""
    normals = triangle_normals(corners)
    along = functional.normalize(corners[:, 0] - corners[:, 1], dim=1, eps=1e-20)
    return torch.stack([along, torch.linalg.cross(normals, along), normals], dim=2)


def frame_quats(rotations: Float[Tensor, "frames 3 3"]) -> Float[Tensor, "frames 4"]:
    """Returns the unit quaternions (w, x, y, z) of rotations, either sign; differentiable everywhere.

    Each row of K = 4 q qᵀ, which is linear in the rotation, is a multiple of q; the longest of the four is taken.

    >>> frame_quats(torch.eye(3)[None]).tolist()
    [[1.0, 0.0, 0.0, 0.0]]
    """
    a, b, c, d, e, f, g, h, i = rotations.flatten(1).unbind(1)
    rows = (
        (1 + a + e + i, h - f, c - g, d - b),
        (h - f, 1 + a - e - i, b + d, c + g),
        (c - g, b + d, 1 - a + e - i, f + h),
        (d - b, c + g, f + h, 1 - a - e + i),
    )
    table = torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)
    longest = table.detach().diagonal(dim1=1, dim2=2).argmax(dim=1)
    return functional.normalize(table.gather(1, longest[:, None, None].expand(-1, 1, 4)).squeeze(1), dim=1)


def rotate_in_plane(
    quats: Float[Tensor, "gaussians 4"], turns: Float[Tensor, "gaussians 2"]
) -> Float[Tensor, "gaussians 4"]:
    """Turns frames, given as unit quaternions (w, x, y, z), about their third axis by (cos φ, sin φ).

    The resulting quaternions are not of unit length.
    """
    cosine, sine = turns.unbind(1)
    # (cos φ/2, sin φ/2), up to a factor: the form that does not vanish.
    front = cosine >= 0
    half_cosine, half_sine = torch.where(front, 1 + cosine, sine), torch.where(front, sine, 1 - cosine)
    w, x, y, z = quats.unbind(1)
    w, z = w * half_cosine - z * half_sine, z * half_cosine + w * half_sine
    x, y = x * half_cosine + y * half_sine, y * half_cosine - x * half_sine
    return torch.stack([w, x, y, z], dim=1)


def _ellipses(
    maps: Float[Tensor, "gaussians 2 2"],
) -> tuple[Float[Tensor, "gaussians 2"], Float[Tensor, "gaussians 2"]]:
    """Returns what maps make of the unit circle: the direction of the longer axis, and both half axes."""
    axes, sizes, _ = torch.linalg.svd(maps)
    return axes[:, :, 0].contiguous(), sizes.clamp_min(1e-12)


def _in_plane_edges(corners: Float[Tensor, "faces 3 3"]) -> Float[Tensor, "faces 2 2"]:
    """Returns the edges from the first corner as columns, in the first two axes of the triangles' frames."""
    edges = torch.stack([corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]], dim=2)
    return triangle_frames(corners)[:, :, :2].transpose(1, 2) @ edges


@torch.no_grad()
def refined_mesh(bound: BoundGaussians) -> "trimesh.Trimesh":
    """Returns the mesh that Gaussians are bound to, scene frame.

    A vertex has the mean colour of the Gaussians on its triangles, those near it counting more: their weight is their
    opacity times the barycentric weight of the vertex.
    """
    import trimesh  # slow to import

    count = len(bound.scales)
    colors = sh_to_rgb(bound.features_dc[:count]).clamp(0, 1).reshape(len(bound.faces), -1, 3)
    alphas = bound.opacities[:count].sigmoid().reshape(len(bound.faces), -1)
    weights = alphas[:, :, None] * barycentric_weights(bound.per_triangle, alphas.device, alphas.dtype)
    sums = torch.cat([torch.einsum("fnk,fnc->fkc", weights, colors), weights.sum(dim=1)[:, :, None]], dim=2)
    total = bound.vertices.new_zeros(len(bound.vertices), 4)
    total.index_add_(0, bound.faces.flatten(), sums.reshape(-1, 4))
    shades = (total[:, :3] / total[:, 3:].clamp_min(1e-12) * 255).round().to(torch.uint8)
    return trimesh.Trimesh(
        bound.vertices.cpu().numpy().astype(np.float64),
        bound.faces.cpu().numpy(),
        vertex_colors=shades.cpu().numpy(),
        process=False,
    )

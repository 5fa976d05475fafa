"""What keeps a mesh smooth while its vertices move: consistent normals of neighbouring triangles, and the Laplacian."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from f3rm_ext.memory.shapes import fits_numba, lacks_values
from f3rm_ext.mesh.bound.gaussians import triangle_normals


class TrianglePairs(NamedTuple):
    """Pairs of triangles that share an edge."""

    first: Int[Tensor, " pairs"]
    """Index of one triangle."""
    second: Int[Tensor, " pairs"]
    """Index of the other."""
    signs: Float[Tensor, " pairs"]
    """1 where both face the same side of the surface, −1 where one of them is wound the other way."""


@torch.no_grad()
def triangle_pairs(faces: Int[Tensor, "faces 3"]) -> TrianglePairs:
    """Finds the pairs of triangles that share an edge. Three and more at an edge are paired in a row.

    >>> first, second, signs = triangle_pairs(torch.tensor([[0, 1, 2], [2, 1, 3]]))
    >>> first.tolist(), second.tolist(), signs.tolist()
    ([0], [1], [1.0])
    """
    if lacks_values(faces):  # a closed mesh has three edges for two triangles
        count = 3 * len(faces) // 2
        signs = torch.empty(count, device=faces.device)
        return TrianglePairs(faces.new_empty(count), faces.new_empty(count), signs)
    starts, ends = faces.flatten(), faces.roll(-1, dims=1).flatten()
    owners = torch.arange(len(faces), device=faces.device).repeat_interleave(3)
    low, high = torch.minimum(starts, ends), torch.maximum(starts, ends)
    keys = low * (int(faces.max()) + 1 if len(faces) else 1) + high
    keys, order = keys.sort(stable=True)
    here = (keys[1:] == keys[:-1]).nonzero()[:, 0]
    one, two = order[here], order[here + 1]
    opposite = (starts[one] < ends[one]) != (starts[two] < ends[two])
    return TrianglePairs(owners[one], owners[two], torch.where(opposite, 1.0, -1.0))


def normal_inconsistency(
    vertices: Float[Tensor, "verts 3"], faces: Int[Tensor, "faces 3"], pairs: TrianglePairs
) -> Float[Tensor, ""]:
    """Computes the mean of 1 − n·m over pairs of neighbouring triangles with normals n and m; 0 without pairs.
    Differentiable in the vertices."""
    if not len(pairs.first):
        return 0 * vertices.sum()
    if fits_numba(vertices, pairs.signs):
        # numba loads slowly, and every ns-* command loads this module to register the method.
        from f3rm_ext.mesh.bound.kernels import NormalInconsistency

        return NormalInconsistency.apply(vertices, faces, *pairs)  # type: ignore[return-value]
    normals = triangle_normals(vertices[faces])
    return (1 - pairs.signs * (normals[pairs.first] * normals[pairs.second]).sum(dim=1)).mean()


@dataclass(frozen=True)
class VertexEdges:
    """The edges of a mesh, each once, and the number of edges at each vertex."""

    ends: Int[Tensor, "edges 2"]
    """Vertex indices."""
    counts: Int[Tensor, " verts"]
    """0 for vertices without triangles."""

    @classmethod
    def of(cls, faces: Int[Tensor, "faces 3"], count: int) -> "VertexEdges":
        """Finds the edges of a mesh with so many vertices."""
        ends = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).sort(dim=1).values.unique(dim=0)
        return cls(ends, ends.flatten().bincount(minlength=count))


def roughness(vertices: Float[Tensor, "verts 3"], edges: VertexEdges) -> Float[Tensor, ""]:
    """Computes the mean distance of the vertices from the mean of their neighbours (the uniform Laplacian).

    Differentiable in the vertices; those without an edge count as smooth.
    """
    first, second = edges.ends.unbind(1)
    sums = torch.zeros_like(vertices).index_add(0, first, vertices[second]).index_add(0, second, vertices[first])
    counts = edges.counts[:, None]
    away = torch.where(counts > 0, sums / counts.clamp_min(1) - vertices, 0.0)
    # The root of 0 has no derivative.
    return (away.square().sum(dim=1) + 1e-20).sqrt().mean()

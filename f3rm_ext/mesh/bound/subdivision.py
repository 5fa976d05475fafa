"""Triangles of a mesh are divided where splats are dense, so that Gaussians on them can show as much detail."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.mesh.bound.start import StartMesh, far_from_mesh
from f3rm_ext.utils.open3d_library import RayCaster

SPLATS_PER_GAUSSIAN = 2
"""Splats that are nearest to a triangle, for each Gaussian on it, above which it is divided."""
_ROUNDS = 8
"""Times that a triangle may be divided."""
_LONG = 0.5
"""Share of a triangle's longest edge from which its edges are divided with it, so that it becomes no thinner."""
_CHILDREN = (
    ((0, 1, 2),),
    ((0, 3, 2), (3, 1, 2)),
    ((0, 3, 2), (3, 1, 4), (3, 4, 2)),
    ((0, 3, 4), (3, 1, 4), (0, 4, 2)),
    ((0, 3, 5), (3, 1, 4), (5, 4, 2), (3, 4, 5)),
)
"""What becomes of a triangle: of none of its edges, of 01, of 01 and 12 with 01 the longest, of the same with 12 the
longest, and of all three; 3, 4 and 5 are the middles of the edges 01, 12 and 20."""


def add_detail(
    mesh: StartMesh,
    centres: Float[Tensor, "splats 3"],
    cameras: Float[Tensor, "cams 3"],
    free_beyond: float,
    per_triangle: int,
) -> tuple[StartMesh, Bool[Tensor, " splats"]]:
    """Divides triangles where the splats that a mesh was made of are dense.

    Returns:
        The mesh with divided triangles, and which splats are far from it (:func:`far_from_mesh`); these divide nothing.
    """
    far = far_from_mesh(centres, mesh, cameras, free_beyond)
    return divide(mesh, centres[~far], SPLATS_PER_GAUSSIAN * per_triangle), far


def divide(mesh: StartMesh, points: Float[Tensor, "points 3"], most: int) -> StartMesh:
    """Divides triangles until none is the nearest one of more than some number of points.

    A mesh with few vertices has large triangles on flat surfaces, however rich in detail their texture is. Splats are
    dense where the detail is. The surface stays the same, and neighbours still share their vertices.
    """
    for _ in range(_ROUNDS):
        near, *_ = RayCaster(mesh.vertices.numpy(), mesh.faces.numpy()).nearest(points.numpy())
        full = torch.bincount(torch.from_numpy(near), minlength=len(mesh.faces)) > most
        if not full.any():
            break
        mesh = _divide_faces(mesh, full)
    return mesh


def _divide_faces(mesh: StartMesh, which: Bool[Tensor, " faces"]) -> StartMesh:
    """Divides the long edges of some triangles, and so also their neighbours."""
    ends = torch.stack([mesh.faces, mesh.faces.roll(-1, dims=1)], dim=2)
    edges, edge_of = ends.reshape(-1, 2).sort(dim=1).values.unique(dim=0, return_inverse=True)
    edge_of = edge_of.reshape(-1, 3)
    lengths = (mesh.vertices[edges[:, 0]] - mesh.vertices[edges[:, 1]]).norm(dim=1)
    around = lengths[edge_of]
    longest, place = around.max(dim=1, keepdim=True)
    cut = torch.zeros(len(edges), dtype=torch.bool)
    cut[edge_of[which[:, None] & (around >= _LONG * longest)]] = True
    # Divided at other edges only, a triangle would become thin: its longest one is divided too (Rivara 1984).
    last = edge_of.gather(1, place)[:, 0]
    while bool((more := cut[edge_of].any(dim=1) & ~cut[last]).any()):
        cut[last[more]] = True
    number = cut.cumsum(0) - 1 + len(mesh.vertices)
    vertices = torch.cat([mesh.vertices, mesh.vertices[edges[cut]].mean(dim=1)])

    rotation, kind = _order_corners(cut[edge_of], around)
    corners, middles = mesh.faces.gather(1, rotation), number[edge_of].gather(1, rotation)
    six = torch.cat([corners, middles], dim=1)
    shades = None
    if mesh.corner_colors is not None:
        shades = mesh.corner_colors.gather(1, rotation[:, :, None].expand(-1, -1, 3))
        shades = torch.cat([shades, (shades + shades.roll(-1, dims=1)) / 2], dim=1)
    faces, colors = [], []
    for row, children in enumerate(_CHILDREN):
        mine, places = (kind == row).nonzero()[:, 0], torch.tensor(children)
        faces.append(six[mine][:, places].reshape(-1, 3))
        if shades is not None:
            colors.append(shades[mine][:, places].reshape(-1, 3, 3))
    return replace(mesh, vertices=vertices, faces=torch.cat(faces), corner_colors=torch.cat(colors) if colors else None)


def _order_corners(
    cut: Bool[Tensor, "faces 3"], lengths: Float[Tensor, "faces 3"]
) -> tuple[Int[Tensor, "faces 3"], Int[Tensor, " faces"]]:
    """Returns the order of each triangle's corners in which its divided edges come first, and its row of _CHILDREN."""
    count = cut.sum(dim=1)
    # One divided edge comes first; one whole edge comes last.
    first = torch.where(count == 1, cut.int().argmax(dim=1), torch.where(count == 2, (~cut).int().argmax(dim=1) + 1, 0))
    rotation = (first[:, None] + torch.arange(3)) % 3
    lengths = lengths.gather(1, rotation)
    return rotation, count + ((count == 3) | ((count == 2) & (lengths[:, 1] > lengths[:, 0])))

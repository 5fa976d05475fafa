"""Repairs of a mesh: broken faces, small parts, holes, and the number of vertices."""

import numpy as np
import trimesh
from jaxtyping import Bool

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.mesh.open3d_library import from_open3d, open3d, to_open3d

_ROUNDS = 40


def repaired(mesh: trimesh.Trimesh) -> trimesh.Trimesh:
    """Removes double vertices and faces, faces without area, non-manifold edges, and vertices without faces.

    Raises:
        MeshError: no face is left.
    """
    made = to_open3d(mesh)
    for repair in ("duplicated_vertices", "duplicated_triangles", "degenerate_triangles", "non_manifold_edges"):
        getattr(made, f"remove_{repair}")()
    made.remove_unreferenced_vertices()
    if not len(made.triangles):
        raise MeshError("The mesh has no face with an area: extract it again with other options.")
    return from_open3d(made)


def without_small_parts(mesh: trimesh.Trimesh, share: float) -> trimesh.Trimesh:
    """Removes connected parts whose area is less than a share of the whole mesh's.

    Args:
        mesh: vertices of neighbouring faces are the same.
        share: 0 to 1; the largest part always stays.
    """
    return with_faces(mesh, ~small_parts(mesh, share))


def small_parts(mesh: trimesh.Trimesh, share: float) -> Bool[np.ndarray, " faces"]:
    """Returns the faces that :func:`without_small_parts` removes."""
    clusters, _, areas = to_open3d(mesh).cluster_connected_triangles()
    clusters, areas = np.asarray(clusters), np.asarray(areas)
    large = areas >= share * areas.sum()
    large[areas.argmax()] = True
    return ~large[clusters]


def without_crumbs(mesh: trimesh.Trimesh, fewest: int) -> trimesh.Trimesh:
    """Removes connected parts with fewer faces; nothing may be left."""
    clusters, counts, _ = to_open3d(mesh).cluster_connected_triangles()
    return with_faces(mesh, (np.asarray(counts) >= fewest)[np.asarray(clusters)])


def with_faces(mesh: trimesh.Trimesh, which: Bool[np.ndarray, " faces"]) -> trimesh.Trimesh:
    """Returns some of the faces with their vertices."""
    if which.all():
        return mesh
    mesh = mesh.copy()
    mesh.update_faces(which)
    mesh.remove_unreferenced_vertices()
    return mesh


def with_holes_closed(mesh: trimesh.Trimesh, size: float) -> trimesh.Trimesh:
    """Closes holes up to a size, the radius of a sphere around the hole; larger ones stay open."""
    # Only faces are new. Open3D's result points into the memory of its input, which a name has to keep alive.
    given = open3d().t.geometry.TriangleMesh.from_legacy(to_open3d(mesh))
    faces = given.fill_holes(size).triangle.indices.numpy().astype(np.int64)
    return trimesh.Trimesh(mesh.vertices, faces, vertex_colors=vertex_colors(mesh), process=False)


def simplified(mesh: trimesh.Trimesh, vertices: int) -> trimesh.Trimesh:
    """Merges edges by quadric error (Garland and Heckbert 1997) until there are at most this many vertices.

    Open3D's target counts triangles, of which a mesh has about two per vertex, fewer if it has borders; the target is
    therefore approached in rounds, from above.

    Args:
        mesh: returned as it is where it is small enough.
        vertices: most vertices, 4 or more.
    """
    made = to_open3d(mesh)
    for _ in range(_ROUNDS):
        have = len(made.vertices)
        if have <= vertices:
            break
        faces = len(made.triangles)
        # A merge removes one vertex and two faces, or one at a border: the last vertices go one by one.
        excess = have - vertices
        made = made.simplify_quadric_decimation(max(4, faces - max(1, int(excess * (1.6 if excess > 20 else 1)))))
        made.remove_unreferenced_vertices()
        if len(made.triangles) == faces:
            made = made.simplify_quadric_decimation(max(4, faces - 2))
            made.remove_unreferenced_vertices()
    return from_open3d(made)

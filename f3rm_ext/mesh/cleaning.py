"""Repairs of a mesh: broken faces, small parts, holes, and the number of vertices.

Meshes are :class:`trimesh.Trimesh` everywhere; Open3D's appear only inside the functions that need Open3D.
"""

from collections.abc import Sequence

import numpy as np
import trimesh
from jaxtyping import Bool, Int
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.mesh.open3d_conversion import from_open3d, to_open3d
from f3rm_ext.utils.open3d_library import open3d

_ROUNDS = 40


def clean(mesh: trimesh.Trimesh, min_part: float = 0.0) -> trimesh.Trimesh:
    """Removes double vertices and faces, faces without area, non-manifold edges, unused vertices, and
    :func:`small_parts`. Raises MeshError where no face is left.
    """
    broken = to_open3d(mesh)
    for repair in ("duplicated_vertices", "duplicated_triangles", "degenerate_triangles"):
        getattr(broken, f"remove_{repair}")()
    broken.remove_unreferenced_vertices()
    mesh = from_open3d(broken)
    if len(mesh.faces) and (np.bincount(mesh.edges_unique_inverse) > 2).any():
        # Meshes of voxels hardly ever have such edges, and Open3D takes longer for them than for all else.
        broken.remove_non_manifold_edges()
        broken.remove_unreferenced_vertices()
        mesh = from_open3d(broken)
    if not len(mesh.faces):
        raise MeshError("The mesh has no face with an area: extract it again with other options.")
    return select_faces(mesh, ~small_parts(mesh, min_part)) if min_part > 0 else mesh


def small_parts(mesh: trimesh.Trimesh, min_part: float) -> Bool[np.ndarray, " faces"]:
    """Returns the faces of connected parts whose area is below a share (0 to 1) of the whole; the largest part stays.

    Vertices of neighbouring faces must be the same.
    """
    parts = face_components(mesh)
    areas = np.bincount(parts, mesh.area_faces)
    small = areas < min_part * areas.sum()
    small[areas.argmax()] = False
    return small[parts]


def face_components(mesh: trimesh.Trimesh) -> Int[np.ndarray, " faces"]:
    """Returns the number of the connected part that each face belongs to; faces that share an edge are connected."""
    edges, faces, count = mesh.edges_unique_inverse, np.asarray(mesh.edges_face), len(mesh.faces)
    size = count + len(mesh.edges_unique)
    graph = coo_array((np.ones(len(edges), bool), (faces, count + edges)), shape=(size, size))
    return connected_components(graph, directed=False)[1][:count]


def select_faces(mesh: trimesh.Trimesh, mask: Bool[np.ndarray, " faces"]) -> trimesh.Trimesh:
    """Returns some of the faces with their vertices."""
    if mask.all():
        return mesh
    mesh = mesh.copy()
    mesh.update_faces(mask)
    mesh.remove_unreferenced_vertices()
    return mesh


def join(parts: Sequence[trimesh.Trimesh]) -> trimesh.Trimesh:
    """Returns one mesh of all parts; their vertices stay apart."""
    if len(parts) == 1:
        return parts[0]
    mesh = trimesh.util.concatenate(list(parts))
    assert isinstance(mesh, trimesh.Trimesh)
    return mesh


def close_holes(mesh: trimesh.Trimesh, radius: float) -> trimesh.Trimesh:
    """Closes holes up to the radius of a sphere around the hole; larger ones stay open. 0 closes none."""
    if radius == 0:
        return mesh
    # Only faces are new. Open3D's result points into the memory of its input, which a name has to keep alive.
    source = open3d().t.geometry.TriangleMesh.from_legacy(to_open3d(mesh))
    faces = source.fill_holes(radius).triangle.indices.numpy().astype(np.int64)
    return trimesh.Trimesh(mesh.vertices, faces, vertex_colors=vertex_colors(mesh), process=False)


def simplify(mesh: trimesh.Trimesh, vertices: int | None) -> trimesh.Trimesh:
    """Merges edges by quadric error (Garland and Heckbert 1997) until there are at most so many vertices, 4 or more.

    A mesh that is small enough is returned as it is; None keeps all. Open3D's target counts triangles, of which a mesh
    has about two per vertex, fewer if it has borders; the target is therefore approached in rounds, from above.
    """
    if vertices is None or len(mesh.vertices) <= vertices:
        return mesh
    simple = to_open3d(mesh)
    for _ in range(_ROUNDS):
        excess, faces = len(simple.vertices) - vertices, len(simple.triangles)
        if excess <= 0:
            break
        # A merge removes one vertex and two faces, or one at a border: the last vertices go one by one.
        simple = simple.simplify_quadric_decimation(max(4, faces - max(1, int(excess * (1.6 if excess > 20 else 1)))))
        simple.remove_unreferenced_vertices()
        if len(simple.triangles) == faces:
            simple = simple.simplify_quadric_decimation(max(4, faces - 2))
            simple.remove_unreferenced_vertices()
    return from_open3d(simple)

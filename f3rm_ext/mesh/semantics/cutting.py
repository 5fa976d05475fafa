"""Parts of a mesh: cut along a level of the score, with texture coordinates and colours, and cleaned."""

import numpy as np
import trimesh
from jaxtyping import Float
from trimesh.visual.color import ColorVisuals
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.cleaning import close_holes, select_faces, small_parts
from f3rm_ext.mesh.mesh_files import vertex_colors


def cut_at_level(mesh: trimesh.Trimesh, scores: Float[np.ndarray, " verts"], level: float) -> trimesh.Trimesh:
    """Returns the part of a mesh where the score, linear on each triangle, is at least a level.

    Triangles on the level are split there. Triangles that share an edge share the new vertex on it. Texture coordinates
    and colours are interpolated.

    Raises:
        MeshError: nothing reaches the level, or everything does.
    """
    scores = np.asarray(scores, np.float64)
    inside = scores >= level
    faces = np.asarray(mesh.faces, np.int64)
    count = inside[faces].sum(axis=1)
    if not count.any():
        raise MeshError(
            f"No vertex reaches the score {level:g}, the highest is {scores.max():.3f}: lower --threshold or query "
            "another way."
        )
    if (count == 3).all():
        raise MeshError(
            f"The whole mesh reaches the score {level:g}, the lowest is {scores.min():.3f}, so there is nothing to "
            "cut: raise --threshold or query another way."
        )
    one, two = faces[count == 1], faces[count == 2]
    a, b, c = _rotate(one, inside[one]).T  # a is inside
    d, e, f = _rotate(two, ~inside[two]).T  # d is outside
    ends = np.concatenate([[a, b], [a, c], [e, d], [f, d]], axis=1)
    edges, number = np.unique(ends, axis=1, return_inverse=True)
    numbers = np.where(scores[ends[0]] == level, ends[0], len(scores) + number.reshape(-1))
    ab, ac, ed, fd = np.split(numbers, np.cumsum([len(a), len(a), len(d)]))
    begin, end = scores[edges]
    shares = ((level - end) / (begin - end))[:, None]

    def append_cuts(values: Float[np.ndarray, "verts channels"]) -> Float[np.ndarray, "more channels"]:
        """Returns values of the vertices, followed by those where edges have the level."""
        first, second = values[edges]
        return np.concatenate([values, first * shares + second * (1 - shares)])

    tips, quads = np.stack([a, ab, ac], axis=1), np.concatenate([np.stack([e, f, fd], 1), np.stack([e, fd, ed], 1)])
    triangles = np.concatenate([faces[count == 3], tips, quads])
    # A vertex on the level is its own cut: triangles without area remain beside it.
    triangles = triangles[(triangles != np.roll(triangles, 1, axis=1)).all(axis=1)]
    if not len(triangles):
        raise MeshError(f"Only single vertices reach the score {level:g}: lower --threshold.")
    part = trimesh.Trimesh(append_cuts(np.asarray(mesh.vertices)), triangles, process=False)
    visual, colors = mesh.visual, vertex_colors(mesh)
    if isinstance(visual, TextureVisuals) and visual.uv is not None:
        part.visual = TextureVisuals(uv=append_cuts(np.asarray(visual.uv)), material=visual.material)
    elif colors is not None:
        part.visual = ColorVisuals(part, vertex_colors=np.rint(append_cuts(colors / 1.0)).astype(np.uint8))
    part.remove_unreferenced_vertices()
    return part


def clean_part(part: trimesh.Trimesh, min_part: float, close_holes: float) -> trimesh.Trimesh:
    """Drops small connected parts, and closes holes. Both look at places: texture seams do not separate.

    Args:
        min_part: connected parts with a smaller share of the area are dropped; the largest one stays.
        close_holes: radius up to which holes are closed; 0 closes none. Lids have the colour of their rim.
    """
    part = select_faces(part, ~small_parts(_weld(part)[0], min_part))
    return part if close_holes == 0 else _close(part, close_holes)


def _rotate(faces: np.ndarray, special: np.ndarray) -> np.ndarray:
    """Triangles turned so that their one special corner comes first."""
    start = special.argmax(axis=1)
    return np.take_along_axis(faces, (start[:, None] + np.arange(3)) % 3, axis=1)


def _weld(mesh: trimesh.Trimesh) -> tuple[trimesh.Trimesh, np.ndarray]:
    """The triangles between places, in the same order, and a vertex at each place."""
    points, first, place_of = np.unique(mesh.vertices, axis=0, return_index=True, return_inverse=True)
    return trimesh.Trimesh(points, place_of.reshape(-1)[mesh.faces], process=False), first


def _close(part: trimesh.Trimesh, size: float) -> trimesh.Trimesh:
    welded, vertex_at = _weld(part)
    # A triangle with two corners at one place has no area, and counts its edge twice.
    welded.update_faces((welded.faces != np.roll(welded.faces, 1, axis=1)).all(axis=1))
    if (np.bincount(welded.edges_unique_inverse) > 2).any():
        raise MeshError(
            "The part has edges with more than two triangles, so its holes cannot be closed: leave --close-holes out, "
            "or make the mesh with `f3rm-ext export mesh`, which repairs it."
        )
    lids = np.asarray(close_holes(welded, size).faces)[len(welded.faces) :]
    if not len(lids):
        return part
    corners, vertices = vertex_at[lids], np.asarray(part.vertices)
    visual = part.visual
    if not isinstance(visual, TextureVisuals) or visual.uv is None:
        part.faces = np.concatenate([part.faces, corners])
        return part
    # A lid has vertices of its own, all at one place in the texture, that of a vertex on its rim.
    lid_of = trimesh.graph.connected_component_labels(trimesh.graph.face_adjacency(lids), node_count=len(lids))
    rim = corners[np.unique(lid_of, return_index=True)[1][lid_of], 0]
    added = len(vertices) + np.arange(3 * len(lids)).reshape(-1, 3)
    result = trimesh.Trimesh(
        np.concatenate([vertices, vertices[corners.reshape(-1)]]), np.concatenate([part.faces, added]), process=False
    )
    uv = np.asarray(visual.uv)
    result.visual = TextureVisuals(uv=np.concatenate([uv, np.repeat(uv[rim], 3, axis=0)]), material=visual.material)
    return result

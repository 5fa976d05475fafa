"""Scores as fine as a code map: triangles are divided until they are hardly larger than its texels."""

from typing import NamedTuple

import numpy as np
import trimesh
from jaxtyping import Float
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.mesh.semantics.code_map import CodeMap

EDGE_TEXELS = 4.0
"""Length of edges in the texture that is small enough."""
MOST_FACES = 2_000_000
"""Triangles that a division may lead to."""
_SHARE = 0.9
"""Share of the edges that must be small enough."""


class ScoredMesh(NamedTuple):
    """A mesh with a score at each vertex."""

    mesh: trimesh.Trimesh
    scores: Float[np.ndarray, " verts"]


def divided(
    mesh: trimesh.Trimesh,
    scores: Float[np.ndarray, " verts"],
    code_map: CodeMap,
    code_scores: Float[np.ndarray, " codes"],
) -> ScoredMesh:
    """Returns a mesh whose vertices have the scores of their texels.

    All triangles are divided into four, as often as their size in the texture needs, so that neighbours still share
    their vertices.

    Args:
        mesh: with texture coordinates.
        scores: of its vertices, for places whose texels have no feature.
        code_map: of the feature that was queried.
        code_scores: scores of its dictionary.
    """
    visual = mesh.visual
    assert isinstance(visual, TextureVisuals)
    size = np.array(code_map.texels.shape[::-1])
    vertices, faces = np.asarray(mesh.vertices), np.asarray(mesh.faces)
    values: dict[str, np.ndarray] = {"uv": np.asarray(visual.uv), "scores": np.asarray(scores, np.float64)[:, None]}
    while 4 * len(faces) <= MOST_FACES:
        edges = (values["uv"][faces] - np.roll(values["uv"][faces], 1, axis=1)) * size
        if np.quantile(np.linalg.norm(edges, axis=2), _SHARE) <= EDGE_TEXELS:
            break
        vertices, faces, values = trimesh.remesh.subdivide(vertices, faces, vertex_attributes=values)  # type: ignore[misc]
    made = trimesh.Trimesh(vertices, faces, process=False)
    made.visual = TextureVisuals(uv=values["uv"], material=visual.material)
    entries = code_map.look_up(values["uv"])
    return ScoredMesh(made, np.where(entries < 0, values["scores"][:, 0], code_scores[entries]))

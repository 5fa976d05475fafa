"""Code maps: features in texture space, as the number of an entry of a small dictionary at each texel.

Vertices carry features as finely as the mesh is. Where a large triangle shows several things, texels tell them apart.
A dictionary of cluster centres makes 2 bytes of each texel's feature; a query scores its entries instead of texels.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import trimesh
from jaxtyping import Float, Float16, Float32, Int, UInt16
from scipy.cluster.vq import kmeans2
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import MeshError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.mesh.semantics.lifting import lift_places
from f3rm_ext.mesh.texture.atlas import Atlas, texture_texels, to_pixels
from f3rm_ext.mesh.texture.baking import texel_areas
from f3rm_ext.mesh.texture.photos import Photos
from f3rm_ext.mesh.texture.rendering import get_texture, interpolate
from f3rm_ext.mesh.texture.visibility import Places
from f3rm_ext.utils.console import StageProgress

NOTHING = 65535
"""Number of texels that no photo sees, or that are on no chart."""
DICTIONARY = 1024
"""Entries of a dictionary, at most."""
_SAMPLES = 1 << 14
_KMEANS_ROUNDS = 10
_TEXELS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class CodeMap:
    """Features of the texels of a mesh."""

    dictionary: Float16[np.ndarray, "codes feat"]
    """The features that there are."""
    texels: UInt16[np.ndarray, "rows columns"]
    """Which one each texel has; :data:`NOTHING` for none."""

    def look_up(self, uv: Float[np.ndarray, "n 2"]) -> Int[np.ndarray, " n"]:
        """Returns the entries of the dictionary at texture coordinates, -1 for none."""
        rows, columns = self.texels.shape
        texel = to_pixels(uv, columns, rows)
        column, row = np.clip(np.floor(texel).astype(int), 0, [columns - 1, rows - 1]).T
        entries = self.texels[row, column].astype(np.int64)
        return np.where(entries == NOTHING, -1, entries)


def lift_code_map(
    mesh: trimesh.Trimesh,
    photos: Photos,
    load: Callable[[int], FeatureMap],
    dim: int,
    on_progress: StageProgress = lambda stage, done, total: None,
) -> CodeMap:
    """Lifts one feature onto the texels of a mesh in the frame of the cameras. Raises MeshError where it has no square
    texture, or no photo sees it."""
    atlas = Atlas(mesh, np.arange(len(mesh.vertices)), texture_side(mesh), 0)
    texels = texture_texels(atlas)
    faces = np.asarray(atlas.mesh.faces)[texels.faces]
    points = interpolate(np.asarray(atlas.mesh.vertices, np.float32), faces, texels.weights).astype(np.float32)
    normals = np.asarray(atlas.mesh.face_normals, np.float32)[texels.faces]
    places = Places(points, normals, texel_areas(atlas)[texels.faces])
    chosen = np.sort(np.random.default_rng(0).permutation(len(texels))[:_SAMPLES])
    some = Places(*(values[chosen] for values in places))
    parts = lift_places(mesh, some, photos, load, dim, _rename_stage("Dictionary", on_progress))
    known = np.concatenate([codes[visible] for _, codes, visible in parts])
    if not len(known):
        raise MeshError("No training photo sees the texture: try --frame scene or --frame capture.")
    dictionary = make_dictionary(known.astype(np.float32))
    entries = torch.from_numpy(dictionary)
    flat = np.full(atlas.size_px**2, NOTHING, np.uint16)
    for part, codes, visible in lift_places(mesh, places, photos, load, dim, _rename_stage("Code map", on_progress)):
        seen = np.flatnonzero(visible)
        for batch in np.array_split(seen, len(seen) // _TEXELS_AT_ONCE + 1):
            away = torch.cdist(torch.from_numpy(codes[batch].astype(np.float32)), entries)
            flat[texels.places[part][batch]] = away.argmin(dim=1).numpy()
    return CodeMap(dictionary.astype(np.float16), flat.reshape(atlas.size_px, atlas.size_px))


def texture_side(mesh: trimesh.Trimesh) -> int:
    """Returns the side of a mesh's square texture, pixels. Raises MeshError where it has none."""
    picture = get_texture(mesh)
    if picture is None or picture.shape[0] != picture.shape[1]:
        raise MeshError(
            "A code map needs a mesh with a square texture: make one with `f3rm-ext export texture`, or leave "
            "--code-map out."
        )
    return len(picture)


def make_dictionary(codes: Float32[np.ndarray, "n feat"]) -> Float32[np.ndarray, "codes feat"]:
    """Returns cluster centres of features, at most :data:`DICTIONARY`; the features themselves if they are as few."""
    unique = np.unique(codes, axis=0)
    if len(unique) <= DICTIONARY:
        return unique
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "One of the clusters is empty", UserWarning)
        return kmeans2(codes, DICTIONARY, iter=_KMEANS_ROUNDS, minit="points", rng=0)[0].astype(np.float32)


def _rename_stage(stage: str, on_progress: StageProgress) -> StageProgress:
    """Passes progress on under another name."""
    return lambda _, done, total: on_progress(stage, done, total)


EDGE_TEXELS = 4.0
"""Length of edges in the texture that is small enough."""
MOST_FACES = 2_000_000
"""Triangles that a division may lead to."""
_SHARE = 0.9
"""Share of the edges that must be small enough."""


ScoredMesh = tuple[trimesh.Trimesh, Float[np.ndarray, " scored"]]
"""A mesh with a score at each vertex."""


def subdivide_to_texels(
    mesh: trimesh.Trimesh,
    scores: Float[np.ndarray, " verts"],
    code_map: CodeMap,
    code_scores: Float[np.ndarray, " codes"],
) -> ScoredMesh:
    """Returns a mesh whose vertices have the scores of their texels, else those given, where texels have no feature.

    All triangles are divided into four, as often as their size in the texture needs, so that neighbours still share
    their vertices.
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
    copy = trimesh.Trimesh(vertices, faces, process=False)
    copy.visual = TextureVisuals(uv=values["uv"], material=visual.material)
    entries = code_map.look_up(values["uv"])
    return copy, np.where(entries < 0, values["scores"][:, 0], code_scores[entries])

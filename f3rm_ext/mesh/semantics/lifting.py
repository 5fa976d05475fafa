"""Lifting: 2D features of photos become features of places on a mesh, without training.

A place takes the mean of the features where photos see it, with the weights by which texture baking blends colours:
visible, sharp and frontal views count most, pixels at edges of objects hardly at all. Vertices that no photo sees take
the feature of the nearest one along the surface that is seen. Vertices form groups by like feature, by position and by
being seen together (:mod:`f3rm_ext.query.groups`), as Gaussians do.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import trimesh
from jaxtyping import Bool, Float, Float16, Int, Int32
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import KDTree

from f3rm_ext.errors import MeshError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.mesh.texture.photos import UNSEEN, Photos
from f3rm_ext.mesh.texture.visibility import PhotoLookup, Places
from f3rm_ext.query.groups import Seen, average_groups
from f3rm_ext.utils.console import StageProgress
from f3rm_ext.utils.open3d_library import RayCaster

SUMS_MIB = 512
"""Memory of the sums of features. Where a mesh needs more, its places are lifted in several passes over the photos."""
_PLACES_AT_ONCE = 1 << 16
_VERTEX_SHARE = 1 / 9
"""Area that a vertex stands for, as a share of its largest triangle."""


class LiftedVertices(NamedTuple):
    """Features of the vertices of a mesh."""

    codes: Float16[np.ndarray, "verts feat"]
    """Those of vertices that no photo sees are filled."""
    visible: Bool[np.ndarray, " verts"]
    """Vertices that at least one photo sees."""
    groups: Int32[np.ndarray, " verts"]
    """Number of each vertex's group."""


def lift_vertices(
    mesh: trimesh.Trimesh,
    photos: Photos,
    load: Callable[[int], FeatureMap],
    dim: int,
    on_progress: StageProgress = lambda stage, done, total: None,
    *,
    per_group: bool = True,
) -> LiftedVertices:
    """Lifts one feature onto the vertices of a mesh. Vertices at the same place get the same feature.

    Args:
        mesh: triangles, in the frame of the cameras.
        per_group: draw the feature of each vertex towards the mean of its group, see
            :func:`~f3rm_ext.query.groups.average_groups`.

    Raises:
        MeshError: no photo sees any vertex.
    """
    points, place_of = np.unique(np.asarray(mesh.vertices, np.float32), axis=0, return_inverse=True)
    place_of = place_of.reshape(-1)
    faces = place_of[mesh.faces]
    # The largest triangle at a place, the last in this order, gives its normal and its area.
    order = np.argsort(mesh.area_faces, kind="stable")
    face_of = np.zeros(len(points), np.int64)
    face_of[faces[order].reshape(-1)] = np.repeat(order, 3)
    places = Places(
        points,
        np.asarray(mesh.face_normals, np.float32)[face_of],
        (np.asarray(mesh.area_faces, np.float32) * _VERTEX_SHARE)[face_of],
    )
    codes, visible = np.zeros((len(points), dim), np.float16), np.zeros(len(points), bool)
    seen, areas = Seen(len(points), len(photos)), places.areas / max(places.areas.mean(), 1e-30)

    def on_weights(photo: int, which: np.ndarray, weights: np.ndarray) -> None:
        seen.add(photo, weights * areas[which], which)

    for part, *lifted in lift_places(mesh, places, photos, load, dim, on_progress, on_weights):
        codes[part], visible[part] = lifted
    if not visible.any():
        raise MeshError(UNSEEN)
    groups = seen.group(points, codes, visible)
    if per_group:
        average_groups(torch.from_numpy(codes), torch.from_numpy(groups))
    source = nearest_visible(points, faces, visible)[place_of]
    return LiftedVertices(codes[source], visible[place_of], groups[source])


@torch.no_grad()
def lift_places(
    mesh: trimesh.Trimesh,
    places: Places,
    photos: Photos,
    load: Callable[[int], FeatureMap],
    dim: int,
    on_progress: StageProgress = lambda stage, done, total: None,
    on_weights: Callable[[int, np.ndarray, np.ndarray], None] = lambda photo, which, weights: None,
) -> Iterator[tuple[slice, Float16[np.ndarray, "places feat"], Bool[np.ndarray, " places"]]]:
    """Lifts one feature onto places on a mesh, part by part; memory holds one photo and :data:`SUMS_MIB` of sums.

    Args:
        mesh: hides places from photos; in the frame of the cameras.
        on_weights: called with the index of a photo, some of the places that it sees and their weights.

    Yields:
        The places of a part, their features, 0 where no photo sees a place, and which places a photo sees.
    """
    caster = RayCaster(mesh.vertices, mesh.faces)
    at_once = max(1, int(SUMS_MIB * 2**20) // (4 * dim))
    parts = [slice(start, start + at_once) for start in range(0, len(places.points), at_once)]
    for number, part in enumerate(parts):
        count = len(places.points[part])
        sums, total = torch.zeros(count, dim), torch.zeros(count)
        for index, camera in enumerate(photos.cameras):
            lookup, packed = PhotoLookup(camera, photos.read(index), caster), PackedMaps.pack([load(index)])
            patches = packed.values.float().numpy()
            for start in range(part.start, part.start + count, _PLACES_AT_ONCE):
                batch = slice(start, min(start + _PLACES_AT_ONCE, part.start + count))
                sample = lookup.look_up(Places(*(values[batch] for values in places)))
                rows = torch.from_numpy(start - part.start + sample.indices)
                weights = torch.from_numpy(sample.weights).float()
                yx_px = torch.from_numpy(sample.pixels[:, ::-1].astype(np.float32))
                corners, shares = packed.corners(torch.zeros(len(rows), dtype=torch.int64), yx_px)
                # As a sparse product, the interpolation writes the sum of the four corners only.
                entries = (shares * weights).T.flatten().numpy(), corners.T.flatten().numpy()
                matrix = csr_array((*entries, np.arange(0, 4 * len(rows) + 1, 4)), shape=(len(rows), len(patches)))
                sums.index_add_(0, rows, torch.from_numpy(matrix @ patches))
                total[rows] += weights
                on_weights(index, start + sample.indices, sample.weights)
            on_progress("Photos", number * len(photos) + index + 1, len(parts) * len(photos))
        visible = total > 0
        codes = torch.where(visible[:, None], sums.div_(total.clamp_min(1e-30)[:, None]), 0.0).half()
        yield part, codes.numpy(), visible.numpy()


def nearest_visible(
    points: Float[np.ndarray, "places 3"], faces: Int[np.ndarray, "faces 3"], visible: Bool[np.ndarray, " places"]
) -> Int[np.ndarray, " places"]:
    """Returns for each place the nearest visible one along edges, itself if it is visible.

    A connected part of which nothing is visible takes the nearest ones in space. All places are different, and at least
    one is visible.
    """
    source = np.arange(len(points))
    if visible.all():
        return source
    ends = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    ends = np.unique(np.sort(ends[ends[:, 0] != ends[:, 1]], axis=1), axis=0)
    lengths = np.linalg.norm(points[ends[:, 0]] - points[ends[:, 1]], axis=1)
    graph = coo_array((lengths, (ends[:, 0], ends[:, 1])), shape=(len(points),) * 2).tocsr()
    known = np.flatnonzero(visible)
    away, _, nearest = dijkstra(graph, directed=False, indices=known, min_only=True, return_predecessors=True)
    reached = np.isfinite(away)
    source[reached] = nearest[reached]
    if not reached.all():
        source[~reached] = known[KDTree(points[known]).query(points[~reached])[1]]
    return source

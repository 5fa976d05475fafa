"""Groups of the surfaces that photos show, for models that hold no groups themselves, such as fields."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Int64
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from scipy.spatial import KDTree

from f3rm_ext.errors import ConfigError
from f3rm_ext.export.cloud import CloudOptions, gather_points
from f3rm_ext.export.features import features_at
from f3rm_ext.query.groups import SEEN_PHOTOS, Seen
from f3rm_ext.query.queryable import GroupedPoints, Queryable, QueryHead
from f3rm_ext.query.relevancy import OTHER
from f3rm_ext.utils.pictures import pick_evenly

POINTS = 50_000
"""Points that are grouped."""
_OPAQUE = 0.5
"""Lowest opacity along a ray that shows a surface."""
_AS_NEAR = 2.0
"""A photo sees a point if one of its own points is at most so many times as far away as they are from each other."""
_NEAR = 3
"""Which of its nearest neighbours tells how far a point of a photo is from the others."""


@dataclass(frozen=True)
class SurfaceGroups:
    """A model with groups of its surfaces, :class:`~f3rm_ext.query.queryable.HasGroups`."""

    model: Queryable
    head: QueryHead
    """The feature that the groups are by."""
    points: GroupedPoints
    """Points on the surfaces, on the CPU."""

    def grouped_points(self, name: str) -> GroupedPoints | None:
        """Returns the points in groups; None for other features."""
        return self.points if name == self.head.name else None

    def group_map(self, camera: Cameras, name: str, obb_box: OrientedBox | None = None) -> Int64[np.ndarray, "h w"]:
        """Returns the group of the point that is nearest to the surface in each pixel; -1 where there is none."""
        outputs = {key: value.cpu() for key, value in self.model.render_camera(camera, {}, obb_box).items()}
        rays = camera.to(torch.device("cpu")).generate_rays(camera_indices=0, keep_shape=True)
        at = (rays.origins + rays.directions * outputs["depth"]).numpy()
        shown = (outputs["accumulation"][..., 0].numpy() >= _OPAQUE) & np.isfinite(at).all(axis=-1)
        groups = np.full(shown.shape, OTHER)
        groups[shown] = self.points.groups.numpy()[KDTree(self.points.positions.numpy()).query(at[shown])[1]]
        return groups


def group_surfaces(model: Queryable, head: QueryHead, cameras: Cameras) -> SurfaceGroups:
    """Groups the surfaces that up to 64 of the training cameras see, by a feature: see :mod:`f3rm_ext.query.groups`.

    Raises:
        ConfigError: the cameras see no surface.
    """
    chosen = cameras[torch.tensor(pick_evenly(len(cameras), SEEN_PHOTOS))]
    try:
        cloud = gather_points(model, chosen, CloudOptions(points=POINTS, accumulation=_OPAQUE))
    except ConfigError as error:
        raise ConfigError(f"There are no groups, since the photos show no surface of the run: {error}") from error
    codes = torch.cat(list(features_at(model, head, cloud.positions))).half()
    _, photo_of = np.unique(cloud.seen_from, axis=0, return_inverse=True)
    groups = _group(cloud.positions, codes.numpy(), photo_of.reshape(-1))
    return SurfaceGroups(model, head, GroupedPoints(torch.from_numpy(cloud.positions), codes, torch.from_numpy(groups)))


def _group(
    points: Float[np.ndarray, "points 3"],
    codes: Float[np.ndarray, "points feat"],
    photo_of: Int64[np.ndarray, " points"],
) -> Int32[np.ndarray, " points"]:
    photos = int(photo_of.max()) + 1
    visible = np.stack([_see(points, points[photo_of == photo]) for photo in range(photos)], axis=1)
    visible[np.arange(len(points)), photo_of] = True
    seen = Seen(len(points), photos)
    for photo in range(photos):
        # Points are as dense as pixels, so that all have the same weight.
        seen.add(photo, visible[:, photo] / visible.sum(axis=1))
    return seen.group(points, codes, np.ones(len(points), bool))


def _see(points: Float[np.ndarray, "points 3"], own: Float[np.ndarray, "own 3"]) -> Bool[np.ndarray, " points"]:
    """Says which points are among those of a photo."""
    tree = KDTree(own)
    between = np.asarray(tree.query(own, k=min(_NEAR + 1, len(own)))[0]).reshape(len(own), -1)[:, -1]
    away, nearest = tree.query(points)
    return away <= _AS_NEAR * between[nearest]

"""Second pass for photos without a pose: their features are matched with the points of the model.

COLMAP matches two photos at a time with a strict ratio test, so a photo from an unusual place may have too few matches
with each single photo, but enough with all of them. Here its features are matched with every point by a weaker ratio
test; many matches are wrong, but only the right ones agree on a pose.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from f3rm_ext.sfm.database import Count, FeatureDatabase, colmap, translate_errors
from f3rm_ext.sfm.mapping import LAST_ERROR_PX, adjust
from f3rm_ext.sfm.pairs import unit_rows
from f3rm_ext.sfm.quality import FEW_FEATURES
from f3rm_ext.utils import threads

MOST_RATIO = 0.9
"""A match may be this much nearer than the second best; between photos COLMAP takes 0.8."""
LEAST_INLIERS = 30
"""Minimum number of inliers of a pose, the same as COLMAP's."""
POSE_ERROR_PX = 12.0
"""Largest distance of a match that agrees with a pose."""
_LEAST_INLIER_SHARE, _MOST_TRIALS = 0.02, 100_000
_SAME_DESCRIPTOR = 0.8
"""Smallest cosine between a feature and a point that is seen where the feature is."""
_ROWS, _MOST_VIEWS, _MOST_POINTS = 512, 4, 25_000
"""Features that are compared at once, descriptors that are kept of a point, and points: those that most photos see."""


class PointCloud:
    """Points of a model with the descriptors of the features that see them."""

    def __init__(self, model: Any, descriptors: Callable[[int], np.ndarray]) -> None:
        longest = sorted(model.points3D.items(), key=lambda item: -item[1].track.length())[:_MOST_POINTS]
        self.ids = np.array([number for number, _ in longest], dtype=np.int64)
        self.xyz = np.array([point.xyz for _, point in longest], dtype=np.float64).reshape(-1, 3)
        views = [point.track.elements[:_MOST_VIEWS] for _, point in longest]
        self.starts = np.cumsum([0, *map(len, views)])
        """Index of the first descriptor of each point, and of the end."""
        self.descriptors = np.empty((sum(map(len, views)), 128), np.float32)
        all_views = [element for some in views for element in some]
        images = np.array([element.image_id for element in all_views])
        rows = np.array([element.point2D_idx for element in all_views])
        for number in np.unique(images):
            here = images == number
            self.descriptors[here] = unit_rows(descriptors(int(number)))[rows[here]]

    def __len__(self) -> int:
        return len(self.ids)

    def similarity(self, features: Float32[np.ndarray, "features 128"]) -> Float32[np.ndarray, "features points"]:
        """Returns the largest cosine between each feature and the descriptors of each point."""
        return np.maximum.reduceat(features @ self.descriptors.T, self.starts[:-1], axis=1)


def register_missing(
    model: Any, database: FeatureDatabase, names: Sequence[str], count: Count, refine_distortion: bool = True
) -> list[str]:
    """Registers photos that the mapper left out, and adjusts all cameras and points if it finds any.

    Only photos that share a camera with the model are tried, since their intrinsics are known. Lens distortion stays
    unless it is refined. Returns the names of the newly registered photos.
    """
    registered: list[str] = []
    if not names or not model.points3D:
        return registered
    ids = database.ids()
    with database.open() as opened, translate_errors("registering photos that were left out"):
        cloud = PointCloud(model, lambda number: opened.read_descriptors(number).data)
        for number, name in enumerate(names):
            count(number, len(names))
            image = opened.read_image(ids[name])
            if not model.exists_camera(image.camera_id) or opened.num_keypoints_for_image(ids[name]) < FEW_FEATURES:
                continue
            pixels = opened.read_keypoints(ids[name])[:, :2].astype(np.float64)
            features = unit_rows(opened.read_descriptors(ids[name]).data)
            camera = model.camera(image.camera_id)
            rows, points = match_features(features, cloud)
            pose = estimate_pose(pixels[rows], cloud.xyz[points], camera)
            if pose is not None:
                seen = visible_features(pixels, features, cloud, camera, pose)
                _add_photo(model, image, pixels, pose, [(row, int(cloud.ids[point])) for row, point in seen])
                registered.append(name)
        count(len(names), len(names))
        if registered:
            adjust(model, refine_distortion)
    return registered


def match_features(
    features: Float32[np.ndarray, "features 128"], cloud: PointCloud
) -> tuple[Int64[np.ndarray, " matches"], Int64[np.ndarray, " matches"]]:
    """Returns rows of features and points that are mutual nearest neighbours and pass the ratio test (MOST_RATIO)."""
    best = np.empty(len(features), np.int64)
    passes = np.empty(len(features), bool)
    back = np.full(len(cloud), -np.inf, np.float32)
    back_row = np.zeros(len(cloud), np.int64)
    for start in range(0, len(features), _ROWS):
        cosines = cloud.similarity(features[start : start + _ROWS])
        part = slice(start, start + len(cosines))
        best[part] = cosines.argmax(axis=1)
        top = cosines.argmax(axis=0)
        values = cosines[top, np.arange(len(cloud))]
        back_row[values > back] = top[values > back] + start
        back = np.maximum(back, values)
        first = cosines.max(axis=1)
        np.put_along_axis(cosines, best[part, None], -1.0, axis=1)  # so that the largest one is the second best
        angles, others = (np.arccos(np.clip(values, -1, 1)) for values in (first, cosines.max(axis=1)))
        passes[part] = angles < MOST_RATIO * others
    rows = np.nonzero(passes & (back_row[best] == np.arange(len(features))))[0]
    return rows, best[rows]


def estimate_pose(
    pixels: Float64[np.ndarray, "matches 2"],
    points: Float64[np.ndarray, "matches 3"],
    camera: Any,
    least_share: float = _LEAST_INLIER_SHARE,
) -> Any:
    """Returns the ``pycolmap.Rigid3d`` on which at least LEAST_INLIERS matches agree; None otherwise.

    Args:
        least_share: smallest share of the matches that is expected to agree; RANSAC takes longer for smaller ones.
    """
    if len(pixels) < LEAST_INLIERS:
        return None
    options = colmap().AbsolutePoseEstimationOptions()
    options.ransac.max_error, options.ransac.random_seed = POSE_ERROR_PX, 0
    options.ransac.min_inlier_ratio, options.ransac.max_num_trials = least_share, _MOST_TRIALS
    options.ransac.num_threads = threads.usable_cores()
    result = colmap().estimate_and_refine_absolute_pose(pixels, points, camera, options)
    return result["cam_from_world"] if result is not None and result["num_inliers"] >= LEAST_INLIERS else None


def visible_features(
    pixels: Float64[np.ndarray, "features 2"],
    features: Float32[np.ndarray, "features 128"],
    cloud: PointCloud,
    camera: Any,
    pose: Any,
) -> list[tuple[int, int]]:
    """Returns rows of features and points that match for a pose: near each other in the image, and similar."""
    from scipy.spatial import KDTree

    local = pose * cloud.xyz
    front = np.nonzero(local[:, 2] > 0)[0]
    places = np.asarray(camera.img_from_cam(local[front]), dtype=np.float64).reshape(-1, 2)
    inside = np.isfinite(places).all(axis=1)
    near = KDTree(pixels).query_ball_point(places[inside], LAST_ERROR_PX)
    chosen: dict[int, tuple[float, int]] = {}
    for point, rows in zip(front[inside].tolist(), near, strict=True):
        seen_by = cloud.descriptors[cloud.starts[point] : cloud.starts[point + 1]]
        for row in rows:
            similarity = float((seen_by @ features[row]).max())
            if similarity > max(_SAME_DESCRIPTOR, chosen.get(row, (0.0, 0))[0]):
                chosen[row] = (similarity, point)
    of_point: dict[int, tuple[float, int]] = {}
    for row, (similarity, point) in chosen.items():
        of_point[point] = max(of_point.get(point, (0.0, 0)), (similarity, row))
    return sorted((row, point) for point, (_, row) in of_point.items())


def _add_photo(model: Any, image: Any, pixels: np.ndarray, pose: Any, seen: Sequence[tuple[int, int]]) -> None:
    """Adds a photo with its pose and the points that it sees."""
    pycolmap = colmap()
    if not model.exists_image(image.image_id):
        plain = pycolmap.Image(name=image.name, camera_id=image.camera_id, image_id=image.image_id)
        plain.points2D = [pycolmap.Point2D(pixel) for pixel in pixels]
        model.add_image_with_trivial_frame(plain, pose)
    else:
        existing = model.image(image.image_id)
        model.frame(existing.frame_id).set_cam_from_world(existing.camera_id, pose)
        model.register_frame(existing.frame_id)
    for row, point in seen:
        model.add_observation(point, pycolmap.TrackElement(image.image_id, row))

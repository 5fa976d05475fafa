"""Tests of whether poses can be trusted, without the true ones.

A solver makes cameras and points agree with each other, so its own error is small even where it is wrong. The matches
that it rejected give errors away: matches that fit *some* two cameras but not these, and photos that see nothing of
what another photo sees from the same side.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from f3rm_ext.capture.images import name_some
from f3rm_ext.sfm.database import FeatureDatabase, colmap
from f3rm_ext.sfm.second_pass import POSE_ERROR_PX, estimate_pose

LEAST_MATCHES_FIT = 0.92
"""Smallest share of the matches that fit right poses. Few pairs as a whole may be chance: 15 matches do."""
LEAST_SPREAD_FIT, MOST_SPREAD_CUT = 0.85, 0.5
"""Smallest share where the matches that do not fit are spread, as on a patterned carpet, and the largest
:func:`weakest_cut` where they are."""
MOST_CUT = 1.5
"""Largest :func:`weakest_cut` of right poses."""
LEAST_PHOTO_FIT = 0.9
"""Smallest share of a photo's matches that fit its pose where all cameras are solved for at once."""
MOST_AMBIGUITY, MOST_AMBIGUOUS = 0.5, 0.05
"""Largest ambiguity of a right pose, and largest share of photos that have more."""
_SECOND_SHARE, _CORRESPONDENCES = 0.1, 3000
"""Smallest share of the matches that contradict a pose with which a second one is sought; matches that are tried."""
LEAST_POINTS = 30
"""Smallest number of points that the median photo sees, of those that three photos see."""
MOST_UNEXPLAINED = 0.5
"""Largest share of the contradicting matches that stays if cameras of their own explain them."""
MOST_BLIND = 0.1
"""Largest share of photos that see nothing where another one sees points; things in between hide some."""
_SAME_SIDE_DEG, _SAME_DISTANCE, _LEAST_EXPECTED, _FEW, _SAMPLE = 20.0, 1.4, 20, 0.02, 300
"""A point looks the same within this angle and ratio of distances; so many must be expected, and fewer than this share
be seen; points of a photo that are tried."""
MOST_TURN_FIT = 0.8
"""Largest share of matches that a turn on the spot may explain."""
_FOCALS, _TURN_ERROR = np.geomspace(0.5, 2, 13), 0.005
"""Focal lengths to try, in those of the model, and largest distance that a turn explains, in longest sides."""
_LEAST_MOTION = 0.05
"""Share of the matches that move below which a camera stands still."""
_EPIPOLAR_PX = 4.0
"""Largest distance of a match from its epipolar lines; COLMAP verifies pairs with the same."""
_EIGENVECTORS = 6
"""Vectors along which :func:`weakest_cut` seeks."""
_LEAST_MATCHES = 15
"""Minimum number of matches of a pair, the same as COLMAP's."""


@dataclass(frozen=True)
class Evidence:
    """Measurements of the agreement of photos and poses. Only photos with a pose count."""

    pairs: int
    """Pairs of photos with verified matches."""
    pairs_fit: float
    """Share of these pairs of which most matches fit the poses."""
    matches_fit: float
    """Share of all their matches that fit: near their epipolar lines, and in front of both cameras."""
    turn_fit: float
    """Share of the matches that a turn of the camera on the spot explains as well, with the best focal length. Matches
    that stay where they are, as those of frames that follow each other, fit any motion: only others count, if there are
    enough of them."""
    blind: float
    """Share of the photos that should see points of another one, from nearly the same side, and see none of them. Only
    photos that were compared with each other count."""
    points_per_photo: float
    """Points that the median photo sees together with two others at least: two photos alone fit by construction."""
    ambiguous: list[str] = field(default_factory=list)
    """Names of the photos whose :func:`ambiguities` are more than ``MOST_AMBIGUITY``."""
    ambiguous_share: float = 0.0
    """Share of photos that these are."""
    matches: int = 0
    """Verified matches of the pairs."""
    cut: float = 0.0
    """Matches that contradict the poses for each one that fits, between the group of photos of :func:`weakest_cut` and
    the rest."""
    cut_off: list[str] = field(default_factory=list)
    """Names of the photos of that group."""
    contradicted: list[str] = field(default_factory=list)
    """Names of the photos of a solution for all cameras at once of whose matches too few fit (``LEAST_PHOTO_FIT``)."""


def epipolar_fit(
    first: Float64[np.ndarray, "matches 2"],
    second: Float64[np.ndarray, "matches 2"],
    pose: Float64[np.ndarray, "3 4"],
    tolerance: float,
) -> Bool[np.ndarray, " matches"]:
    """Returns whether each match of two photos fits their relative pose.

    A match fits if its Sampson distance (Hartley and Zisserman 2004, 11.4) is small and its point lies in front of both
    cameras. Rays that are parallel within the tolerance have no depth, so they only need to point the same way.

    Args:
        first: positions in the first photo on the plane at depth 1, without distortion.
        pose: from the first camera to the second, OpenCV axes.
        tolerance: largest Sampson distance, on the plane at depth 1.
    """
    rotation, translation = pose[:, :3], pose[:, 3]
    a, b = (np.c_[points, np.ones(len(points))] for points in (first, second))
    turned = a @ rotation.T
    normals = np.cross(translation, turned)  # of the epipolar planes, in the second camera
    lines = np.cross(translation, b) @ rotation  # in the first photo, up to the sign
    size = np.sqrt((normals[:, :2] ** 2).sum(axis=1) + (lines[:, :2] ** 2).sum(axis=1))
    near = np.abs((b * normals).sum(axis=1)) <= tolerance * size
    # Depths d and e of least squares in e · b = d · turned + translation.
    aa, bb, ab = ((x * y).sum(axis=1) for x, y in ((turned, turned), (b, b), (turned, b)))
    a_t, b_t = turned @ translation, b @ translation
    determinant = aa * bb - ab**2
    front = (ab * b_t - bb * a_t > 0) & (aa * b_t - ab * a_t > 0)
    parallel = (determinant <= tolerance**2 * aa * bb) & (ab > 0)
    return near & (front | parallel)


def turn_errors(
    first: Float64[np.ndarray, "matches 2"], second: Float64[np.ndarray, "matches 2"], focals: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, "n matches"]:
    """Returns the distances of matches after the rotation that minimises them (Kabsch 1976).

    The focal length is free, because solvers make up a focal length with which photos from one place seem to be from
    several.

    Args:
        first: positions in the first photo from the principal point, in focal lengths of the model.
        second: the same in the second photo.
        focals: focal lengths to try, in those of the model.

    Returns:
        For each focal length, distances in focal lengths of the model.
    """
    rays = np.stack([first, second])[:, None] / focals[:, None, None]
    rays = np.concatenate([rays, np.ones_like(rays[..., :1])], axis=-1)
    a, b = rays / np.linalg.norm(rays, axis=-1, keepdims=True)
    U, _, Vt = np.linalg.svd(b.transpose(0, 2, 1) @ a)
    U[:, :, 2] *= np.linalg.det(U @ Vt)[:, None]
    return np.linalg.norm(a @ (U @ Vt).transpose(0, 2, 1) - b, axis=-1) * focals[:, None]


class PointVisibility:
    """Points of a model and the photos that see them."""

    def __init__(self, model: Any) -> None:
        points = list(model.points3D.values())
        photos = {number: model.image(number) for number in model.reg_image_ids()}
        self.xyz = np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3)
        self.rows_by_feature = {number: np.full(photo.num_points2D(), -1) for number, photo in photos.items()}
        """For each photo, the row of the point that each feature is of; -1 for none."""
        for row, point in enumerate(points):
            for element in point.track.elements:
                self.rows_by_feature[element.image_id][element.point2D_idx] = row
        self.rows_by_photo = {number: np.unique(rows[rows >= 0]) for number, rows in self.rows_by_feature.items()}
        """Rows of the points that each photo sees."""
        self.views = np.bincount(np.concatenate([*self.rows_by_photo.values()]), minlength=len(points))
        """Photos that see each point."""
        self._centers = {number: photo.projection_center() for number, photo in photos.items()}

    def expected_points(self, number: int, camera: Any, pose: Any) -> Int64[np.ndarray, " points"]:
        """Returns a sample of the points of a photo that another camera should see, too: those inside its picture that
        it views from nearly the same side and distance.
        """
        rows = self.rows_by_photo[number]
        rows = rows[:: max(1, len(rows) // _SAMPLE)]
        local = pose * self.xyz[rows]
        rows, local = rows[local[:, 2] > 0], local[local[:, 2] > 0]
        rays = self._centers[number] - self.xyz[rows], -local @ pose.rotation.matrix()
        lengths = [np.maximum(np.linalg.norm(some, axis=1), 1e-15) for some in rays]
        ratio = lengths[1] / lengths[0]
        alike = (rays[0] * rays[1]).sum(axis=1) > np.cos(np.deg2rad(_SAME_SIDE_DEG)) * lengths[0] * lengths[1]
        alike &= (ratio < _SAME_DISTANCE) & (ratio > 1 / _SAME_DISTANCE)
        pixels = np.asarray(camera.img_from_cam(local[alike]), dtype=np.float64).reshape(-1, 2)
        return rows[alike][((pixels > 0) & (pixels < [camera.width, camera.height])).all(axis=1)]


def ambiguities(
    model: Any,
    points: PointVisibility,
    pixels: Mapping[int, Float64[np.ndarray, "features 2"]],
    matches: Mapping[tuple[int, int], Int64[np.ndarray, "matches 2"]],
) -> dict[str, float]:
    """Returns how ambiguous the pose of each photo is, by its name: the number of features that support a second pose,
    divided by that of the features that support its own.

    A repeated pattern, such as wallpaper, gives matches that contradict a right pose, but those with each other photo
    agree on another one. What contradicts a wrong pose agrees on the true one.

    Args:
        pixels: positions of the features of each photo.
        matches: rows of the features that match, by pair of photos.
    """
    pairs = {number: [np.empty((0, 2), np.int64)] for number in pixels}
    """For each photo, features and the points that they are matched with."""
    for (a, b), both in matches.items():
        for one, other, ours, theirs in ((a, b, *both.T), (b, a, *both[:, ::-1].T)):
            pairs[one].append(np.stack([ours, points.rows_by_feature[other][theirs]], axis=1))
    ratios: dict[str, float] = {}
    for number, some in pairs.items():
        both = np.concatenate(some)
        features, seen = both[both[:, 1] >= 0].T
        # A point that only one other photo sees comes from this very pose.
        confirmed = np.nonzero(points.views[seen] - np.isin(seen, points.rows_by_photo[number]) >= 2)[0]
        confirmed = confirmed[:: max(1, len(confirmed) // _CORRESPONDENCES)]
        features, xyz = features[confirmed], points.xyz[seen[confirmed]]
        photo, positions = model.image(number), pixels[number][features]
        camera = model.camera(photo.camera_id)
        own = np.unique(features[_supports(photo.cam_from_world(), camera, xyz, positions)])
        others = ~np.isin(features, own)
        second = estimate_pose(positions[others], xyz[others], camera, _SECOND_SHARE)
        support = others & _supports(second, camera, xyz, positions) if second is not None else []
        ratios[photo.name] = len(np.unique(features[support])) / max(1, len(own))
    return ratios


def _supports(
    pose: Any, camera: Any, xyz: Float64[np.ndarray, "matches 3"], positions: Float64[np.ndarray, "matches 2"]
) -> Bool[np.ndarray, " matches"]:
    """Returns which points are seen where they are for a pose."""
    local = pose * xyz
    pixels = np.asarray(camera.img_from_cam(local), dtype=np.float64).reshape(-1, 2)
    return (local[:, 2] > 0) & (np.linalg.norm(pixels - positions, axis=1) < POSE_ERROR_PX)


class PairFits:
    """Verified matches of a model's photos, from an opened database, and whether they fit its poses."""

    def __init__(self, model: Any, opened: Any) -> None:
        pycolmap = colmap()
        photos = {number: model.image(number) for number in model.reg_image_ids()}
        cameras = {number: model.camera(photo.camera_id) for number, photo in photos.items()}
        poses = {number: photo.cam_from_world() for number, photo in photos.items()}
        self.cameras, self.poses = cameras, poses
        """Camera and pose of each photo."""
        self.pixels = {number: opened.read_keypoints(number)[:, :2].astype(np.float64) for number in photos}
        """Positions of the features of each photo."""
        plane = {number: np.asarray(cameras[number].cam_from_img(self.pixels[number])) for number in photos}
        self.matches: dict[tuple[int, int], Int64[np.ndarray, "matches 2"]] = {}
        """Rows of the features that match, by pair of photos."""
        self.fits: dict[tuple[int, int], Bool[np.ndarray, " matches"]] = {}
        """Whether each match fits."""
        for pair, geometry in zip(*opened.read_two_view_geometries(), strict=True):
            a, b = pycolmap.pair_id_to_image_pair(pair)
            if a not in photos or b not in photos or len(geometry.inlier_matches) < _LEAST_MATCHES:
                continue
            matches = geometry.inlier_matches.astype(np.int64)
            focal_px = (cameras[a].mean_focal_length() + cameras[b].mean_focal_length()) / 2
            motion = (poses[b] * poses[a].inverse()).matrix()
            first, second = plane[a][matches[:, 0]], plane[b][matches[:, 1]]
            self.matches[a, b] = matches
            self.fits[a, b] = epipolar_fit(first, second, motion, _EPIPOLAR_PX / focal_px)

    def counts(self) -> tuple[Int64[np.ndarray, "photos photos"], Int64[np.ndarray, "photos photos"]]:
        """Returns how many matches of each two photos fit the poses, and how many there are, in the model's order."""
        place = {number: index for index, number in enumerate(self.poses)}
        fits, matches = (np.zeros((len(place), len(place)), np.int64) for _ in range(2))
        for (a, b), some in self.fits.items():
            fits[[place[a], place[b]], [place[b], place[a]]] = np.count_nonzero(some)
            matches[[place[a], place[b]], [place[b], place[a]]] = len(some)
        return fits, matches


def collect_evidence(model: Any, database: FeatureDatabase) -> Evidence:
    """Compares the poses of a model with the verified matches of its photos."""
    points = PointVisibility(model)
    blind: list[bool] = []
    with database.open() as opened:
        pairs = PairFits(model, opened)
        # Pairs that were compared and have no match count, too; read_two_view_geometries leaves them out.
        for a, b in itertools.permutations(pairs.poses, 2):
            if opened.exists_two_view_geometry(a, b):
                expected = points.expected_points(a, pairs.cameras[b], pairs.poses[b])
                if len(expected) >= _LEAST_EXPECTED:
                    blind.append(bool(np.isin(expected, points.rows_by_photo[b]).mean() < _FEW))
    shares = np.array([fits.mean() for fits in pairs.fits.values()])
    fit, total = (sum(int(count(fits)) for fits in pairs.fits.values()) for count in (np.count_nonzero, len))
    ambiguous = [
        name
        for name, ratio in ambiguities(model, points, pairs.pixels, pairs.matches).items()
        if ratio > MOST_AMBIGUITY
    ]
    cut, group = weakest_cut(*pairs.counts())
    return Evidence(
        pairs=len(shares),
        pairs_fit=float(np.mean(shares > 0.5)) if len(shares) else 0.0,
        matches_fit=fit / max(total, 1),
        turn_fit=fit_turns(pairs),
        blind=float(np.mean(blind)) if blind else 0.0,
        points_per_photo=float(
            np.median([np.count_nonzero(points.views[rows] > 2) for rows in points.rows_by_photo.values()])
        ),
        ambiguous=sorted(ambiguous),
        ambiguous_share=len(ambiguous) / max(1, len(pairs.poses)),
        matches=total,
        cut=cut,
        cut_off=sorted(model.image(number).name for number, inside in zip(pairs.poses, group, strict=True) if inside),
    )


def weakest_cut(
    fits: Int64[np.ndarray, "photos photos"], matches: Int64[np.ndarray, "photos photos"]
) -> tuple[float, Bool[np.ndarray, " photos"]]:
    """Finds the group of photos that is held to the rest the least: with the most matches that contradict the poses for
    each match that fits them. Where a part of the photos is in the wrong place, true matches between it and the rest
    contradict its place; false matches are spread over all pairs.

    The ratio of two cuts of a graph is bounded by the largest generalized eigenvalue of their Laplacians; groups are
    sought along the eigenvectors (spectral partitioning: Shi and Malik 2000), then improved photo by photo.

    Args:
        fits: matches of each two photos that fit the poses.
        matches: all matches of each two photos.

    Returns:
        The ratio, and the photos of the smaller group.
    """
    from scipy.linalg import eigh

    total = len(fits)
    best, group = 0.0, np.zeros(total, bool)
    if total < 3:
        return best, group
    weights = [(matches - fits).astype(np.float64), fits.astype(np.float64)]
    against, tie = (np.diag(some.sum(axis=1)) - some for some in weights)
    tie += np.eye(total) * max(1e-6 * np.trace(tie) / total, 1e-9)
    _, vectors = eigh(against, tie, subset_by_index=[max(0, total - _EIGENVECTORS), total - 1])

    def ratio(contradicting: np.ndarray, fitting: np.ndarray) -> np.ndarray:
        return np.where(contradicting < _LEAST_MATCHES, 0.0, contradicting / np.maximum(fitting, 1.0))

    for vector in vectors.T:
        order = np.argsort(vector)
        sorted_weights = [some[np.ix_(order, order)] for some in weights]
        # What leaves the first k photos: their degrees without twice what is among them.
        cuts = ratio(*(np.cumsum(some.sum(axis=1) - 2 * np.tril(some).sum(axis=1)) for some in sorted_weights))
        if cuts.max() > best:
            best, group = float(cuts.max()), np.zeros(total, bool)
            group[order[: cuts.argmax() + 1]] = True
    while best > 0:
        side = np.where(group, 1.0, -1.0)
        cut = [some[group][:, ~group].sum() for some in weights]
        moves = ratio(*(value + (some @ side) * side for value, some in zip(cut, weights, strict=True)))
        if moves.max() <= best:
            break
        best = float(moves.max())
        group[moves.argmax()] ^= True
    return best, group if 2 * group.sum() <= total else ~group


def fit_turns(pairs: PairFits) -> float:
    """Returns :attr:`Evidence.turn_fit`."""
    cameras = pairs.cameras
    all_fits, moving_fits = np.zeros((2, len(_FOCALS)))
    num_matches = num_moving = 0
    for (a, b), matches in pairs.matches.items():
        # Without the model's distortion, which is made up as well then.
        focal_px = (cameras[a].mean_focal_length() + cameras[b].mean_focal_length()) / 2
        error_px = _TURN_ERROR * max(cameras[a].width, cameras[a].height)
        places_px = [pairs.pixels[number][rows] for number, rows in zip((a, b), matches.T, strict=True)]
        first, second = (
            (places - [cameras[number].principal_point_x, cameras[number].principal_point_y]) / focal_px
            for number, places in zip((a, b), places_px, strict=True)
        )
        fits = turn_errors(first, second, _FOCALS) * focal_px < error_px
        moves = np.linalg.norm(places_px[0] - places_px[1], axis=1) > 2 * error_px
        all_fits += fits.sum(axis=1)
        moving_fits += fits[:, moves].sum(axis=1)
        num_matches, num_moving = num_matches + len(moves), num_moving + int(moves.sum())
    if num_moving < _LEAST_MOTION * num_matches:
        return float(all_fits.max()) / max(num_matches, 1)
    return float(moving_fits.max()) / max(num_moving, 1)


def find_doubt(evidence: Evidence, separate: Evidence | None = None) -> str:
    """Returns the reason why poses are probably wrong, and a remedy, without a full stop; empty if they seem right.

    Args:
        separate: the evidence after each photo got a camera of its own; None where that was not tried.

    >>> find_doubt(Evidence(pairs=40, pairs_fit=1.0, matches_fit=0.99, turn_fit=0.1, blind=0.0, points_per_photo=300.0))
    ''
    """
    if evidence.pairs == 0:
        return "no two photos confirm each other's poses: take photos nearer to each other"
    if separate is not None and 1 - separate.matches_fit < MOST_UNEXPLAINED * (1 - evidence.matches_fit):
        return (
            f"{1 - evidence.matches_fit:.0%} of the matches between photos contradict them, but only "
            f"{1 - separate.matches_fit:.0%} if each photo has its own focal length, as after zooming or with another "
            "camera: add --cameras per-photo"
        )
    spread = evidence.cut < MOST_SPREAD_CUT
    if evidence.matches_fit < (LEAST_SPREAD_FIT if spread else LEAST_MATCHES_FIT):
        against = round((1 - evidence.pairs_fit) * evidence.pairs)
        return (
            f"{1 - evidence.matches_fit:.0%} of the matches between photos, and {against} of {evidence.pairs} pairs of "
            "photos as a whole, contradict them, because different places look alike or have too little texture: take "
            "photos nearer to each other that show what differs, and leave out those of another scene"
        )
    if evidence.cut > MOST_CUT:
        return (
            f"{name_some(evidence.cut_off)} may be in the wrong place, as more matches with the other photos "
            "contradict their poses than confirm them: take photos between these and the others, or leave them out"
        )
    if evidence.ambiguous_share > MOST_AMBIGUOUS:
        return (
            f"{name_some(evidence.ambiguous)} may belong to another place, which fits at least half as well, as "
            "different places look alike: take photos between these and the others, or leave them out"
        )
    if evidence.blind > MOST_BLIND:
        return (
            f"{evidence.blind:.0%} of the photos that should see the same things from the same side do not, as if two "
            "places were laid over each other: process photos of different places apart"
        )
    if evidence.turn_fit > MOST_TURN_FIT:
        return (
            f"{evidence.turn_fit:.0%} of the matches between photos fit a camera that turned on the spot, which gives "
            "no depth: move sideways between photos"
        )
    if evidence.points_per_photo < LEAST_POINTS:
        return (
            f"half of the photos see at most {evidence.points_per_photo:.0f} points that two others see as well, which "
            "happens by chance: take photos of things with more texture, nearer to each other"
        )
    if evidence.contradicted and not spread:
        return (
            f"more than {1 - LEAST_PHOTO_FIT:.0%} of the matches of {name_some(evidence.contradicted)} contradict "
            "their poses: take photos between these and the others, or leave them out"
        )
    return ""

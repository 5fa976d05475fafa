"""Whether poses are wrong is seen from matches, without the true poses."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from f3rm_ext.sfm.mapping import separate_cameras
from f3rm_ext.sfm.verdict import (
    Evidence,
    PairFits,
    collect_evidence,
    epipolar_fit,
    find_doubt,
    fit_turns,
    turn_errors,
    weakest_cut,
)

pycolmap = pytest.importorskip("pycolmap")
TOLERANCE = 1e-6


def two_views(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fifty points in two cameras, and the relative pose (3, 4)."""
    points = rng.uniform([-1, -1, 3], [1, 1, 5], (50, 3))
    pose = np.c_[pycolmap.Rotation3d(np.array([0.1, -0.3, 0.05])).matrix(), [0.8, 0.1, -0.2]]
    moved = points @ pose[:, :3].T + pose[:, 3]
    return points[:, :2] / points[:, 2:], moved[:, :2] / moved[:, 2:], pose


def test_true_matches_fit_and_others_do_not() -> None:
    rng = np.random.default_rng(0)
    first, second, pose = two_views(rng)
    assert epipolar_fit(first, second, pose, TOLERANCE).all()
    assert epipolar_fit(first, rng.permutation(second), pose, TOLERANCE).mean() < 0.1
    turned = pose.copy()
    turned[:, :3] = pycolmap.Rotation3d(np.array([0.0, 0.1, 0.0])).matrix() @ pose[:, :3]
    assert epipolar_fit(first, second, turned, 0.005).mean() < 0.5


def test_points_behind_a_camera_do_not_fit() -> None:
    first, second, pose = two_views(np.random.default_rng(1))
    pose[:, 3] *= -1  # the same epipolar lines
    assert not epipolar_fit(first, second, pose, TOLERANCE).any()


def test_photos_from_one_place_fit_by_their_turn_alone() -> None:
    first, _, pose = two_views(np.random.default_rng(2))
    pose[:, 3] = [1e-9, 0, 0]
    rays = np.c_[first, np.ones(len(first))] @ pose[:, :3].T
    assert epipolar_fit(first, rays[:, :2] / rays[:, 2:], pose, 1e-3).all()
    assert not epipolar_fit(first, -rays[:, :2] / rays[:, 2:] + 1, pose, 1e-3).any()


def turn(model: Any, angle_deg: float, numbers: list[int]) -> None:
    """Turns some cameras about their own centres."""
    for number in numbers:
        image = model.image(number)
        away = pycolmap.Rigid3d(pycolmap.Rotation3d(np.deg2rad([0, angle_deg, 0])), np.zeros(3))
        model.frame(image.frame_id).set_cam_from_world(image.camera_id, away * image.cam_from_world())


def test_true_poses_are_not_doubted(make_scene: Callable[..., Any]) -> None:
    scene = make_scene(num_frames_per_rig=10)
    evidence = collect_evidence(*scene)
    assert evidence.pairs == 45 and evidence.pairs_fit == evidence.matches_fit == 1
    assert evidence.points_per_photo == 200 and 0 < evidence.turn_fit < 0.5
    assert find_doubt(evidence) == ""
    model, database = scene
    model.deregister_frame(model.image(model.reg_image_ids()[0]).frame_id)
    assert collect_evidence(model, database).pairs == 36, "photos without a pose do not count"


@pytest.mark.parametrize("angle_deg", [5, 90])
def test_wrong_poses_are_doubted_though_the_solver_would_not_know(
    make_scene: Callable[..., Any], angle_deg: float
) -> None:
    """Three of ten cameras are turned. Their own error is not looked at: a solver makes that small in any case."""
    model, database = make_scene(num_frames_per_rig=10)
    turn(model, angle_deg, model.reg_image_ids()[:3])
    evidence = collect_evidence(model, database)
    assert evidence.pairs_fit == pytest.approx(24 / 45, abs=0.07)
    assert "24 of 45" in find_doubt(evidence)
    if angle_deg == 90:  # cameras of their own do not help
        assert find_doubt(evidence, collect_evidence(separate_cameras(model), database)) == find_doubt(evidence)


def best_cut(fits: np.ndarray, matches: np.ndarray) -> float:
    total, best = len(fits), 0.0
    for bits in range(1, 2 ** (total - 1)):
        group = np.array([bits >> place & 1 for place in range(total)], bool)
        fit, both = (some[group][:, ~group].sum() for some in (fits, matches))
        if both - fit >= 15:
            best = max(best, (both - fit) / max(fit, 1))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_weakest_cut_is_that_of_all_groups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matches = np.triu(rng.integers(0, 100, (9, 9)) * (rng.random((9, 9)) < 0.7), 1)
    fits = (matches * rng.random((9, 9)) ** 0.3).astype(np.int64)
    fits, matches = fits + fits.T, matches + matches.T
    cut, group = weakest_cut(fits, matches)
    fit, both = (some[group][:, ~group].sum() for some in (fits, matches))
    assert cut == pytest.approx((both - fit) / max(fit, 1)) and 1 <= group.sum() <= 4
    assert cut > 0.9 * best_cut(fits, matches)


def test_what_hangs_together_is_not_cut_apart() -> None:
    matches = np.full((6, 6), 100) - 100 * np.eye(6, dtype=np.int64)
    assert weakest_cut(matches, matches)[0] == 0 and not weakest_cut(matches, matches)[1].any()
    assert weakest_cut(matches * 91 // 100, matches)[0] == pytest.approx(9 / 91, rel=0.01), "spread over all pairs"
    fits = matches.copy()
    fits[:2, 2:] = fits[2:, :2] = 20
    cut, group = weakest_cut(fits, matches)
    assert cut == pytest.approx(4) and group.tolist() == [True, True, *[False] * 4]


def zoom(model: Any, database: Any, factor: float, numbers: list[int]) -> None:
    """Enlarges some photos about their middle; the shared camera of the model knows nothing of it."""
    with database.open() as opened:
        for number in numbers:
            image = model.image(number)
            camera = model.camera(image.camera_id)
            middle = np.array([camera.principal_point_x, camera.principal_point_y])
            for feature in image.points2D:
                feature.xy = middle + factor * (feature.xy - middle)
            features = opened.read_keypoints(number)
            features[:, :2] = middle + factor * (features[:, :2] - middle)
            opened.update_keypoints(number, features)


def test_several_focal_lengths_of_one_camera_are_told(make_scene: Callable[..., Any]) -> None:
    model, database = make_scene(num_frames_per_rig=10)
    zoom(model, database, 1.3, model.reg_image_ids()[::2])
    evidence, separate = (collect_evidence(each, database) for each in (model, separate_cameras(model)))
    assert evidence.matches_fit < 0.92 and separate.matches_fit > 0.99
    assert "--cameras per-photo" in find_doubt(evidence, separate)
    assert model.num_cameras() == 1, "the model itself stays"


def test_points_that_only_two_photos_see_confirm_nothing(make_scene: Callable[..., Any]) -> None:
    model, database = make_scene(num_frames_per_rig=10)
    spare = [
        (element.image_id, element.point2D_idx)
        for number in list(model.points3D)[:100]
        for element in model.point3D(number).track.elements[2:]
    ]
    for observation in spare:
        model.delete_observation(*observation)
    assert collect_evidence(model, database).points_per_photo == 100


def test_two_places_over_each_other_are_told(make_scene: Callable[..., Any]) -> None:
    """Cameras see what others do not, though they stand and look alike."""
    model, database = make_scene(num_frames_per_rig=10)
    assert collect_evidence(model, database).blind == 0
    first, *_ = numbers = list(model.reg_image_ids())
    for number in numbers[1:]:  # all cameras near the first one
        image = model.image(number)
        step = pycolmap.Rigid3d(pycolmap.Rotation3d(), np.array([0.01 * number, 0, 0]))
        model.frame(image.frame_id).set_cam_from_world(image.camera_id, step * model.image(first).cam_from_world())
    spare = [
        (element.image_id, element.point2D_idx)
        for row, number in enumerate(list(model.points3D))
        for element in model.point3D(number).track.elements
        if element.image_id % 2 == row % 2
    ]
    for observation in spare:
        model.delete_observation(*observation)
    assert collect_evidence(model, database).blind > 0.3


def test_a_turn_on_the_spot_is_told_whatever_focal_length_the_solver_finds() -> None:
    first, moved, pose = two_views(np.random.default_rng(3))
    turned = np.c_[first, np.ones(len(first))] @ pose[:, :3].T
    second = turned[:, :2] / turned[:, 2:]
    focals = np.array([0.7, 1.0, 1.4])
    for focal in focals:
        errors = np.median(turn_errors(first / focal, second / focal, 1 / focals), axis=1)
        assert errors.argmin() == focals.tolist().index(focal) and errors.min() < 1e-9
    assert np.median(turn_errors(first, moved, focals), axis=1).min() > 0.02


@pytest.mark.parametrize(("change", "most"), [("sideways", 0.4), ("turn", 1.0), ("none", 1.0), ("a few wrong", 1.0)])
def test_matches_that_stay_where_they_are_do_not_tell_a_turn(change: str, most: float) -> None:
    """Three frames show the same, as those of a slow video do; a fourth moved, or turned."""
    first, moved, pose = two_views(np.random.default_rng(3))
    homogeneous = np.c_[first, np.ones(len(first))] @ pose[:, :3].T
    last = {"sideways": moved, "turn": homogeneous[:, :2] / homogeneous[:, 2:]}.get(change, first).copy()
    if change == "a few wrong":
        last[: len(last) // 20] += 0.02
    camera = pycolmap.Camera.create_from_model_id(1, pycolmap.CameraModelId.SIMPLE_PINHOLE, 500, 800, 600)
    rows = np.arange(len(first)).repeat(2).reshape(-1, 2)
    pairs = PairFits.__new__(PairFits)
    pairs.pixels = {number: places * 500 + [400, 300] for number, places in enumerate([first, first, first, last])}
    pairs.matches = {(a, b): rows for a, b in itertools.combinations(range(4), 2)}
    pairs.cameras = dict.fromkeys(range(4), camera)
    assert most - 0.4 <= fit_turns(pairs) <= most


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(100, 1.0, 1.0, 0.2, 0.0, 300.0), ""),
        (Evidence(100, 1.0, 0.8, 0.2, 0.0, 300.0), "20%"),
        (Evidence(100, 1.0, 0.9, 0.2, 0.0, 300.0, cut=0.6), "10%"),
        (Evidence(100, 1.0, 0.9, 0.2, 0.0, 300.0, cut=0.4), ""),
        (Evidence(100, 1.0, 0.95, 0.2, 0.0, 300.0, cut=2.0, cut_off=["a.jpg"]), "a.jpg"),
        (Evidence(100, 1.0, 0.95, 0.2, 0.0, 300.0, cut=0.6, contradicted=["b.jpg"]), "b.jpg"),
        (Evidence(100, 1.0, 0.95, 0.2, 0.0, 300.0, cut=0.4, contradicted=["b.jpg"]), ""),
        (Evidence(100, 1.0, 1.0, 0.2, 0.3, 300.0), "30%"),
        (Evidence(100, 1.0, 1.0, 0.95, 0.0, 300.0), "turned on the spot"),
        (Evidence(100, 1.0, 1.0, 0.2, 0.0, 20.0), "20 points"),
        (Evidence(0, 0.0, 0.0, 0.0, 0.0, 300.0), "no two photos"),
    ],
)
def test_the_reason_is_named(evidence: Evidence, words: str) -> None:
    assert words in find_doubt(evidence) and bool(find_doubt(evidence)) == bool(words)


def thin_out(database: Any, pairs: list[tuple[int, int]], shuffle: bool) -> None:
    """Leaves an eighth of the matches of pairs, so that they are few of all; shuffled ones are wrong."""
    rng = np.random.default_rng(0)
    with database.open() as opened:
        for a, b in pairs:
            geometry = opened.read_two_view_geometry(a, b)
            matches = geometry.inlier_matches.copy()
            if shuffle:
                matches[:, 1] = rng.permutation(matches[:, 1])
            geometry.inlier_matches = matches[: len(matches) // 8]
            opened.update_two_view_geometry(a, b, geometry)


def test_patterns_that_contradict_right_poses_are_no_doubt(make_scene: Callable[..., Any]) -> None:
    """As wallpaper does: it matches photos of different places, each pair in another way."""
    model, database = make_scene(num_frames_per_rig=10)
    numbers = list(model.reg_image_ids())
    thin_out(database, [(a, b) for a in numbers[:2] for b in numbers[5:]], shuffle=True)
    evidence = collect_evidence(model, database)
    assert evidence.pairs_fit < 0.8 and evidence.matches_fit > 0.92
    assert evidence.ambiguous == [] and find_doubt(evidence) == ""


def test_few_matches_that_agree_on_another_pose_are_a_doubt(make_scene: Callable[..., Any]) -> None:
    model, database = make_scene(num_frames_per_rig=8)
    first, *others = model.reg_image_ids()
    thin_out(database, [(first, other) for other in others], shuffle=False)
    turn(model, 90, [first])
    evidence = collect_evidence(model, database)
    assert evidence.matches_fit > 0.92 and evidence.ambiguous_share == 1 / 8
    assert evidence.ambiguous == [model.image(first).name] and model.image(first).name in find_doubt(evidence)


def test_poses_without_points_are_a_doubt(make_scene: Callable[..., Any]) -> None:
    """As those of a network that fit no match."""
    model, database = make_scene(num_frames_per_rig=4)
    for number in list(model.points3D):
        model.delete_point3D(number)
    assert "at most 0 points" in find_doubt(collect_evidence(model, database))

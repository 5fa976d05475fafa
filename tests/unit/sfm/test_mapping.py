"""Solving, refining and writing, on scenes whose cameras are known."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.utils import colmap_parsing_utils
from PIL import Image
from scipy.spatial.transform import Rotation

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.capture.points import XYZ
from f3rm_ext.sfm.capture_writer import SPARSE, undistort, write_capture
from f3rm_ext.sfm.mapping import (
    align_with_gps,
    distortion_folds,
    image_names,
    level_positions,
    refine_predicted,
    solve,
)
from f3rm_ext.sfm.report import scene_axes, summarize, write_report
from f3rm_ext.sfm.second_pass import register_missing

pycolmap = pytest.importorskip("pycolmap")
MakeUp = Callable[..., Any]


@pytest.mark.parametrize("mapper", ["incremental", "global"])
def test_both_mappers_recover_exact_cameras(make_scene: MakeUp, tmp_path: Path, mapper: Any) -> None:
    scene = make_scene()
    seen: list[int] = []
    (model,) = solve(scene.database, tmp_path / "work", mapper, lambda done, total: seen.append(done))
    assert model.num_reg_images() == 8 and scene.centre_error(model) < 1e-3
    assert not (tmp_path / "work").exists()
    assert seen[-1:] == ([8] if mapper == "incremental" else [])


def test_poses_that_are_degrees_off_are_refined(make_scene: MakeUp, tmp_path: Path) -> None:
    scene = make_scene()
    rng = np.random.default_rng(0)
    viewmats = {}
    for image in scene.truth.images.values():
        pose = np.eye(4)
        pose[:3] = image.cam_from_world().matrix()
        turn = pycolmap.Rotation3d(np.deg2rad(2) * rng.normal(size=3)).matrix()
        pose[:3] = turn @ pose[:3]
        viewmats[image.name] = pose
    del viewmats[next(iter(viewmats))]
    rounds: list[tuple[int, int]] = []
    model = refine_predicted(scene.database, viewmats, tmp_path / "work", lambda *counts: rounds.append(counts))
    assert image_names(model) == viewmats.keys() and rounds == [(i, 4) for i in range(1, 5)]
    assert scene.centre_error(model) < 5e-3 and model.compute_mean_reprojection_error() < 1


def test_distortion_that_cannot_be_undone_is_found() -> None:
    def camera(k1: float) -> Any:
        return pycolmap.Camera(model="SIMPLE_RADIAL", width=400, height=300, params=[300.0, 200.0, 150.0, k1])

    # r + k1 r³ is largest at r = 1 / √(-3 k1), where it is 2/3 r; the corner is at r = 250 / 300.
    assert [distortion_folds(camera(k1)) for k1 in (0.3, 0.0, -0.2, -0.22, -1.0)] == [False, False, False, True, True]


def test_without_distortion_a_camera_stays_straight(make_scene: MakeUp, tmp_path: Path) -> None:
    scene = make_scene(camera_model_id=pycolmap.CameraModelId.SIMPLE_RADIAL, camera_params=[1280.0, 512.0, 384.0, 0.0])
    (model,) = solve(scene.database, tmp_path / "work", "incremental", lambda *_: None, refine_distortion=False)
    assert [camera.params[3] for camera in model.cameras.values()] == [0.0]


def test_a_lost_photo_is_registered_and_one_of_another_place_is_not(make_scene: MakeUp, tmp_path: Path) -> None:
    """The last photo matches no other, and the one before shows something else."""
    scene = make_scene(num_points2D_without_point3D=50)
    truth, database = scene
    rng = np.random.default_rng(0)
    of_point = {number: rng.integers(0, 120, 128) for number in truth.points3D}
    *rest, elsewhere, lost = sorted(truth.images)
    with database.open() as opened:
        opened.clear_descriptors()
        for number, image in truth.images.items():
            rows = rng.integers(0, 120, (len(image.points2D), 128))
            for row, point in zip(rows, image.points2D, strict=True):
                if point.has_point3D() and number != elsewhere:
                    row[:] = of_point[point.point3D_id] + rng.integers(0, 30, 128)
            type_ = pycolmap.FeatureExtractorType.SIFT
            opened.write_descriptors(number, pycolmap.FeatureDescriptors(type_, rows.astype(np.uint8)))
        for pair in [(elsewhere, lost), *((number, other) for number in (elsewhere, lost) for other in rest)]:
            opened.delete_matches(*pair)
            opened.delete_two_view_geometry(*pair)
    (model,) = solve(database, tmp_path / "work", "incremental", lambda *_: None)
    elsewhere, lost = (truth.image(number).name for number in (elsewhere, lost))
    assert image_names(model).isdisjoint({elsewhere, lost}) and model.num_reg_images() == 6
    assert register_missing(model, database, [], lambda *_: None) == []
    assert register_missing(pycolmap.Reconstruction(), database, [lost], lambda *_: None) == [], "no points"
    counts: list[tuple[int, int]] = []
    distortion = [camera.params[3] for camera in model.cameras.values()]
    found = register_missing(model, database, [elsewhere, lost], lambda *count: counts.append(count), False)
    assert [camera.params[3] for camera in model.cameras.values()] == distortion
    assert found == [lost] and counts == [(0, 2), (1, 2), (2, 2)]
    assert lost in image_names(model) and elsewhere not in image_names(model)
    assert scene.centre_error(model) < 1e-3 and model.find_image_with_name(lost).num_points3D > 150


@pytest.mark.parametrize("model_name", ["PINHOLE", "SIMPLE_RADIAL"])
def test_points_project_where_they_were_seen(make_scene: MakeUp, tmp_path: Path, model_name: str) -> None:
    params = {"PINHOLE": [900.0, 920.0, 500.0, 380.0], "SIMPLE_RADIAL": [900.0, 500.0, 380.0, 0.05]}[model_name]
    scene = make_scene(camera_model_id=getattr(pycolmap.CameraModelId, model_name), camera_params=params)
    model, out = scene.truth, tmp_path
    scene.write_images()
    write_capture(model, out, "images", {}, z_is_up=False)
    parser = CaptureDataParserConfig(data=out, load_3D_points=True, eval_mode="all").setup()
    outputs = parser.get_dataparser_outputs("train")
    points = outputs.metadata[XYZ].double().numpy()
    assert outputs.metadata["points3D_rgb"].dtype == torch.uint8
    order = {path.name: i for i, path in enumerate(outputs.image_filenames)}
    numbers = list(model.points3D)
    worst = 0.0
    for image in model.images.values():
        i = order[Path(image.name).name]
        c2w = outputs.cameras.camera_to_worlds[i].double().numpy()
        local = (points - c2w[:, 3]) @ c2w[:, :3] * [1, -1, -1]
        flat = local[:, :2] / local[:, 2:]
        k1 = float(outputs.cameras.distortion_params[i, 0])
        flat = flat * (1 + k1 * (flat**2).sum(1, keepdims=True))
        fx, fy, cx, cy = (float(getattr(outputs.cameras, name)[i]) for name in ("fx", "fy", "cx", "cy"))
        pixels = flat * [fx, fy] + [cx, cy]
        for point2d in image.points2D:
            if point2d.has_point3D():
                worst = max(worst, float(np.abs(pixels[numbers.index(point2d.point3D_id)] - point2d.xy).max()))
    assert worst < 0.05


def test_every_frame_has_a_mask_and_nerfstudio_reads_colmaps_files(make_scene: MakeUp, tmp_path: Path) -> None:
    model = make_scene().truth
    masks = {image.name: f"masks/{i}.png" for i, image in model.images.items()}
    write_capture(model, tmp_path, "images", masks, z_is_up=True)
    meta = json.loads((tmp_path / "transforms.json").read_text())
    assert meta["fl_x"] > 0 and all("fl_x" not in frame for frame in meta["frames"])
    assert {frame["file_path"].removeprefix("images/"): frame["mask_path"] for frame in meta["frames"]} == masks
    assert meta["applied_transform"] == np.eye(4)[:3].tolist()
    images = colmap_parsing_utils.read_images_binary(tmp_path / SPARSE / "images.bin")
    cameras = colmap_parsing_utils.read_cameras_binary(tmp_path / SPARSE / "cameras.bin")
    points = colmap_parsing_utils.read_points3D_binary(tmp_path / SPARSE / "points3D.bin")
    assert len(images) == 8 and len(cameras) == 1 and len(points) == 200


def test_masks_are_undistorted_with_their_photos(make_scene: MakeUp, tmp_path: Path) -> None:
    scene = make_scene()
    names, camera = scene.write_images(), next(iter(scene.truth.cameras.values()))
    write_capture(scene.truth, tmp_path, "images", {}, z_is_up=True)
    exif = Image.Exif()
    exif[271] = "Maker"
    for name in names[:2]:
        with Image.open(tmp_path / "images" / name) as photo:
            photo.putalpha(Image.fromarray(np.tile(np.arange(photo.width) < photo.width / 2, (photo.height, 1))))
            photo.save(tmp_path / "images" / name, exif=exif)
    (tmp_path / "masks").mkdir()
    columns = np.where(np.arange(camera.width) < camera.width / 2, 255, 0).astype(np.uint8)
    Image.fromarray(np.tile(columns, (camera.height, 1))).save(tmp_path / "masks/one.png")
    seen: list[int] = []
    plain = undistort(
        scene.truth, tmp_path, "images", "straight", {names[0]: "masks/one.png"}, lambda done, _: seen.append(done)
    )
    assert seen == list(range(1, 9)) and {one.model.name for one in plain.cameras.values()} == {"PINHOLE"}
    straight = tmp_path / "straight" / names[0]
    with Image.open(straight) as photo, Image.open(tmp_path / "masks_undistorted/one.png") as mask:
        assert photo.size == mask.size and photo.mode == "RGBA" and photo.getexif()[271] == "Maker"
        opaque = np.asarray(photo)[..., 3] > 128
        kept = np.asarray(mask)
    half = kept.shape[1] // 2
    assert (opaque == (kept == 255)).mean() > 0.95
    assert (kept[:, : half - 2] == 255).mean() > 0.9 and (kept[:, half + 2 :] == 0).all()


@pytest.mark.parametrize("spread", ["all", "one", "none"])
def test_gps_gives_metres_where_photos_are_far_apart(make_scene: MakeUp, spread: str) -> None:
    scene = make_scene(prior_position=True, prior_position_coordinate_system=pycolmap.PosePriorCoordinateSystem.WGS84)
    if spread != "none":  # the made-up cameras are some metres apart; take each for ten, or one position is wrong
        with scene.database.open() as opened:
            for prior in opened.read_all_pose_priors():
                centre = scene.truth.image(prior.corr_data_id.id).projection_center()
                centre *= 10 if spread == "all" else 0.5
                centre += 200 * (spread == "one" and prior.corr_data_id.id == 3)
                prior.position = pycolmap.GPSTransform().enu_to_ellipsoid(centre[None], 47.0, 8.0, 400.0)[0]
                if prior.corr_data_id.id == 2:  # a photo without a position, and one of another kind
                    prior.position = np.full(3, np.nan)
                if prior.corr_data_id.id == 5:
                    prior.position, prior.coordinate_system = np.ones(3), pycolmap.PosePriorCoordinateSystem.CARTESIAN
                opened.update_pose_prior(prior)
    before = np.array([image.projection_center() for image in scene.truth.images.values()])
    error = align_with_gps(scene.truth, scene.database)
    after = np.array([image.projection_center() for image in scene.truth.images.values()])
    if spread == "all":
        assert error is not None and error < 0.5
        assert np.ptp(after, axis=0) == pytest.approx(10 * np.ptp(before, axis=0), rel=0.05)
    else:
        assert error is None and np.array_equal(before, after)


@pytest.mark.parametrize("down_deg", [0, 90])
def test_photos_along_a_straight_way_stay_upright(make_scene: MakeUp, down_deg: float) -> None:
    """Positions off by a metre do not tell the turn about the way, so the photos do, unless they look straight down."""
    scene = make_scene(prior_position=True, prior_position_coordinate_system=pycolmap.PosePriorCoordinateSystem.WGS84)
    model, rng = scene.truth, np.random.default_rng(0)
    looks_east = np.array([[0.0, -1, 0], [0, 0, -1], [1, 0, 0]])  # right, down and forward in east, north, up
    view = Rotation.from_euler("x", down_deg, degrees=True).as_matrix() @ looks_east
    with scene.database.open() as opened:
        for prior in opened.read_all_pose_priors():
            image = model.image(prior.corr_data_id.id)
            centre = [10.0 * image.image_id, 0, 0] + rng.normal(0, 0.1, 3)
            pose = pycolmap.Rigid3d(pycolmap.Rotation3d(view), -view @ centre)
            model.frame(image.frame_id).set_cam_from_world(image.camera_id, pose)
            noisy = centre + rng.normal(0, 1, 3)
            prior.position = pycolmap.GPSTransform().enu_to_ellipsoid(noisy[None], 47.0, 8.0, 400.0)[0]
            opened.update_pose_prior(prior)
    model.transform(pycolmap.Sim3d(0.2, pycolmap.Rotation3d(np.array([1.0, 0.7, -0.4])), np.array([3.0, 1, 2])))
    error = align_with_gps(model, scene.database)
    up = -np.mean([image.cam_from_world().rotation.matrix()[1] for image in model.images.values()], axis=0)
    assert error is not None and error < 3
    assert up == pytest.approx([0, 0, 1] if down_deg == 0 else [1, 0, 0], abs=0.1)


@pytest.mark.parametrize(
    ("roll_deg", "height", "turned"), [(90, 0.0, True), (-90, 0.1, True), (0, 0.0, False), (90, 2.0, False)]
)
def test_the_plane_of_cameras_is_level_where_photos_lie_on_their_side(
    make_scene: MakeUp, roll_deg: float, height: float, turned: bool
) -> None:
    """Cameras in a circle that look at its middle, a little down, at two heights."""
    model = pycolmap.Reconstruction(make_scene().truth)
    images = list(model.images.values())
    for place, image in enumerate(images):
        around = Rotation.from_euler("z", 2 * np.pi * place / len(images))
        inward = np.array([[0.0, 1, 0], [0, 0, -1], [-1, 0, 0]])  # right, down and forward of a camera at x = 1
        view = Rotation.from_euler("zx", [roll_deg, 0], degrees=True).as_matrix()
        view = view @ Rotation.from_euler("x", 10, degrees=True).as_matrix() @ inward @ around.inv().as_matrix()
        centre = around.apply([1.0, 0, 0]) + [0, 0, height * (place % 2)]
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(view), -view @ centre)
        model.frame(image.frame_id).set_cam_from_world(image.camera_id, pose)
    looks_down = np.mean([image.cam_from_world().rotation.matrix()[2, 2] for image in images])
    assert looks_down == pytest.approx(-np.sin(np.deg2rad(10)))
    model.transform(pycolmap.Sim3d(0.2, pycolmap.Rotation3d(np.array([1.0, 0.7, -0.4])), np.array([3.0, 1, 2])))
    before = {number: image.cam_from_world().matrix() for number, image in model.images.items()}
    assert level_positions(model) == turned
    if turned:
        centres = np.array([image.projection_center() for image in images])
        assert np.ptp(centres[:, 2]) == pytest.approx(0.2 * height, abs=1e-6)
        assert np.mean([image.cam_from_world().rotation.matrix()[2, 2] for image in images]) == pytest.approx(
            looks_down
        )
    else:
        assert all((image.cam_from_world().matrix() == before[number]).all() for number, image in model.images.items())


def test_the_report_is_one_page_that_names_every_photo(make_scene: MakeUp, tmp_path: Path) -> None:
    scene = make_scene()
    names = scene.write_images()
    photos = {name: {"blur": 0.3, "turned": False, "source": f"/in/{name}<"} for name in names}
    result = {
        "photos": 8, "registered": 7, "points": 200, "track_length": 3.0, "reprojection_error_px": 0.5,
        "without_pose": {names[0]: "no matches: <nothing>"}, "blurred": [names[1]], "same": {}, "gps_error_m": None,
        "z_is_up": False, "doubt": "they turn <on the spot>",
    }  # fmt: skip
    matches = {(names[1], names[2]): 30}
    write_report(tmp_path, scene.truth, photos, result, dict.fromkeys(names, 100), matches)
    page = (tmp_path / "sfm_report.html").read_text()
    assert all(f"/in/{name}&lt;" in page for name in names) and "&lt;nothing&gt;" in page
    assert "&lt;on the spot&gt;" in page and "<nothing>" not in page
    assert page.count("<svg") == 3 and "http://" not in page
    assert all(f"<title>{name}</title>" in page for name in names)


def test_photos_without_a_pose_are_told_by_their_reasons() -> None:
    reasons = {
        "a": "too few features (20): it is blurred, or has no texture",
        "b": "too few features (31): it is blurred, or has no texture",
        "c": "matches only photos without a pose: 231 matches with d.jpg",
        "d": "too few matches agree on a pose: at best 101 matches, with e.jpg",
        "e": "too few matches agree on a pose: at best 17 matches, with f.jpg",
    }
    figures = {"photos": 9, "registered": 4, "points": 9, "track_length": 3.0, "reprojection_error_px": 0.5}
    told = summarize(figures | {"without_pose": reasons, "blurred": [], "same": {}, "gps_error_m": None})[1:]
    assert len(told) == 3
    assert "a, b: too few features: " in told[0] and "20" not in told[0]
    assert "c: " in told[1] and "231" in told[1], "all that is known of the only one"
    assert "d, e: " in told[2] and "101" not in told[2]


def test_views_of_a_capture_are_upright_even_if_the_first_camera_looks_straight_down() -> None:
    world = Rotation.from_rotvec([0.5, 0.2, -0.4])
    for pitch in (-20.0, -90.0):  # of the first cameras; the others look around
        angles = [[0, pitch], [180, pitch], [0, 0], [90, 0], [180, 0], [270, 0]]
        turns = world * Rotation.from_euler("YX", angles, degrees=True)
        images = [SimpleNamespace(rotation=SimpleNamespace(matrix=turn.inv().as_matrix)) for turn in turns]
        poses = [SimpleNamespace(cam_from_world=lambda image=image: image) for image in images]
        model = SimpleNamespace(image=poses.__getitem__, reg_image_ids=lambda: range(6))
        axes = scene_axes(model, z_is_up=False)
        np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-9)
        np.testing.assert_allclose(axes[2], world.apply([0, -1, 0]), atol=1e-9)
        assert np.linalg.det(axes) == pytest.approx(1)
        assert pitch == -90 or world.apply([0, 0, 1]) @ axes[1] > 0.9, "forward is where the first camera looks"
        np.testing.assert_array_equal(scene_axes(model, z_is_up=True), np.eye(3))


@pytest.mark.parametrize("z_is_up", [True, False])
def test_up_is_that_of_gps_where_there_is_one(make_scene: MakeUp, tmp_path: Path, z_is_up: bool) -> None:
    scene = make_scene()
    scene.write_images()
    write_capture(scene.truth, tmp_path, "images", {}, z_is_up=z_is_up)
    outputs = CaptureDataParserConfig(data=tmp_path, eval_mode="all").setup().get_dataparser_outputs("train")
    frame = CaptureFrame.from_outputs(outputs, tmp_path)
    up = frame.directions_to_capture(np.array([0.0, 0.0, 1.0]))
    assert np.allclose(up, [0, 0, 1]) == z_is_up

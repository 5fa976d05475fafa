"""Solving, refining and writing, on scenes whose cameras are known."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from nerfstudio.data.utils import colmap_parsing_utils
from PIL import Image
from scipy.spatial.transform import Rotation

from f3rm_ext.capture.colmap_model import APPLIED, UNCHANGED
from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.capture.points import XYZ
from f3rm_ext.sfm.capture_writer import SPARSE, undistort, write_capture
from f3rm_ext.sfm.database import FeatureDatabase
from f3rm_ext.sfm.mapping import align_with_gps, distortion_folds, image_names, refine_predicted, solve
from f3rm_ext.sfm.report import axes_of, write_report

pycolmap = pytest.importorskip("pycolmap")
MakeUp = Callable[..., Any]


class MadeUp(NamedTuple):
    """A made-up scene."""

    truth: Any
    """``pycolmap.Reconstruction``."""
    database: FeatureDatabase

    def centres(self, model: Any) -> tuple[np.ndarray, np.ndarray]:
        """Camera centres of a model, moved onto the true ones, and the true ones."""
        names = sorted(model.image(number).name for number in model.reg_image_ids())
        found = np.array([model.find_image_with_name(name).projection_center() for name in names])
        true = np.array([self.truth.find_image_with_name(name).projection_center() for name in names])
        matrix = pycolmap.estimate_sim3d(found, true).matrix()
        return found @ matrix[:, :3].T + matrix[:, 3], true


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[..., MadeUp]:
    """Makes a scene; keywords are ``pycolmap.SyntheticDatasetOptions``."""

    def make(num_frames: int = 8, **options: Any) -> MadeUp:
        pycolmap.set_random_seed(0)
        path, images = tmp_path / "database.db", tmp_path / "images"
        settings = pycolmap.SyntheticDatasetOptions(
            num_rigs=1, num_cameras_per_rig=1, num_frames_per_rig=num_frames, num_points3D=200, **options
        )
        with pycolmap.Database.open(path) as opened:
            truth = pycolmap.synthesize_dataset(settings, opened)
        images.mkdir()
        for image in truth.images.values():
            camera = truth.camera(image.camera_id)
            (images / image.name).parent.mkdir(exist_ok=True)
            Image.new("RGB", (camera.width, camera.height), (10, 200, 30)).save(images / image.name)
        return MadeUp(truth, FeatureDatabase(path, images, tmp_path / "none", 1000, 1000))

    return make


@pytest.mark.parametrize("mapper", ["incremental", "global"])
def test_both_mappers_recover_exact_cameras(made_up: MakeUp, tmp_path: Path, mapper: Any) -> None:
    scene = made_up()
    seen: list[int] = []
    (model,) = solve(scene.database, tmp_path / "work", mapper, lambda done, total: seen.append(done))
    found, true = scene.centres(model)
    assert len(found) == 8 and np.abs(found - true).max() < 1e-3 * np.ptp(true)
    assert not (tmp_path / "work").exists()
    assert seen[-1:] == ([8] if mapper == "incremental" else [])


def test_poses_that_are_degrees_off_are_refined(made_up: MakeUp, tmp_path: Path) -> None:
    scene = made_up()
    rng = np.random.default_rng(0)
    viewmats = {}
    for image in scene.truth.images.values():
        pose = np.eye(4)
        pose[:3] = image.cam_from_world().matrix()
        turn = pycolmap.Rotation3d(np.deg2rad(2) * rng.normal(size=3)).matrix()
        pose[:3] = turn @ pose[:3]
        viewmats[image.name] = pose
    left_out = next(iter(viewmats))
    del viewmats[left_out]
    rounds: list[tuple[int, int]] = []
    model = refine_predicted(scene.database, viewmats, tmp_path / "work", lambda *counts: rounds.append(counts))
    found, true = scene.centres(model)
    assert image_names(model) == viewmats.keys() and rounds == [(i, 4) for i in range(1, 5)]
    assert np.abs(found - true).max() < 5e-3 * np.ptp(true)
    assert model.compute_mean_reprojection_error() < 1


def test_distortion_that_cannot_be_undone_is_found() -> None:
    def camera(k1: float) -> Any:
        return pycolmap.Camera(model="SIMPLE_RADIAL", width=400, height=300, params=[300.0, 200.0, 150.0, k1])

    # r + k1 r³ is largest at r = 1 / √(-3 k1), where it is 2/3 r; the corner is at r = 250 / 300.
    assert [distortion_folds(camera(k1)) for k1 in (0.3, 0.0, -0.2, -0.22, -1.0)] == [False, False, False, True, True]


def test_without_distortion_a_camera_stays_straight(made_up: MakeUp, tmp_path: Path) -> None:
    scene = made_up(camera_model_id=pycolmap.CameraModelId.SIMPLE_RADIAL, camera_params=[1280.0, 512.0, 384.0, 0.0])
    (model,) = solve(scene.database, tmp_path / "work", "incremental", lambda *_: None, refine_distortion=False)
    assert [camera.params[3] for camera in model.cameras.values()] == [0.0]


def read_back(out: Path) -> tuple[Any, np.ndarray, CaptureFrame]:
    """The cameras that a training would use, its first points, and the frame of the file."""
    parser = CaptureDataParserConfig(data=out, load_3D_points=True, eval_mode="all").setup()
    outputs = parser.get_dataparser_outputs("train")
    return outputs, outputs.metadata[XYZ].double().numpy(), CaptureFrame.of_outputs(outputs, out)


@pytest.mark.parametrize("model_name", ["PINHOLE", "SIMPLE_RADIAL"])
def test_points_project_where_they_were_seen(made_up: MakeUp, tmp_path: Path, model_name: str) -> None:
    params = {"PINHOLE": [900.0, 920.0, 500.0, 380.0], "SIMPLE_RADIAL": [900.0, 500.0, 380.0, 0.05]}[model_name]
    scene = made_up(camera_model_id=getattr(pycolmap.CameraModelId, model_name), camera_params=params)
    model, out = scene.truth, tmp_path
    write_capture(model, out, "images", {}, APPLIED)
    outputs, points, _ = read_back(out)
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


def test_colmaps_files_are_read_by_nerfstudio(made_up: MakeUp, tmp_path: Path) -> None:
    scene = made_up()
    write_capture(scene.truth, tmp_path, "images", {}, APPLIED)
    images = colmap_parsing_utils.read_images_binary(tmp_path / SPARSE / "images.bin")
    cameras = colmap_parsing_utils.read_cameras_binary(tmp_path / SPARSE / "cameras.bin")
    points = colmap_parsing_utils.read_points3D_binary(tmp_path / SPARSE / "points3D.bin")
    assert len(images) == 8 and len(cameras) == 1 and len(points) == 200


def test_masks_and_several_cameras_are_written_for_every_frame(made_up: MakeUp, tmp_path: Path) -> None:
    pycolmap.set_random_seed(0)
    scene = made_up()
    model = scene.truth
    masks = {image.name: f"masks/{i}.png" for i, image in model.images.items()}
    write_capture(model, tmp_path, "images", masks, UNCHANGED)
    meta = json.loads((tmp_path / "transforms.json").read_text())
    assert meta["fl_x"] > 0 and all("fl_x" not in frame for frame in meta["frames"])
    assert {frame["file_path"].removeprefix("images/"): frame["mask_path"] for frame in meta["frames"]} == masks
    assert meta["applied_transform"] == np.eye(4)[:3].tolist()


def test_masks_are_undistorted_with_their_photos(made_up: MakeUp, tmp_path: Path) -> None:
    scene = made_up()
    name = min(image.name for image in scene.truth.images.values())
    write_capture(scene.truth, tmp_path, "images", {}, UNCHANGED)
    (tmp_path / "masks").mkdir()
    camera = next(iter(scene.truth.cameras.values()))
    columns = np.where(np.arange(camera.width) < camera.width / 2, 255, 0).astype(np.uint8)
    Image.fromarray(np.tile(columns, (camera.height, 1))).save(tmp_path / "masks/one.png")
    seen: list[int] = []
    plain = undistort(
        scene.truth, tmp_path, "images", "straight", {name: "masks/one.png"}, lambda done, _: seen.append(done)
    )
    assert seen == list(range(1, 9)) and {one.model.name for one in plain.cameras.values()} == {"PINHOLE"}
    with Image.open(tmp_path / "straight" / name) as photo, Image.open(tmp_path / "masks_undistorted/one.png") as mask:
        assert photo.size == mask.size
        kept = np.asarray(mask)
    half = kept.shape[1] // 2
    assert (kept[:, : half - 2] == 255).mean() > 0.9 and (kept[:, half + 2 :] == 0).all()


@pytest.mark.parametrize("spread", [True, False])
def test_gps_gives_metres_where_photos_are_far_apart(made_up: MakeUp, spread: bool) -> None:
    scene = made_up(prior_position=True, prior_position_coordinate_system=pycolmap.PosePriorCoordinateSystem.WGS84)
    if spread:  # the made-up cameras are some metres apart; take each for ten
        with scene.database.open() as opened:
            places = []
            for prior in opened.read_all_pose_priors():
                centre = scene.truth.image(prior.corr_data_id.id).projection_center()
                prior.position = pycolmap.GPSTransform().enu_to_ellipsoid(10 * centre[None], 47.0, 8.0, 400.0)[0]
                if prior.corr_data_id.id == 2:  # a photo without a position, and one of another kind
                    prior.position = np.full(3, np.nan)
                if prior.corr_data_id.id == 5:
                    prior.position, prior.coordinate_system = np.ones(3), pycolmap.PosePriorCoordinateSystem.CARTESIAN
                opened.update_pose_prior(prior)
                places.append(10 * centre)
    before = np.array([image.projection_center() for image in scene.truth.images.values()])
    error = align_with_gps(scene.truth, scene.database)
    after = np.array([image.projection_center() for image in scene.truth.images.values()])
    if spread:
        assert error is not None and error < 0.5
        assert np.ptp(after, axis=0) == pytest.approx(10 * np.ptp(before, axis=0), rel=0.05)
    else:
        assert error is None and np.array_equal(before, after)


def test_the_report_is_one_page_that_names_every_photo(made_up: MakeUp, tmp_path: Path) -> None:
    scene = made_up()
    names = sorted(image.name for image in scene.truth.images.values())
    photos = {name: {"blur": 0.3, "turned": False, "source": f"/in/{name}<"} for name in names}
    result = {
        "photos": 8, "registered": 7, "points": 200, "track_length": 3.0, "reprojection_error_px": 0.5,
        "without_pose": {names[0]: "no matches: <nothing>"}, "blurred": [names[1]], "same": {}, "gps_error_m": None,
        "doubt": "they turn <on the spot>",
    }  # fmt: skip
    matches = {(names[1], names[2]): 30}
    write_report(tmp_path, scene.truth, photos, result, dict.fromkeys(names, 100), matches)
    page = (tmp_path / "sfm_report.html").read_text()
    assert all(f"/in/{name}&lt;" in page for name in names) and "&lt;nothing&gt;" in page
    assert "&lt;on the spot&gt;" in page and "<nothing>" not in page
    assert page.count("<svg") == 3 and "http://" not in page
    assert all(f"<title>{name}</title>" in page for name in names)


def test_torch_is_the_capture_readers(made_up: MakeUp, tmp_path: Path) -> None:
    """The points are where splats begin: in the scene frame, with colours."""
    scene = made_up()
    write_capture(scene.truth, tmp_path, "images", {}, APPLIED)
    outputs, points, frame = read_back(tmp_path)
    true = np.array([point.xyz for point in scene.truth.points3D.values()]) @ APPLIED[:, :3].T
    assert (
        np.allclose(frame.to_capture(points), true, atol=1e-3) and outputs.metadata["points3D_rgb"].dtype == torch.uint8
    )


def test_views_of_a_capture_are_upright_even_if_the_first_camera_looks_straight_down() -> None:
    world = Rotation.from_rotvec([0.5, 0.2, -0.4])
    for pitch in (-20.0, -90.0):  # of the first cameras; the others look around
        angles = [[0, pitch], [180, pitch], [0, 0], [90, 0], [180, 0], [270, 0]]
        turns = world * Rotation.from_euler("YX", angles, degrees=True)
        images = [SimpleNamespace(rotation=SimpleNamespace(matrix=turn.inv().as_matrix)) for turn in turns]
        poses = [SimpleNamespace(cam_from_world=lambda image=image: image) for image in images]
        axes = np.stack(axes_of(SimpleNamespace(image=poses.__getitem__, reg_image_ids=lambda: range(6))))
        np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-9)
        np.testing.assert_allclose(axes[2], world.apply([0, -1, 0]), atol=1e-9)
        assert np.linalg.det(axes) == pytest.approx(1)
        assert pitch == -90 or world.apply([0, 0, 1]) @ axes[1] > 0.9, "forward is where the first camera looks"

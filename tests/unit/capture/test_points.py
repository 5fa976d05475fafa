"""The points of a capture: they stay where they are relative to the cameras, and bad ones stop nothing."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import Nerfstudio, NerfstudioDataParserConfig

from f3rm_ext.capture import points as module
from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.capture.points import RGB, XYZ, drop_unusable_points, tolerate_unreadable_points
from f3rm_ext.data import datamanager
from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.image_datamanager import ImageDataManagerConfig
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.surfaces import RayDepths
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.splat.initialization import initial_gaussians
from f3rm_ext.splat.transform import to_scene
from f3rm_ext.utils.ply import write_ply

SWAP = np.array([[1.0, 0, 0, 0.5], [0, 0, 1, -0.25], [0, -1, 0, 2.0]])
"""Axes as ns-process-data exchanges them, and a shift."""
OLD_SWAP = np.array([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, -1, 0]])


def spots(poses: np.ndarray) -> np.ndarray:
    """Two points for each camera: its centre, and one unit before it."""
    return np.concatenate([poses[:, :3, 3], poses[:, :3, 3] - poses[:, :3, 2]])


def spots_of(outputs: Any, applied_scale: float = 1.0) -> torch.Tensor:
    """The same of cameras in the scene frame, where a unit has another length."""
    c2w = outputs.cameras.camera_to_worlds
    return torch.cat([c2w[:, :, 3], c2w[:, :, 3] - outputs.dataparser_scale / applied_scale * c2w[:, :, 2]])


def poses_of(capture: Any) -> np.ndarray:
    return np.array([frame["transform_matrix"] for frame in capture.frames])


def write_points(capture: Any, xyz: np.ndarray, rgb: np.ndarray | None = None, kind: Any = np.float32) -> None:
    """Gives a capture points of its own."""
    columns = {name: xyz[:, i].astype(kind) for i, name in enumerate("xyz")}
    if rgb is not None:
        columns |= {name: rgb[:, i].astype(np.uint8) for i, name in enumerate(("red", "green", "blue"))}
    with (capture.folder / "p.ply").open("wb") as stream:
        write_ply(stream, columns)
    capture.meta["ply_file_path"] = "p.ply"
    capture.save()


def parse(folder: Path, **options: Any) -> Any:
    config = CaptureDataParserConfig(data=folder, load_3D_points=True, eval_mode="all", **options)
    return config.setup().get_dataparser_outputs("train")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"orientation_method": "none", "center_method": "none"},
        {"orientation_method": "vertical", "scale_factor": 3.0},
    ],
    ids=["default", "as it is", "vertical"],
)
@pytest.mark.parametrize(
    "applied",
    [
        {},
        {"applied_transform": SWAP.tolist()},
        {"applied_scale": 0.5},
        {"applied_transform": SWAP.tolist(), "applied_scale": 4.0},
    ],
    ids=["nothing", "transform", "scale", "both"],
)
def test_points_stay_with_the_cameras(capture, applied, options) -> None:
    capture.meta |= applied
    colors = np.arange(36).reshape(12, 3)
    write_points(capture, spots(poses_of(capture)), colors)
    before = capture.contents()
    outputs = parse(capture.folder, **options)
    expected = spots_of(outputs, applied.get("applied_scale", 1.0))
    torch.testing.assert_close(outputs.metadata[XYZ], expected, atol=1e-5, rtol=0)
    assert torch.equal(outputs.metadata[RGB], torch.from_numpy(colors).to(torch.uint8))
    assert capture.contents() == before, "inputs are never changed"


@pytest.mark.parametrize("applied", [{}, {"applied_transform": SWAP.tolist()}], ids=["nothing", "transform"])
@pytest.mark.parametrize("place", ["file", "model", "model beside"])
def test_geographic_coordinates_are_as_exact_as_small_ones(capture, as_colmap, tmp_path, log, applied, place) -> None:
    """float32 has steps of half a unit there, and the cameras of this capture lie a few units apart."""
    near, results = poses_of(capture), []
    for shift in ([0.0, 0.0, 0.0], [512345.6, 4212345.7, 312.0]):
        poses = near.copy()
        poses[:, :3, 3] += shift
        for frame, pose in zip(capture.frames, poses, strict=True):
            frame["transform_matrix"] = pose.tolist()
        capture.meta |= applied
        folder = capture.save().folder
        if place == "file":
            write_points(capture, spots(poses), kind=np.float64)
        elif place == "model":
            folder = as_colmap(folder, tmp_path / f"model{shift[2]}", points=spots(poses))
        else:
            sparse = folder / "colmap" / "sparse" / "0"
            sparse.mkdir(parents=True, exist_ok=True)
            swap = np.array(applied.get("applied_transform", OLD_SWAP))
            scene = as_colmap(folder, tmp_path / f"beside{shift[2]}", points=(spots(poses) - swap[:, 3]) @ swap[:, :3])
            shutil.copy(scene / "sparse/0/points3D.bin", sparse)
        outputs = parse(folder)
        frame_of = CaptureFrame.from_outputs(outputs, folder)
        centers = frame_of.to_capture(outputs.cameras.camera_to_worlds[:, :, 3].double().numpy())
        results.append((outputs, centers - centers[0]))
    (small, small_centers), (far, far_centers) = results
    torch.testing.assert_close(far.cameras.camera_to_worlds, small.cameras.camera_to_worlds, atol=1e-5, rtol=0)
    torch.testing.assert_close(far.metadata[XYZ], small.metadata[XYZ], atol=1e-5, rtol=0)
    np.testing.assert_allclose(far_centers, small_centers, atol=1e-4)
    assert sum("are relative to (" in line for line in log) == 1


@pytest.mark.parametrize("ending", [".bin", ".txt"])
@pytest.mark.parametrize("applied", [{}, {"applied_transform": SWAP.tolist()}])
def test_colmaps_own_points_stand_in(capture, as_colmap, tmp_path, applied, ending) -> None:
    sparse = capture.folder / "colmap" / "sparse" / "0"
    sparse.mkdir(parents=True)
    capture.meta |= applied
    before = capture.save().contents()
    swap = np.array(applied.get("applied_transform", OLD_SWAP))
    own = (spots(poses_of(capture)) - swap[:, 3]) @ swap[:, :3]
    scene = as_colmap(capture.folder, tmp_path / "garden", text=ending == ".txt", points=own)
    shutil.copy(scene / "sparse/0" / f"points3D{ending}", sparse)
    for data in (capture.folder, capture.folder / "transforms.json"):
        outputs = parse(data)
        torch.testing.assert_close(outputs.metadata[XYZ], spots_of(outputs), atol=1e-5, rtol=0)
    (sparse / f"points3D{ending}").unlink()
    assert capture.contents() == before, "nerfstudio would write a PLY file and change transforms.json"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"orientation_method": "none"},
        {"orientation_method": "none", "assume_colmap_world_coordinate_convention": False},
    ],
    ids=["default", "exchanged", "as it is"],
)
def test_splats_of_a_colmap_folder_begin_at_its_points(capture, as_colmap, tmp_path, options) -> None:
    poses = poses_of(capture)
    scene = as_colmap(capture.folder, tmp_path / "garden", place="colmap/sparse/0", points=spots(poses))
    parser = ColmapDataParserConfig(eval_mode="all", downscale_factor=1, **options)
    manager = ImageDataManagerConfig(data=scene, dataparser=parser).setup(device="cpu")
    outputs = manager.train_dataparser_outputs
    torch.testing.assert_close(outputs.metadata[XYZ], spots_of(outputs), atol=1e-5, rtol=0)
    assert torch.equal(manager.train_dataset.metadata[XYZ], outputs.metadata[XYZ])
    # Splats in COLMAP's frame go the same way.
    splats = initial_gaussians(torch.from_numpy(spots(poses)).float(), None, 0, 1.0, torch.Generator())
    torch.testing.assert_close(to_scene(splats, outputs).means, spots_of(outputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_colmap_folder_without_usable_points_trains(capture, as_colmap, tmp_path, log, damage) -> None:
    points = () if damage == "empty" else spots(poses_of(capture))
    scene = as_colmap(capture.folder, tmp_path / "garden", place="colmap/sparse/0", points=points)
    path = scene / "colmap/sparse/0/points3D.bin"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:50])
    parser = ColmapDataParserConfig(downscale_factor=1)
    manager = ImageDataManagerConfig(data=scene, dataparser=parser).setup(device="cpu")
    assert XYZ not in manager.train_dataset.metadata
    said = [line for line in log if line.startswith("Going on without the capture's points, which cannot be read (")]
    assert len(said) == 1


# --- points that cannot be used --------------------------------------------------------------------------------------


HEADER = b"ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\n"
PLACES = b"property float y\nproperty float z\nend_header\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "There is no file"),
        (b"", "is not a PLY file"),
        (HEADER + PLACES + b"1 2 3\n", "cut short, with 1 of 2"),
        (HEADER + b"end_header\n1\n2\n", "has no points"),
    ],
    ids=["missing", "empty", "cut", "no places"],
)
def test_a_file_that_cannot_be_read(capture, log, content, reason) -> None:
    if content is not None:
        (capture.folder / "sparse_pc.ply").write_bytes(content)
    capture.meta["ply_file_path"] = "sparse_pc.ply"
    capture.save()
    assert XYZ not in parse(capture.folder).metadata
    (said,) = (line for line in log if line.startswith("Going on without the capture's points: "))
    assert reason in said and said.endswith(".") and "\n" not in said


def manager_of(capture: Any, **options: Any) -> Any:
    return ImageDataManagerConfig(data=capture.folder, **options).setup(device="cpu")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_points_that_are_not_finite_are_left_out(capture, log, bad) -> None:
    xyz, rgb = np.ones((5, 3)), np.arange(15).reshape(5, 3)
    xyz[1, 2] = bad
    write_points(capture, xyz, rgb)
    metadata = manager_of(capture).train_dataset.metadata
    assert metadata[XYZ].shape == (4, 3) and metadata[XYZ].isfinite().all()
    assert metadata[RGB][:, 0].tolist() == [0, 6, 9, 12]
    assert any("1 of 5" in line and "p.ply" in line for line in log)


@pytest.mark.parametrize("xyz", [np.ones((0, 3)), np.full((3, 3), np.nan)], ids=["none", "NaN"])
def test_a_capture_whose_points_are_all_bad_has_none(capture, log, xyz) -> None:
    write_points(capture, xyz)
    assert not [name for name in manager_of(capture).train_dataset.metadata if name.startswith("points3D")]
    assert any("There are no points to use in" in line for line in log)


def test_points_without_colors_are_grey(capture) -> None:
    write_points(capture, np.ones((5, 3)))
    assert (manager_of(capture).train_dataset.metadata[RGB] == 128).all()
    metadata = {XYZ: torch.ones(4, 3), RGB: torch.empty(0, 3, dtype=torch.uint8)}  # as nerfstudio's dataparser has it
    drop_unusable_points(metadata)
    assert metadata[RGB].shape == (4, 3)


def test_colors_between_0_and_1(capture) -> None:
    columns = {name: np.full(2, value, dtype=np.float32) for name, value in zip("xyz", (1, 2, 3), strict=True)}
    columns |= {name: np.array([0.5, 1.0], dtype=np.float32) for name in ("red", "green", "blue")}
    with (capture.folder / "p.ply").open("wb") as stream:
        write_ply(stream, columns)
    _, rgb = module.read_point_cloud(capture.folder / "p.ply")
    assert rgb.tolist() == [[128] * 3, [255] * 3]


def test_parsers_without_points_are_left_alone() -> None:
    parser = object()
    tolerate_unreadable_points(parser)
    metadata: dict[str, Any] = {"a": 1}
    drop_unusable_points(metadata)
    assert metadata == {"a": 1}


# --- who reads them --------------------------------------------------------------------------------------------------


def test_splats_read_points_unless_told_otherwise(capture, monkeypatch) -> None:
    monkeypatch.setattr(Nerfstudio, "_load_3D_points", lambda *_: {XYZ: torch.ones(5, 3)})  # needs open3d
    write_points(capture, np.ones((5, 3)))
    assert XYZ in manager_of(capture).train_dataset.metadata
    assert XYZ not in manager_of(capture, dataparser=CaptureDataParserConfig()).train_dataset.metadata
    theirs = NerfstudioDataParserConfig(load_3D_points=True)
    assert XYZ in manager_of(capture, dataparser=theirs).train_dataset.metadata


@pytest.mark.parametrize(
    ("parser", "mode", "factor"),
    [
        (CaptureDataParserConfig, "val", 5),
        (CaptureDataParserConfig, "test", None),
        (NerfstudioDataParserConfig, "val", 3),
    ],
)
def test_fields_measure_how_far_the_scene_is(capture, monkeypatch, parser, mode, factor) -> None:
    """Cameras one beside the other look at points whose depth is ten times their extent; without points they look at
    what stereo finds at six times their extent."""

    def measure(outputs):
        depths = torch.full((1, 4, 4), 6 * PinholeCameras.of(outputs.cameras).extent())
        depths[0, 0] = 0
        return RayDepths(torch.zeros(6, 3, 3), torch.zeros(6), depths)

    monkeypatch.setattr(datamanager, "measure_ray_depths", measure)
    for index, frame in enumerate(capture.meta["frames"]):
        pose = np.eye(4)
        pose[0, 3] = index
        frame["transform_matrix"] = pose.tolist()
    extent = 1.1 * (len(capture.meta["frames"]) - 1) / 2
    write_points(capture, np.array([[0, 0, -10 * extent]]) + np.zeros((5, 1)))
    options = {"load_3D_points": True, "eval_mode": "all"}
    config = F3rmDataManagerConfig(
        data=capture.folder, dataparser=parser(**options), features=FeatureOptions(extractors=())
    )
    metadata = config.setup(device="cpu", test_mode=mode).train_dataset.metadata
    assert XYZ not in metadata and ("measure_reach_factor" in metadata) == (factor is not None)
    if factor is not None:
        assert metadata["measure_reach_factor"]() == pytest.approx(factor)

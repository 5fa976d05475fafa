"""The datamanager of whole images over real captures on the disk, as nerfstudio's pipeline and commands use it."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from nerfstudio.data.datamanagers.base_datamanager import DataManager
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanagerConfig
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.blender_dataparser import BlenderDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.data.background import PhotoBackground
from f3rm_ext.data.image_datamanager import ImageDataManagerConfig, LiftedFeatureOptions
from f3rm_ext.data.stereo.points import DensePoints, encode_ply, missing_points
from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.splat_presets import make_splat_config


@pytest.fixture
def build(build_manager):
    """Builds datamanagers of this kind."""
    return partial(build_manager, ImageDataManagerConfig)


@pytest.fixture
def blender(tmp_path) -> Path:
    """Six RGBA images of 15 x 13 pixels for the blender-data parser."""
    for split in ("train", "val", "test"):
        (tmp_path / split).mkdir()
        frames = []
        for i in range(6 if split == "train" else 2):
            pose = np.eye(4)
            pose[0, 3] = i
            pixels = np.full((13, 15, 4), 100, np.uint8)
            pixels[:, 8:, 3] = 0
            Image.fromarray(pixels).save(tmp_path / split / f"r_{i}.png")
            frames.append({"file_path": f"./{split}/r_{i}", "transform_matrix": pose.tolist()})
        meta = {"camera_angle_x": 0.7, "frames": frames}
        (tmp_path / f"transforms_{split}.json").write_text(json.dumps(meta))
    return tmp_path


@pytest.mark.parametrize("name", ["--pipeline.model.features", "--features.extractors"])
def test_extractors_have_two_names(name: str) -> None:
    config = tyro.cli(ImageDataManagerConfig, args=[name, "clip", "dinov2", "--features.codes", "64"])
    assert config.features.extractors == ("clip", "dinov2") and config.features.codes == 64
    assert tyro.cli(ImageDataManagerConfig, args=[]).features.extractors == ()
    with pytest.raises(ConfigError, match=r"codes.*3"):
        tyro.cli(ImageDataManagerConfig, args=["--features.codes", "3"])


def test_it_takes_the_place_of_nerfstudios(build, capsys):
    manager = build()
    assert isinstance(manager, DataManager) and isinstance(manager.config, FullImageDatamanagerConfig)
    for step in range(12):
        manager.next_train(step)
    assert manager.train_count == 12 and manager.train_stream._turns.uses.tolist() == [2] * 6
    assert manager.get_train_rays_per_batch() == 192 == manager.get_eval_rays_per_batch()
    for device, lower in (("cpu", ["train-num-images-to-sample-from"]), ("cuda", [])):
        manager.device = device
        names = [option.name.rsplit(".", 1)[1] for option in manager.memory_options()]
        assert names == [*lower, "camera-res-scale-factor"]
    with pytest.raises(SystemExit):
        tyro.cli(ImageDataManagerConfig, args=["--help"])
    text = capsys.readouterr().out
    assert "--resolution-schedule" in text and "--cache-images" in text and "--fps-reset-every" not in text


def test_the_resolution_follows_the_step(build):
    manager = build(num_downscales=2, resolution_schedule=10)
    sizes = [manager.next_train(step)[1]["image"].shape[:2] for step in (0, 9, 10, 19, 20, 10_000)]
    assert sizes == [(3, 4), (3, 4), (6, 8), (6, 8), (12, 16), (12, 16)]
    assert manager.get_train_rays_per_batch() == 192
    assert manager.next_eval_image(0)[1]["image"].shape == (12, 16, 3), "evaluation is always at full size"
    assert ImageDataManagerConfig().halvings(0) == 2 and ImageDataManagerConfig().halvings(3000) == 1


@pytest.mark.parametrize(("steps", "doubled_every"), [(15_000, 3000), (600, 120), (1, 1)])
def test_short_runs_see_the_photos_at_full_size(steps: int, doubled_every: int) -> None:
    config = make_splat_config("sugar-ext")
    config.max_num_iterations = steps
    config.fit_model()
    assert config.pipeline.datamanager.resolution_schedule == doubled_every


def test_the_scale_factor_applies_to_everything(build):
    manager = build(camera_res_scale_factor=0.3)
    camera, batch = manager.next_train(0)
    assert batch["image"].shape == (4, 5, 3) and (int(camera.height), int(camera.width)) == (4, 5)
    torch.testing.assert_close(camera.fx[0, 0], torch.tensor(16.0 * 5 / 16))
    torch.testing.assert_close(camera.cy[0, 0], torch.tensor(6.0 * 4 / 12))
    assert manager.fixed_indices_eval_dataloader.get_camera(0)[1]["image"].shape == (4, 5, 3)
    assert manager.train_dataset[0]["image"].shape == (4, 5, 3)


def test_eval_images_are_kept_by_no_one(build, monkeypatch):
    reads = []
    real = type(build().eval_dataset).picture
    monkeypatch.setattr(
        "f3rm_ext.data.pinhole_dataset.PinholeDataset.picture", lambda self, i: (reads.append(i), real(self, i))[1]
    )
    manager = build(mode="test")
    loader = iter(manager.fixed_indices_eval_dataloader)
    next(loader)
    assert reads == [0], "one at a time"
    next(loader)
    manager.fixed_indices_eval_dataloader.get_camera(0)
    assert reads == [0, 1, 0]


@pytest.mark.parametrize("parser", [CaptureDataParserConfig, NerfstudioDataParserConfig])
def test_distortion_is_undone_whatever_the_parser(build, make_capture, parser, log):
    folder = make_capture(8, sizes=((48, 64),), extra={"k1": -0.2, "k2": 0.02})
    manager = build(folder, dataparser=parser())
    camera, batch = manager.next_train(0)
    assert camera.distortion_params is None and float(camera.fx) != 64
    assert batch["image"].shape == (int(camera.height), int(camera.width), 3)
    camera, batch = manager.next_eval_image(0)
    assert camera.distortion_params is None and batch["image"].shape[1] == int(camera.width)
    assert any("distortion undone in 6 of them" in line for line in log)


def test_blender_images_keep_their_alpha_over_what_the_parser_asks_for(build, blender):
    for color, shown in (("black", 0.0), ("white", 1.0), (None, 1.0)):
        manager = build(blender, dataparser=BlenderDataParserConfig(alpha_color=color), num_downscales=1)
        camera, batch = manager.next_train(0)
        assert batch["image"].shape == (7, 8, 3) and batch["alpha"].shape == (7, 8, 1) and "mask" not in batch
        assert float(batch["alpha"][3, 0, 0]) == pytest.approx(100 / 255, abs=2e-3)
        assert float(batch["alpha"][3, 7, 0]) == 0 and float(batch["image"][3, 0, 0]) == pytest.approx(
            100 / 255, abs=2e-3
        )
        edge = batch["alpha"][3, :, 0] > 0
        torch.testing.assert_close(batch["image"][3, edge, 0], torch.full((int(edge.sum()),), 100 / 255))
        torch.testing.assert_close(camera.fx[0, 0] * 15 / 8, manager.train_dataset.cameras.fx[0, 0])
        assert manager.next_eval_image(0)[1]["alpha"].shape == (13, 15, 1)
        assert float(manager.train_dataset[0]["image"][0, 14, 0]) == shown
        given = manager.train_dataset.metadata["alpha_color"]
        assert given is None if color is None else given.tolist() == [shown] * 3


def test_mixed_sizes_masks_and_alpha(build, make_capture):
    folder = make_capture(8, sizes=((12, 16), (20, 8), (16, 12)), alpha=(1, 6), masks=4)
    manager = build(folder, train_num_images_to_sample_from=3, train_num_times_to_repeat_images=3, num_downscales=1)
    seen = {}
    for step in range(6):
        camera, batch = manager.next_train(step)
        size = (int(camera.height), int(camera.width))
        assert batch["image"].shape == (*size, 3) and batch["mask"].shape == (*size, 1)
        assert ("alpha" in batch) == (batch["image_idx"] == 1)
        assert batch["mask"][0, :, 0].tolist() == [x >= 2 for x in range(size[1])]
        seen[batch["image_idx"]] = size
    assert [seen[i] for i in range(6)] == [(6, 8), (10, 4), (8, 6)] * 2
    assert all("mask" in batch for _, batch in manager.fixed_indices_eval_dataloader)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_with_all_images_share_their_turns(build, world):
    managers = []
    for rank in range(world):
        torch.manual_seed(42 + rank)  # as nerfstudio seeds its processes
        managers.append(build(world=world, rank=rank))
    seen = []
    for step in range(12):
        images = [manager.next_train(step)[1]["image_idx"] for manager in managers]
        assert len(set(images)) == world, "every process has another image"
        seen += images
    for turn in range(0, 12 * world - 6, 6):
        counts = [seen[: turn + 6].count(image) for image in range(6)]
        assert max(counts) - min(counts) <= 1, "each image is used once before any is used again"
    state = managers[0].cycle_state()
    assert state["train"]["turn"] == managers[1].cycle_state()["train"]["turn"]


def test_the_chair(build, data_root):
    if not (data_root / "chair").is_dir():
        pytest.skip(f"no chair in {data_root}")
    manager = build(
        data_root / "chair", dataparser=BlenderDataParserConfig(), train_num_images_to_sample_from=3, num_downscales=2
    )
    camera, batch = manager.next_train(0)
    assert batch["image"].shape == (100, 100, 3) and 0.05 < float(batch["alpha"].mean()) < 0.7
    assert float(camera.fx) == pytest.approx(555.56 / 4, abs=0.01)


def test_the_fox(build, data_root):
    manager = build(data_root / "fox", train_num_images_to_sample_from=2)
    camera, batch = manager.next_train(0)
    height, width = batch["image"].shape[:2]
    assert 940 <= height <= 960 and 525 <= width <= 540 and "mask" not in batch
    assert (int(camera.height), int(camera.width)) == (height, width) and camera.distortion_params is None


def test_masked_pixels_may_be_trained_as_background(build, make_capture):
    folder = make_capture(8, masks=5, alpha=(0, 1, 2))
    manager = build(folder, masked_pixels="background", num_downscales=1, resolution_schedule=6)
    for step in range(12):
        _, batch = manager.next_train(step)
        full = 128 / 255 if batch["image_idx"] < 3 else 1.0
        expected = [0, 0, 0.5, 1, 1, 1, 1, 1] if step < 6 else [0] * 5 + [1] * 11  # the smaller ones are averages
        beside = 2 if step < 6 else 4
        assert batch["mask"][3, :, 0].tolist() == [x != beside for x in range(len(expected))]
        torch.testing.assert_close(batch["alpha"][3, :, 0], torch.tensor(expected) * full, atol=3e-3, rtol=0)
        assert torch.equal(batch["kept"], batch["alpha"] > 0)
    # Features, the viewer and evaluation see what the camera saw.
    assert manager.train_dataset.get_numpy_image(4).shape == (12, 16, 3)
    assert all("mask" in batch and "kept" not in batch for _, batch in manager.fixed_indices_eval_dataloader)


@pytest.mark.parametrize(("value", "expected"), [(255, "white"), (4, "black"), (128, None)])
def test_the_background_is_measured_in_training(build, make_capture, object_masks, value, expected) -> None:
    def background(alpha=(), opacity=128, masks=None):
        capture = make_capture(8, name=f"{value}{len(alpha)}{opacity}{masks}", alpha=alpha, masks=masks)
        for number, path in enumerate(sorted((capture / "images").iterdir())):
            pixels = np.array(Image.open(path))
            pixels[~object_masks(number, *pixels.shape[:2]), :3] = value
            pixels[..., 3:] = opacity
            Image.fromarray(pixels).save(path)
        return build(capture).train_dataset.metadata["measure_background"]()

    opaque = background()
    assert opaque.choice == expected
    # The object, a third of the photo at most, moves the mean towards its own colour.
    assert opaque.mean_rgb == pytest.approx([value / 255] * 3, abs=0.2)
    assert background(alpha=range(8)) == PhotoBackground("random", (0, 0, 0)), "alpha tells what is empty"
    assert background(alpha=range(8), opacity=255) == opaque, "nothing is transparent"
    masked = background(masks=[16] + [0] * 7)
    assert masked.choice == expected, "of the first photo nothing is kept"
    assert masked.mean_rgb == pytest.approx(opaque.mean_rgb, abs=0.05) and masked.mean_rgb != opaque.mean_rgb
    assert "measure_background" not in build(mode="test").train_dataset.metadata


# --- where splats begin ----------------------------------------------------------------------------------------------


@pytest.fixture
def build_cached(build, tmp_path):
    """Builds datamanagers with a cache of their own."""
    return partial(build, features=LiftedFeatureOptions(cache_dir=tmp_path / "cache"))


@pytest.fixture
def seek(monkeypatch) -> list[int]:
    """Stands for stereo, which takes long: finds two points, and notes that it was asked."""
    asked: list[int] = []

    def two_points(outputs: DataparserOutputs, count: int = 9, side_px: int = 9) -> DensePoints:
        asked.append(len(outputs.image_filenames))
        return DensePoints(np.array([[0, 0, 1], [0, 0, 2]], np.float32), np.array([[9, 8, 7]] * 2, np.uint8))

    monkeypatch.setattr("f3rm_ext.data.stereo.points.seek_points", two_points)
    return asked


def test_dense_points_are_sought_once_per_capture(build_cached, seek, log, tmp_path) -> None:
    for _ in range(2):
        metadata = build_cached(stereo_points="auto").train_dataparser_outputs.metadata
        assert metadata["points3D_xyz"].tolist() == [[0, 0, 1], [0, 0, 2]]
        assert metadata["points3D_rgb"].tolist() == [[9, 8, 7]] * 2
    assert len(seek) == 1 and len(list((tmp_path / "cache" / "points").glob("*.ply"))) == 1
    assert sum("2 dense points" in line and "--dense-points never" in line for line in log) == 2
    build_cached(stereo_points="auto", dataparser=CaptureDataParserConfig(scale_factor=0.5))
    assert len(seek) == 2, "other poses are another capture"


def test_dense_points_are_left_out_where_nobody_needs_them(build_cached, seek) -> None:
    for options in ({"stereo_points": "never"}, {"stereo_points": "always", "mode": "test"}):
        assert "points3D_xyz" not in build_cached(**options).train_dataparser_outputs.metadata
    assert not seek


@pytest.mark.parametrize(("mode", "total"), [("never", 4), ("auto", 6), ("always", 6)])
def test_dense_points_fill_up_those_given(build_cached, make_capture, seek, monkeypatch, mode, total) -> None:
    monkeypatch.setattr("f3rm_ext.data.stereo.points.COUNT", 5)
    capture = make_capture()
    own = np.arange(12, dtype=np.float32).reshape(4, 3)
    (capture / "own.ply").write_bytes(encode_ply(DensePoints(own, np.zeros((4, 3), np.uint8))))
    meta = json.loads((capture / "transforms.json").read_text())
    (capture / "transforms.json").write_text(json.dumps(meta | {"ply_file_path": "own.ply"}))
    metadata = build_cached(capture, stereo_points=mode).train_dataparser_outputs.metadata
    assert len(metadata["points3D_xyz"]) == len(metadata["points3D_rgb"]) == total
    assert len(seek) == (mode != "never")
    assert metadata.get("points3D_dense", 0) == total - 4


@pytest.mark.parametrize(
    ("own", "source", "missing"),
    [
        (0, "", 20_000),
        (1_700, "sparse_pc.ply", 18_300),
        (15_000, "sparse_pc.ply", 10_000),
        (168_403, "mesh.ply", 10_000),
        (20_000, "stereo_points.ply", 0),
        (15_000, "stereo_points.ply", 5_000),
    ],
)
def test_a_capture_gets_the_points_that_it_lacks_and_some_everywhere(own: int, source: str, missing: int) -> None:
    assert missing_points({"points3D_xyz": np.zeros((own, 3)), "points3D_source": source}, "auto") == missing


def test_dense_points_need_no_cache(build, seek, log, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    manager = build(stereo_points="auto", features=LiftedFeatureOptions(cache_dir=tmp_path / "file"))
    assert len(manager.train_dataparser_outputs.metadata["points3D_xyz"]) == 2 and len(seek) == 1


def test_a_small_start_ends_at_full_size_and_resumes(build, make_capture) -> None:
    capture = make_capture(sizes=((150, 200),))
    doubled = {"num_downscales": 1, "resolution_schedule": 1}
    manager = build(capture, **doubled)
    manager.setup_train()
    manager.begin_small(100)
    widths = [manager.next_train(step)[1]["image"].shape[1] for step in (0, 29, 30, 59, 60, 99)]
    assert widths == [50, 50, 100, 100, 200, 200]
    resumed = build(capture, **doubled)
    resumed.setup_train()
    resumed.load_cycle_state(manager.cycle_state())
    assert resumed.next_train(30)[1]["image"].shape[1] == 100
    full = build(capture, num_downscales=0)
    full.setup_train()
    full.begin_small(100)
    assert full.next_train(0)[1]["image"].shape[1] == 200

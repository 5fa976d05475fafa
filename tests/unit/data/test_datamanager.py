"""The datamanager over a real capture on the disk."""

import json
from functools import partial

import pytest
import torch
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager
from nerfstudio.data.dataparsers.blender_dataparser import BlenderDataParserConfig
from nerfstudio.data.datasets.base_dataset import InputDataset

from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.features.options import FeatureOptions


@pytest.fixture
def build(build_manager):
    """Builds datamanagers of this kind."""
    return partial(build_manager, F3rmDataManagerConfig)


def test_batches(build):
    manager = build()
    assert isinstance(manager, VanillaDataManager) and issubclass(manager.dataset_type, InputDataset)
    rays, batch = manager.next_train(0)
    assert rays.shape == (48,) and batch["image"].shape == (48, 3) and batch["indices"].shape == (48, 3)
    assert torch.equal(rays.camera_indices[:, 0], batch["indices"][:, 0])
    assert manager.train_count == 1
    rays, batch = manager.next_eval(0)
    assert rays.shape == (20,) and set(batch["indices"][:, 0].tolist()) <= {0, 1}
    assert torch.equal((batch["image"][:, 0] * 255).round().long(), 10 * (batch["indices"][:, 0] + 6))


def test_rays_hit_the_pixels_they_are_named_after(build):
    manager = build()
    rays, batch = manager.next_train(0)
    cameras = manager.train_dataset.cameras
    for i in range(5):
        image, row, column = batch["indices"][i].tolist()
        expected = cameras.generate_rays(image, coords=torch.tensor([row + 0.5, column + 0.5]))
        torch.testing.assert_close(rays.directions[i], expected.directions)
        torch.testing.assert_close(rays.origins[i], expected.origins)


def test_features_are_prepared_for_training_and_handed_to_the_model(build, fake_features):
    manager = build(features=FeatureOptions(), feature_ray_fraction=0.25)
    assert [len(source.dataset) for source in fake_features[0]] == [6, 2]
    assert manager.train_dataset.metadata["feature_specs"] == fake_features[0][0].specs
    assert manager.train_dataset.metadata["feature_ray_fraction"] == 0.25
    _, batch = manager.next_train(0)
    features = batch["features"]["where"]
    assert features.shape == (12, 3)
    assert torch.equal(features[:, 0].long(), batch["indices"][:12, 0])
    _, batch = manager.next_eval(0)
    assert batch["features"]["where"].shape == (5, 3)
    assert len(fake_features) == 1


def test_surfaces_are_measured_in_training(build):
    assert "measure_ray_depths" not in build(mode="test").train_dataset.metadata
    metadata = build().train_dataset.metadata
    depths = metadata["measure_ray_depths"]()
    assert len(depths.views) == len(depths.depths) == 6 and (depths.depths >= 0).all()
    assert metadata["camera_reach"] == pytest.approx(1, rel=1e-5), "the dataparser scales poses"


@pytest.mark.parametrize(("rays", "world", "expected"), [(48, 4, [12] * 4), (10, 4, [3, 3, 2, 2]), (5, 5, [1] * 5)])
def test_a_global_batch_is_divided(rays, world, expected):
    config = F3rmDataManagerConfig(train_num_rays_per_batch=rays)
    assert [config.rays_of_process(world, rank) for rank in range(world)] == expected
    with pytest.raises(ConfigError, match=f"{rays + 1} GPUs"):
        config.rays_of_process(rays + 1, 0)


@pytest.mark.parametrize("world", [2, 3])
def test_the_rays_of_all_processes_are_those_of_one(build, world):
    torch.manual_seed(42)
    whole = build(train_num_rays_per_batch=48)
    managers = []
    for rank in range(world):
        torch.manual_seed(42 + rank)  # as nerfstudio seeds its processes
        managers.append(build(world=world, rank=rank, train_num_rays_per_batch=48))
    for step in range(3):
        expected = whole.next_train(step)[1]
        for rank, manager in enumerate(managers):
            batch = manager.next_train(step)[1]
            for name in ("image", "indices"):
                assert torch.equal(batch[name], expected[name][rank::world]), name
            for name, features in batch.get("features", {}).items():
                assert torch.equal(features, expected["features"][name][rank::world]), name


def test_a_batch_per_device_and_what_is_said_about_it(build, log):
    manager = build(world=4, ray_batch_scope="per-device")
    assert manager.get_train_rays_per_batch() == 48
    assert any("192 rays (4 GPUs x 48)" in line and "2.00 times" in line for line in log)
    log.clear()
    build(world=4)
    assert any("48 rays" in line for line in log)
    log.clear()
    build(world=4, rank=1)
    assert not [line for line in log if "batch" in line or "memory" in line], "only one process talks"


def test_class_attributes_are_left_alone(build):
    before = list(InputDataset.exclude_batch_keys_from_device)
    for _ in range(2):
        manager = build(images_on_gpu=True, masks_on_gpu=True)
        manager.next_train(0)
        assert manager.exclude_batch_keys_from_device == []
    assert InputDataset.exclude_batch_keys_from_device == before


def test_exporters_may_set_the_batch_size(build):
    manager = build(mode="test")
    manager.train_pixel_sampler.num_rays_per_batch = 77
    assert manager.next_train(0)[0].shape == (77,) and manager.get_train_rays_per_batch() == 77


def test_different_sizes_alpha_and_masks_together(build, make_capture, fake_features):
    folder = make_capture(8, sizes=((12, 16), (20, 8), (16, 12)), alpha=(1, 6), masks=4)
    manager = build(folder, features=FeatureOptions())
    _, batch = manager.next_train(0)
    assert batch["image"].shape == (48, 4)
    assert int(batch["indices"][:, 2].min()) >= 4
    index = batch["indices"]
    torch.testing.assert_close((batch["image"][:, :3] * 255).round().long(), index * torch.tensor([10, 1, 1]))
    opaque = index[:, 0] != 1
    assert (batch["image"][opaque, 3] == 1).all() and (batch["image"][~opaque, 3] < 1).all()
    assert torch.equal(batch["features"]["where"][:, 0].long(), index[:24, 0])
    assert [batch["image"].shape for _, batch in manager.fixed_indices_eval_dataloader] == [(12, 16, 4), (20, 8, 3)]


def test_other_dataparsers_are_checked_too(build, make_capture):
    folder = make_capture(3, val=None)
    meta = json.loads((folder / "transforms.json").read_text())
    frames = [{**frame, "file_path": frame["file_path"].removesuffix(".png")} for frame in meta["frames"]]
    frames[1]["transform_matrix"][0][0] += 0.5
    for split in ("train", "val", "test"):
        (folder / f"transforms_{split}.json").write_text(json.dumps({"camera_angle_x": 0.7, "frames": frames}))
    with pytest.raises(CaptureError, match=r"001\.png"):
        build(folder, dataparser=BlenderDataParserConfig())
    frames[1]["transform_matrix"][0][0] -= 0.5
    for split in ("train", "test"):
        (folder / f"transforms_{split}.json").write_text(json.dumps({"camera_angle_x": 0.7, "frames": frames}))
    (folder / "transforms_val.json").unlink()
    manager = build(folder, dataparser=BlenderDataParserConfig())
    assert manager.eval_dataset is None
    manager.next_train(0)


def test_memory_options_name_what_can_be_lowered(build):
    def names(**options):
        return {option.name.rsplit(".", 1)[1]: option.lower for option in build(**options).memory_options()}

    scale = {"camera-res-scale-factor": 0.5}
    assert names(train_num_images_to_sample_from=1) == scale
    repeat = "--pipeline.datamanager.train-num-times-to-repeat-images"
    assert names() == {"train-num-images-to-sample-from": f"3 {repeat} 100"} | scale
    window = {"train_num_images_to_sample_from": 2, "train_num_times_to_repeat_images": 7}
    lower = {"train-num-images-to-sample-from": f"1 {repeat} 7", "train-num-rays-per-batch": 150} | scale
    assert names(**window, train_num_rays_per_batch=300) == lower


def test_every_process_decides_for_its_gpu_and_the_first_says_so(build, monkeypatch, log):
    monkeypatch.setattr("f3rm_ext.data.placement.free_memory", lambda device: 1 << 30)
    manager = build()
    assert manager.make_placement("images_on_gpu", wanted=True, off="False") is None
    for rank in range(2):
        manager.device, manager.rank = f"cuda:{rank}", rank
        placement = manager.make_placement("images_on_gpu", wanted=True, off="False")
        assert placement.device == torch.device("cuda", rank) and placement.decide(1 << 20)
    assert len([line for line in log if "1.0 MiB on the GPU" in line]) == 1


# --- masked pixels ---------------------------------------------------------------------------------------------------


def test_masked_pixels_may_be_trained_as_background(build, make_capture, fake_features):
    folder = make_capture(8, masks=4, alpha=(1,))
    manager = build(folder, features=FeatureOptions(), masked_pixels="background", train_num_rays_per_batch=400)
    assert manager.train_dataset.metadata["masked_pixels"] == "background"
    _, batch = manager.next_train(0)
    columns, alpha = batch["indices"][:, 2], batch["image"][:, 3]
    assert batch["kept"].shape == (400, 1) and torch.equal(batch["kept"][:, 0], columns >= 4)
    assert set(columns.tolist()) == set(range(16)) - {3}, "all pixels are drawn, but those beside what is kept"
    assert not alpha[columns < 4].any()
    own = batch["indices"][:, 0] == 1
    assert (alpha[(columns >= 4) & ~own] == 1).all()
    torch.testing.assert_close(alpha[(columns >= 4) & own], torch.full((int(((columns >= 4) & own).sum()),), 128 / 255))
    # Evaluation stays with what masks keep.
    _, batch = manager.next_eval(0)
    assert int(batch["indices"][:, 2].min()) >= 4 and "kept" not in batch
    # The window can be another one of the same images.
    assert all("mask" in batch for _, batch in manager.fixed_indices_eval_dataloader)


def test_masks_that_are_gone_are_no_error_in_inference(build, make_capture, object_masks):
    folder = make_capture(8, masks=object_masks)
    for file in (folder / "masks").iterdir():
        file.unlink()
    assert build(folder, mode="inference").masked_pixels == "ignore"

"""What the datamanagers of rays and of whole images share, over a real capture on the disk."""

import json
import math
import pickle
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import tyro
import yaml
from nerfstudio.engine.callbacks import TrainingCallbackLocation
from nerfstudio.utils import writer

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.data import cycling_config
from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.image_datamanager import ImageDataManagerConfig, LiftedFeatureOptions
from f3rm_ext.data.image_stream import ImageStream
from f3rm_ext.data.ray_stream import PixelStream
from f3rm_ext.errors import CaptureError, ConfigError, WeightsNotFoundError
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.memory.options import QualityImpact
from f3rm_ext.planning.request import CaptureSizes
from f3rm_ext.planning.traced_run import CachedImages

KINDS = {"rays": F3rmDataManagerConfig, "images": ImageDataManagerConfig}
RAYS = {"rays": 48, "images": 192}
"""Rays of a step."""
KEEP_RIGHT = [4] * 6 + [99, 4]
"""Masks that keep all columns but the first four; nothing of image 6."""


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def build(build_manager, kind):
    return partial(build_manager, KINDS[kind])


@pytest.fixture
def features(kind):
    """Options of 2D features."""
    return partial(FeatureOptions if kind == "rays" else LiftedFeatureOptions, extractors=("clip",))


def test_nothing_is_loaded_before_the_first_step(build, kind, watch_calls):
    loads = watch_calls(PixelStream if kind == "rays" else ImageStream, "_load")
    for mode in ("val", "test", "inference"):
        build(mode=mode)
    assert not loads
    build(train_num_images_to_sample_from=2, train_num_times_to_repeat_images=3).next_train(0)
    assert len(loads[0].result.images) == 2


def test_eval_images(build):
    manager = build()
    loader = manager.fixed_indices_eval_dataloader
    assert len(loader) == 2
    for _ in range(2):  # it can be gone through again
        seen = []
        for camera, batch in loader:
            seen.append(batch["image_idx"])
            assert camera.shape == (1,) and batch["camera"] is camera
            assert batch["image"].shape == (12, 16, 3) and batch["image"].dtype == torch.float32
        assert seen == [0, 1]
    assert {manager.next_eval_image(0)[1]["image_idx"] for _ in range(30)} == {0, 1}
    assert loader.get_camera(image_idx=1)[0].shape == (1,)


@pytest.mark.parametrize("options", [{"val": ()}, {"val": None}])
def test_training_without_evaluation_images(build, kind, make_capture, options, log):
    folder = make_capture(5, **options)
    manager = build(folder, dataparser=CaptureDataParserConfig(train_split_fraction=1.0))
    assert manager.eval_dataset is None and len(manager.train_dataset) == 5
    assert any("held out" in line for line in log)
    manager.next_train(0)
    assert len(manager.fixed_indices_eval_dataloader) == 0 == len(list(manager.fixed_indices_eval_dataloader))
    assert manager.get_eval_rays_per_batch() == (20 if kind == "rays" else 0)
    manager.load_cycle_state(manager.cycle_state())
    with pytest.raises(CaptureError):
        manager.next_eval_image(0)
    evaluating = build(folder, mode="test", dataparser=CaptureDataParserConfig(train_split_fraction=1.0))
    with pytest.raises(CaptureError, match="test_filenames"):
        list(evaluating.fixed_indices_eval_dataloader)


def test_inference_touches_neither_images_nor_features(build, features, make_capture, fake_features):
    folder = make_capture(extra={"k1": -0.1})
    for path in (folder / "images").iterdir():
        path.unlink()
    manager = build(folder, mode="inference", features=features())
    assert len(manager.train_dataset) == 6 and len(manager.eval_dataset) == 2 and manager.get_train_rays_per_batch() > 0
    assert manager.train_feature_source() is None is manager.eval_feature_source() and not fake_features


def test_training_prepares_features_before_the_first_step(build, features, fake_features):
    manager = build(features=features())
    assert [len(source.dataset) for source in fake_features[0]] == [6, 2]
    assert manager.train_feature_source() is fake_features[0][0] and len(fake_features) == 1


def test_without_extractors_there_are_no_features(build, fake_features):
    manager = build()
    assert manager.train_dataset.metadata.get("feature_specs", ()) == () and manager.train_feature_source() is None
    assert "features" not in manager.next_train(0)[1]
    assert "feature_maps" not in manager.next_eval_image(0)[1] and not fake_features


@pytest.mark.parametrize(("codes", "prepared"), [(0, [2]), (8, [6, 2])])
def test_evaluation_prepares_features_when_first_needed(build, features, fake_features, codes, prepared):
    """PCA codes have the basis of the training images."""
    manager = build(mode="test", features=features(codes=codes))
    assert not fake_features and "feature_specs" not in manager.train_dataset.metadata
    assert "features" not in manager.next_train(0)[1], "exports need no features"
    batches = [batch for _, batch in manager.fixed_indices_eval_dataloader]
    assert [batch["feature_maps"]["where"].values[0, 0, 0] for batch in batches] == [0, 1]
    assert [[len(source.dataset) for source in call] for call in fake_features] == [prepared]


@pytest.mark.parametrize("options", [{}, {"train_num_images_to_sample_from": 4, "train_num_times_to_repeat_images": 3}])
def test_resume_goes_on_with_the_same_batches(build, tmp_path, options):
    manager = build(**options)
    for step in range(5):
        manager.next_train(step)
    manager.next_eval(0)
    torch.save(manager.cycle_state(), tmp_path / "state.pt")
    torch.manual_seed(1234)
    resumed = build(**options)
    resumed.load_cycle_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for draw in [lambda m, step=step: m.next_train(step) for step in range(5, 25)] + 12 * [lambda m: m.next_eval(0)]:
        expected, again = draw(manager)[1], draw(resumed)[1]
        assert expected.keys() == again.keys() and torch.equal(again["image"], expected["image"])
    images = [[m.next_eval_image(0)[1]["image_idx"] for _ in range(12)] for m in (manager, resumed)]
    assert images[0] == images[1] and len(set(images[0])) == 2


def test_a_capture_that_does_not_fit_into_memory_comes_in_parts(build, kind, monkeypatch):
    """Windows of images for splats; for fields some pixels of all images, unless those were too few."""
    largest = 3 * 12 * 16
    whole, thin = (6, 1, None), (6, 2, None)
    cases = [
        (2 * 6 * largest, whole, whole),
        (2 * 6 * largest - 1, (1, 1, 2), thin),
        (largest, (1, 1, 2), (6, 5, None)),
    ]
    cases.append((largest // 99, (1, 1, 2), (1, 1, 10)))
    for memory, of_images, of_rays in cases:
        monkeypatch.setattr(cycling_config, "total_bytes", lambda device, memory=memory: memory)
        manager = build()
        assert int(manager.train_dataset.cameras.height[0] * manager.train_dataset.cameras.width[0]) * 3 == largest
        window, stride, repeat = of_rays if kind == "rays" else of_images
        stream, config = manager.streams()["train"], manager.config
        capture = CaptureSizes(train_images=6, eval_images=2, width_px=16, height_px=12)
        planned = CachedImages.from_split(config, "train", 6, capture)
        assert (stream.cycle.window_size, getattr(stream, "stride", 1), stream.cycle.repeat) == (window, stride, repeat)
        assert planned.changes == stream.cycle.changes == (window < 6)
        assert planned.images == window * largest // stride**2
        lowered = [option.lower for option in manager.memory_options() if "sample-from" in option.name]
        assert lowered == (
            ["3 --pipeline.datamanager.train-num-times-to-repeat-images 100"] if (window, stride) == (6, 1) else []
        )
    for step in range(60):
        manager.next_train(step)
    assert manager.streams()["train"].coverage.appearances.tolist() == [5 if kind == "images" else 1] * 6
    chosen = build(train_num_images_to_sample_from=3, train_num_times_to_repeat_images=2).streams()["train"].cycle
    assert (chosen.window_size, chosen.repeat) == (3, 2)


def test_some_pixels_of_all_images_are_those_of_the_images(build_manager, monkeypatch):
    """From another place in each image, first of a few images; the same after a resume."""
    every = build_manager(F3rmDataManagerConfig)
    monkeypatch.setattr(cycling_config, "total_bytes", lambda device: 3 * 12 * 16)
    monkeypatch.setattr(cycling_config, "START", (2, 5))
    manager, resumed = build_manager(F3rmDataManagerConfig), build_manager(F3rmDataManagerConfig)
    places: dict[int, set[tuple[int, int]]] = {}
    for step in range(20):
        if step in (3, 12):
            resumed.load_cycle_state(manager.cycle_state())
        batch = manager.next_train(step)[1]
        if step >= 3:
            again = resumed.next_train(step)[1]
            assert torch.equal(batch["image"], again["image"]) and torch.equal(batch["indices"], again["indices"])
        for (image, row, column), color in zip(batch["indices"].tolist(), batch["image"], strict=True):
            places.setdefault(image, set()).add((row % 5, column % 5))
            whole = every.train_dataset.get_numpy_image(image)
            assert (color * 255).round().int().tolist() == whole[row, column].tolist()
        assert len(places) == (2 if step < 5 else 6)
    assert all(len(firsts) == 1 for firsts in places.values()) and len(set.union(*places.values())) > 1


def test_command_line(kind):
    arguments = ["--train-num-images-to-sample-from", "inf", "--train-num-times-to-repeat-images", "512"]
    arguments += ["--resolution-scale", "0.25", "f3rm-ext-data", "--drop-missing-frames", "True"]
    parsed = tyro.cli(KINDS[kind], args=arguments, config=(tyro.conf.FlagConversionOff,))
    assert (parsed.train_num_images_to_sample_from, parsed.train_num_times_to_repeat_images) == (math.inf, 512)
    assert parsed.camera_res_scale_factor == 0.25 and parsed.dataparser.drop_missing_frames is True


@pytest.mark.parametrize(("limit_px", "scale"), [(8, 0.5), (16, 1.0), (100, 1.0)])
def test_large_images_are_reduced(build, monkeypatch, log, limit_px, scale):
    monkeypatch.setattr(cycling_config, "AUTO_PX", limit_px)
    manager = build(camera_res_scale_factor="auto")
    assert int(manager.train_dataset.cameras.width[0]) == int(manager.eval_dataset.cameras.width[0]) == 16 * scale
    assert manager.config.camera_res_scale_factor == manager.choices["camera_res_scale_factor"] == scale
    assert any("--resolution-scale" in line for line in log) == (scale < 1)


def test_relative_paths(build, make_capture, monkeypatch):
    folder = make_capture()
    monkeypatch.chdir(folder.parent)
    build(Path(folder.name)).next_train(0)


def test_state_of_other_images_starts_anew(build, make_capture, log):
    state = build().cycle_state()
    manager = build(make_capture(5, name="other", val=(4,)))
    manager.load_cycle_state(state)
    assert any("train images have changed" in line for line in log)
    manager.next_train(0)
    manager.load_cycle_state({})
    manager.load_cycle_state({"version": 99})
    assert any("version" in line for line in log)


def test_no_parameters_no_buffers_in_the_checkpoint(build):
    manager = build()
    manager.next_train(0)
    manager.next_eval_image(0)
    assert not list(manager.parameters()) and not manager.state_dict() and manager.get_param_groups() == {}
    assert manager.to("cpu") is manager and manager.get_datapath().is_dir()


def test_setup_may_be_switched_off(build, kind, monkeypatch):
    """nerfstudio's dataset renderer replaces both setup methods."""
    for name in ("setup_train", "setup_eval"):
        monkeypatch.setattr(KINDS[kind]()._target, name, lambda self: None)
    manager = build(mode="test")
    assert len(manager.eval_dataset) == 2 and manager.get_train_rays_per_batch() == RAYS[kind]
    assert manager.cycle_state()["version"] == 1


@pytest.mark.parametrize(
    ("kinds", "option", "values"),
    [
        (KINDS, "train_num_images_to_sample_from", (0, -2)),
        (KINDS, "train_num_times_to_repeat_images", (0, 2.5)),
        (KINDS, "camera_res_scale_factor", (0.0, 1.5)),
        (KINDS, "steps_per_coverage", (0,)),
        (["rays"], "eval_num_images_to_sample_from", (-2,)),
        (["rays"], "eval_num_times_to_repeat_images", (2.5,)),
        (["rays"], "train_num_rays_per_batch", (0,)),
        (["rays"], "eval_num_rays_per_batch", (-4,)),
        (["rays"], "feature_ray_fraction", (0.0, 1.1)),
        (["rays"], "patch_size", (2,)),
        (["images"], "num_downscales", (-1, 9)),
        (["images"], "resolution_schedule", (0,)),
    ],
)
def test_options_that_cannot_work(kinds, option, values):
    for kind in kinds:
        for value in values:
            with pytest.raises(ConfigError, match=f"{option.replace('_', '[-_]')}.*{value:g}"):
                KINDS[kind](**{option: value})


@pytest.mark.parametrize(("window", "said"), [(7, True), (6, False), (-1, False)])
def test_a_window_larger_than_the_capture_is_all_images_and_says_so(build, capsys, window, said):
    manager = build(train_num_images_to_sample_from=window, train_num_times_to_repeat_images=1)
    for step in range(6):
        manager.next_train(step)
    seen = manager.streams()["train"].coverage.summary()
    assert seen["images_seen"] == 6 and seen["appearances_max"] == 1
    lines = " ".join(capsys.readouterr().out.split())
    assert ("train-num-images-to-sample-from is 7, but there are 6 training images" in lines) is said
    assert "All 6 training images are kept in memory" in lines


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("rays", {"ray_batch_scope": "per-device", "features": FeatureOptions(("dino",), Path("cache"), 64)}),
        ("images", {"num_downscales": 1}),
    ],
)
def test_config_survives_yaml_and_pickle(make_capture, kind, more):
    config = KINDS[kind](
        data=make_capture(),
        train_num_images_to_sample_from=math.inf,
        dataparser=CaptureDataParserConfig(drop_missing_frames=True),
        **more,
    )
    again = yaml.load(yaml.dump(config), Loader=yaml.Loader)
    unpickled = pickle.loads(pickle.dumps(again))
    assert again == config and again._target is unpickled._target is config._target
    assert unpickled.dataparser == config.dataparser


def test_coverage_is_logged_and_written_and_the_thread_ends(build, kind, tmp_path, monkeypatch, log, run_callbacks):
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    threads = set(threading.enumerate())
    manager = build(train_num_images_to_sample_from=2, train_num_times_to_repeat_images=2, steps_per_coverage=4)
    for step in range(6):
        manager.next_train(step)
        run_callbacks(manager, tmp_path, TrainingCallbackLocation.AFTER_TRAIN_ITERATION, step)
    events = [event for event in writer.EVENT_STORAGE if event["name"] == "Coverage"]
    assert [event["step"] for event in events] == [0, 4] and events[-1]["event"]["rays"] == 5 * RAYS[kind]
    assert json.loads((tmp_path / "coverage.json").read_text())["step"] == 4
    run_callbacks(manager, tmp_path, TrainingCallbackLocation.AFTER_TRAIN, 5)
    record = json.loads((tmp_path / "coverage.json").read_text())
    assert record["step"] == 5 and record["images_seen"] == 6 and record["appearances_min"] == 1
    assert record["effective_epochs"] == pytest.approx(6 * RAYS[kind] / (6 * 12 * 16))
    assert sum(image["rays"] for image in record["per_image"]) == 6 * RAYS[kind]
    assert any("6 of 6 images seen" in line for line in log)
    assert set(threading.enumerate()) <= threads
    manager.next_train(6)  # and it could go on


def test_training_survives_a_run_folder_that_cannot_be_written(build, tmp_path, fill_disk, log, run_callbacks):
    manager = build()
    manager.next_train(0)
    fill_disk()
    run_callbacks(manager, tmp_path, TrainingCallbackLocation.AFTER_TRAIN_ITERATION, 0)
    assert any("coverage.json" in line and "No space left" in line for line in log)


@pytest.mark.usefixtures("on_device")
def test_images_on_the_gpu_leave_it_first(build, kind, log):
    """The first thing to do where memory runs out: it costs nothing but speed."""
    option, on, off = ("images_on_gpu", True, False) if kind == "rays" else ("cache_images", "gpu", "cpu")
    flag = "pipeline.datamanager." + option.replace("_", "-")
    for value in (on, off):
        manager = build(**{option: value})
        if kind == "rays":
            assert manager.memory_options()[0].quality_impact > QualityImpact.NONE, "nothing was decided yet"
        manager.next_train(0)
        first = min(manager.memory_options(), key=lambda option: option.quality_impact)
        assert (first == (QualityImpact.NONE, flag, str(on), str(off))) is (value == on)
        said = "25% of its 1.0 GiB" if value == on else f"in main memory (--{flag} {off})"
        assert said in log[-1]


def test_evaluation_goes_on_without_weights_and_training_does_not(build, features, monkeypatch, log):
    def fail(*args, **options):
        raise WeightsNotFoundError("no weights here")

    monkeypatch.setattr("f3rm_ext.features.source.prepare_features", fail)
    manager = build(mode="test", features=features())
    assert all("feature_maps" not in batch for _, batch in manager.fixed_indices_eval_dataloader)
    assert len([line for line in log if "no weights here" in line]) == 1
    with pytest.raises(WeightsNotFoundError):
        build(features=features())


# --- masked pixels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["val", "test", "inference"])
def test_masked_pixels_of_an_object_are_background_by_default(build, make_capture, object_masks, mode):
    manager = build(make_capture(8, masks=object_masks), mode=mode)
    assert manager.masked_pixels == manager.train_dataset.metadata["masked_pixels"] == "background"
    assert manager.choices == ({"masked_pixels": "background"} if mode == "val" else {})
    if mode == "val":
        assert 0 < float(manager.next_train(0)[1]["kept"].float().mean()) < 1
    given = build(make_capture(8, masks=object_masks, name="other"), masked_pixels="ignore")
    assert given.masked_pixels == "ignore" and not given.choices


def test_masked_pixels_are_ignored_by_default(build, kind, make_capture):
    manager = build(make_capture(8, masks=KEEP_RIGHT))
    _, batch = manager.next_train(0)
    assert batch["image"].shape[-1] == 3 and "kept" not in batch and "alpha" not in batch
    assert int(batch["indices"][:, 2].min()) >= 4 if kind == "rays" else "mask" in batch
    assert manager.train_dataset.metadata["masked_pixels"] == "ignore"


@pytest.mark.parametrize("mode", ["val", "test", "inference"])
def test_background_needs_masks_in_training(build, mode):
    if mode == "val":
        with pytest.raises(ConfigError, match="masked-pixels"):
            build(masked_pixels="background", mode=mode)
    else:
        manager = build(masked_pixels="background", mode=mode)
        assert manager.train_dataset.metadata["masked_pixels"] == "background"


def test_images_of_which_nothing_is_kept_are_not_measured(build, make_capture, log):
    manager = build(make_capture(8, masks=KEEP_RIGHT), mode="test")
    log.clear()
    assert [batch["image_idx"] for _, batch in manager.fixed_indices_eval_dataloader] == [1]
    assert len(log) == 1 and "1 of 2" in log[0]
    nothing = build(make_capture(8, masks=[0] * 6 + [99] * 2, name="none"), mode="test")
    with pytest.raises(CaptureError, match="mask_path"):
        list(nothing.fixed_indices_eval_dataloader)


def test_evaluation_images_that_are_trained_on_are_named(build, make_capture, log):
    names = [f"images/{i:03d}.png" for i in range(6)]
    lists = {"train_filenames": names[:5], "val_filenames": [f"./{name}" for name in names[3:]]}
    folder = make_capture(6, val=None, extra=lists)
    build(folder)
    assert [line for line in log if "2 of 3 evaluation images" in line and "003.png, 004.png)" in line]
    log.clear()
    build(make_capture(name="apart"))
    assert not any("training images too" in line for line in log)

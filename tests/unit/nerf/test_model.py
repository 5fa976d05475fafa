"""The model: outputs, losses, where gradients go, and evaluation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.engine.callbacks import TrainingCallbackAttributes, TrainingCallbackLocation

from f3rm_ext.data.background import Background, PhotoBackground
from f3rm_ext.data.stereo.surfaces import RayDepths
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.nerf import feature_metrics as evaluation
from f3rm_ext.nerf.fields import GridOptions, render_normals
from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig

MakeModel = Callable[..., F3rmModel]
MakeRays = Callable[[int], RayBundle]
MakeSpec = Callable[..., FeatureSpec]


@pytest.fixture
def camera() -> Cameras:
    pose = torch.eye(4)[None, :3]
    pose[0, 2, 3] = 0.8
    return Cameras(pose, fx=20.0, fy=20.0, cx=10.0, cy=6.0, width=20, height=12)


def _losses(model: F3rmModel, rays: RayBundle, features: dict[str, torch.Tensor]) -> dict[str, Any]:
    outputs = model(rays)
    batch = {"image": torch.rand(len(rays), 3), "features": features}
    return model.get_loss_dict(outputs, batch, model.get_metrics_dict(outputs, batch))


def test_density_is_that_in_the_middle_of_samples(make_model: MakeModel, make_rays: MakeRays) -> None:
    model = make_model(())
    outputs = model(make_rays(5))
    samples = outputs["ray_samples_list"][-1]
    density, _ = model.field.density(samples.frustums.get_positions())
    torch.testing.assert_close(outputs["weights_list"][-1], samples.get_weights(density))


@pytest.mark.parametrize("training", [True, False])
def test_rays_start_at_the_near_plane(make_model: MakeModel, make_rays: MakeRays, training: bool) -> None:
    rays = make_rays(5)
    make_model(()).train(training)(rays)
    assert rays.nears is not None and (rays.nears == 0.05).all(), "of what is nearer, training knows nothing"


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 10), (0.5, 5), (0.25, 3), (0.1, 1)])
def test_training_renders_features_for_the_first_rays_only(
    make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec, fraction: float, count: int
) -> None:
    outputs = make_model((make_spec("a", 12),), fraction=fraction)(make_rays(10))
    assert outputs["features"]["a"].shape == (count, 12)
    assert outputs["rgb"].shape == (10, 3) and outputs["depth"].shape == (10, 1)


def _run_callbacks(model: F3rmModel, step: int, location: TrainingCallbackLocation) -> None:
    nothing: Any = None
    for callback in model.get_training_callbacks(TrainingCallbackAttributes(nothing, nothing, nothing, nothing)):
        callback.run_callback_at_location(step, location)


def test_each_head_has_its_loss(make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec) -> None:
    model = make_model((make_spec("a", 12), make_spec("b", 4)))
    losses = _losses(model, make_rays(8), {"a": torch.randn(4, 12), "b": torch.randn(4, 4)})
    expected = {"rgb_loss", "interlevel_loss", "distortion_loss", "feature_loss_a", "feature_loss_b"}
    assert set(losses) == expected | {"camera_opt_regularizer"}


@pytest.mark.parametrize("detach", [True, False])
def test_detached_weights_keep_features_from_shaping_density(
    make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec, detach: bool
) -> None:
    model = make_model((make_spec("a"),), fraction=1.0, detach_weights=detach)
    losses = _losses(model, make_rays(16), {"a": torch.randn(16, 12)})
    losses["feature_loss_a"].backward()
    shaped = any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.field.parameters())
    assert shaped is not detach
    assert model.feature_field.grid.table.grad is not None


def test_camera_optimiser_is_applied(make_model: MakeModel, make_rays: MakeRays) -> None:
    model = make_model()
    torch.nn.init.normal_(model.field.grid.table)
    (_losses(model, make_rays(32), {})["rgb_loss"]).backward()
    gradient = model.camera_optimizer.pose_adjustment.grad
    assert gradient is not None and gradient.abs().sum() > 0
    before = model(make_rays(32))["rgb"]
    with torch.no_grad():
        model.camera_optimizer.pose_adjustment.add_(0.3)
    assert not torch.allclose(model(make_rays(32))["rgb"], before)
    model.eval()
    with torch.no_grad():
        moved = model(make_rays(32))["rgb"]
        model.camera_optimizer.pose_adjustment.zero_()
        torch.testing.assert_close(model(make_rays(32))["rgb"], moved)


def test_exposures_belong_to_photos_and_not_to_the_scene(make_model: MakeModel, make_rays: MakeRays) -> None:
    model = make_model(exposure="on", camera_optimizer=CameraOptimizerConfig(mode="off"))
    assert model.exposures is not None and model.get_param_groups()["exposure"] == [model.exposures.stops]
    _losses(model, make_rays(40), {})["rgb_loss"].backward()
    gradient = model.exposures.stops.grad
    assert gradient is not None and (gradient.abs().sum(dim=1) > 0).all()
    rays = make_rays(40)
    model.eval()
    with torch.no_grad():
        scene = model(rays)["rgb"]
        model.exposures.stops[:2] += 1
        torch.testing.assert_close(model(make_rays(40))["rgb"], scene, atol=0, rtol=0)
    model.train()
    torch.manual_seed(0)
    shown = model(make_rays(40))["rgb"]
    model.exposures.stops.data.zero_()
    torch.manual_seed(0)
    plain = model(make_rays(40))["rgb"]
    bright = rays.camera_indices[:, 0] < 2
    assert (shown[bright] > plain[bright]).all()
    torch.testing.assert_close(shown[~bright], plain[~bright])


@pytest.mark.parametrize("color", [None, "random", "white", "black"])
def test_background_and_initial_density_go_with_the_photos(make_model: MakeModel, color: Background | None) -> None:
    metadata = {"camera_reach": 4.0, "measure_background": lambda: PhotoBackground(color)}
    model = make_model(init_density="auto", metadata=metadata)
    background, density = color or "last_sample", 0.01 if color in ("white", "black") else 0.25
    assert model.choices == {"background_color": background, "init_density": density}
    assert model.renderer_rgb.background_color == background
    assert {field.init_density for field in (model.field, *model.proposal_networks)} == {density}
    metadata |= {"measure_reach_factor": lambda: 5.0}
    larger = make_model(init_density="auto", contraction_radius="auto", metadata=metadata)
    assert larger.choices["contraction_radius"] == larger.field.cube.radius == 5
    assert larger.choices["init_density"] == (density if density == 0.01 else density / 5)
    assert larger.proposal_sampler.initial_sampler.spacing_fn(torch.tensor(5.0)) == 0.5
    unknown = make_model(init_density="auto").choices
    assert unknown == {"background_color": "last_sample", "init_density": 1}, "outside of training"


def test_light_is_drawn_to_the_surfaces_that_stereo_finds_less_and_less(
    make_model: MakeModel, make_rays: MakeRays
) -> None:
    searches = []

    def measure() -> RayDepths:
        searches.append(1)
        return RayDepths(torch.eye(3).expand(5, 3, 3), torch.zeros(5), torch.ones(1, 1, 1))

    model = make_model(depth_loss_mult=0.5, depth_loss_steps=10, metadata={"measure_ray_depths": measure})
    model.train()
    weights = []
    for step in (0, 5, 9):
        _run_callbacks(model, step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
        assert "depth_loss" in _losses(model, make_rays(40), {})
        weights.append(model.depth_supervision.weight)
    assert weights == pytest.approx([0.5, 0.25, 0.05]) and len(searches) == 1
    _run_callbacks(model, 10, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
    assert "depth_loss" not in _losses(model, make_rays(40), {}) and model.depth_supervision.depths is None
    late = make_model(depth_loss_mult=0.5, depth_loss_steps=10, metadata={"measure_ray_depths": measure})
    _run_callbacks(late, 12, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
    assert len(searches) == 1, "a run that goes on later does not search"
    off = make_model(metadata={"measure_ray_depths": measure})
    _run_callbacks(off, 0, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
    assert off.depth_supervision.depths is None and len(searches) == 1


def test_exposures_have_mean_zero_after_each_step(make_model: MakeModel) -> None:
    model = make_model(exposure="on")
    assert model.exposures is not None
    model.exposures.stops.data += torch.arange(5.0)[:, None]
    _run_callbacks(model, 0, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
    assert model.exposures.stops.mean(dim=0).abs().max() < 1e-6 and model.exposures.stops[4, 0] == 2


def test_held_out_photos_are_judged_at_their_exposure(make_model: MakeModel, camera: Cameras) -> None:
    stops = [-2.0, -1.0, 0.0, 1.0, 2.0]
    model = make_model(exposure="auto", metadata={"exif_stops": stops}).eval()
    assert model.choices == {"exposure": "on", "background_color": "last_sample"} and model.exposures is not None
    outputs = model.get_outputs_for_camera(camera)
    photo = model.exposures(outputs["rgb"], 1).detach()
    metrics, images = model.get_image_metrics_and_images(outputs, {"image": photo, "exif_stops": -1.0})
    assert metrics["psnr"] > 60 > metrics["psnr_at_mean_exposure"] and metrics["exposure_from_exif"] == 1
    torch.testing.assert_close(images["img"][:, :20], images["img"][:, 20:], atol=1e-3, rtol=0)
    fitted, _ = model.get_image_metrics_and_images(outputs, {"image": photo})
    assert fitted["exposure_from_exif"] == 0 and fitted["psnr"] > 40


def test_pruned_features_approach_the_full_ones(
    make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec
) -> None:
    rays = make_rays(16)
    full = make_model((make_spec("a"),), num_samples=6).eval()
    pruned = make_model((make_spec("a"),), num_samples=6, feature_samples_per_ray=6).eval()
    few = make_model((make_spec("a"),), num_samples=6, feature_samples_per_ray=5).eval()
    with torch.no_grad():
        wanted = full.render_features(rays)["a"]
        torch.testing.assert_close(pruned.render_features(rays)["a"], wanted)
        assert torch.nn.functional.cosine_similarity(few.render_features(rays)["a"], wanted).min() > 0.5


@pytest.mark.parametrize("output_features", [True, False])
def test_image_outputs_suit_the_viewer(
    make_model: MakeModel, make_spec: MakeSpec, camera: Cameras, output_features: bool
) -> None:
    images = []
    for chunk in (50, 1000):
        options = {"eval_num_rays_per_chunk": chunk, "output_features": output_features}
        model = make_model((make_spec("a", 12), make_spec("b", 4)), **options).eval()
        images.append(model.get_outputs_for_camera(camera))
    for name, value in images[0].items():
        torch.testing.assert_close(value, images[1][name])
        assert value.shape[:2] == (12, 20) and value.is_floating_point()
        assert value.shape[2] == {"feature": 12, "feature_b": 4}.get(name, value.shape[2] if value.shape[2] == 3 else 1)
    outputs = images[0]
    assert {"rgb", "depth", "accumulation", "feature_pca", "feature_pca_b"} <= set(outputs)
    assert ("feature" in outputs) == output_features
    assert 0.0 <= float(outputs["feature_pca"].min()) and float(outputs["feature_pca"].max()) <= 1.0
    outputs["depth"].div_(2.0)  # ns-render does so to raw depth: not an inference tensor


def test_normals_are_unit_vectors_mapped_to_colors(make_model: MakeModel, camera: Cameras) -> None:
    model = make_model(render_normals=True).eval()
    torch.nn.init.normal_(model.field.grid.table)
    normals = model.get_outputs_for_camera(camera)["normals"] * 2 - 1
    torch.testing.assert_close(normals.norm(dim=-1), torch.ones(12, 20), atol=1e-4, rtol=0)


def test_normals_are_weighted_means_of_the_directions_in_which_density_falls(make_model: MakeModel) -> None:
    field = make_model().eval().field
    torch.nn.init.normal_(field.grid.table)
    positions, weights = (torch.rand(4, 3, 3) - 0.5).requires_grad_(), torch.rand(4, 3, 1)
    (gradient,) = torch.autograd.grad(field.density(positions)[0].log().sum(), positions)
    mean = (weights * -torch.nn.functional.normalize(gradient, dim=-1)).sum(dim=1)
    expected = torch.nn.functional.normalize(mean, dim=-1)
    torch.testing.assert_close(render_normals(field, positions, weights) * 2 - 1, expected, atol=1e-4, rtol=1e-3)


def test_a_failing_output_is_dropped(
    make_model: MakeModel, make_spec: MakeSpec, camera: Cameras, capsys: pytest.CaptureFixture
) -> None:
    model = make_model((make_spec("a"),), eval_num_rays_per_chunk=50).eval()
    model.feature_field.head("a").display_components = torch.zeros(3, 5)
    outputs = model.get_outputs_for_camera(camera)
    assert "feature_pca" not in outputs and "rgb" in outputs
    assert capsys.readouterr().out.count("feature_pca") == 1


def test_only_the_viewer_gets_a_black_image(
    make_model: MakeModel, camera: Cameras, as_viewer_thread: Callable[[], None]
) -> None:
    model = make_model().eval()
    model.field.grid.table = torch.nn.Parameter(torch.zeros(len(model.field.grid.table), 7))
    with pytest.raises(RuntimeError, match="mat1"):
        model.get_outputs_for_camera(camera)
    as_viewer_thread()
    outputs = model.get_outputs_for_camera(camera)
    assert outputs["rgb"].shape == (12, 20, 3) and not outputs["rgb"].any()
    assert outputs["depth"].shape == (12, 20, 1)


def _feature_map(values: np.ndarray, height: int = 12, width: int = 20) -> FeatureMap:
    rows, cols = values.shape[:2]
    return FeatureMap(values.astype(np.float16), PatchGrid.covering(rows, cols, height, width))


def test_feature_metrics_compare_at_patch_centres(make_model: MakeModel, make_spec: MakeSpec, camera: Cameras) -> None:
    model = make_model((make_spec("a", 12),), output_features=True, eval_num_rays_per_chunk=16).eval()
    # 4×4 px patches: centres lie between pixels, so compare with what the field itself renders there.
    grid = PatchGrid.covering(3, 5, 12, 20)
    rendered = evaluation.render_pixels(model, camera, torch.from_numpy(grid.centres_px()).flatten(0, 1))["a"]
    same = rendered.view(3, 5, 12).numpy()
    batch = {"camera": camera, "feature_maps": {"a": _feature_map(same)}}
    metrics = evaluation.feature_metrics(model, batch)
    assert metrics["feature_cosine_a"] == pytest.approx(1.0, abs=1e-3)
    batch["feature_maps"]["a"] = _feature_map(-same)
    metrics = evaluation.feature_metrics(model, batch)
    assert metrics["feature_cosine_a"] == pytest.approx(-1.0, abs=1e-3)
    assert metrics["feature_mse_a"] == pytest.approx(4 * float(np.square(same).mean()), rel=2e-2)


def test_image_metrics_without_features(make_model: MakeModel, camera: Cameras) -> None:
    model = make_model().eval()
    outputs = model.get_outputs_for_camera(camera)
    metrics, images = model.get_image_metrics_and_images(outputs, {"image": outputs["rgb"].clone()})
    assert metrics["l1"] == 0.0
    assert {"psnr", "ssim", "train_peak_memory_mib", "train_it_per_s", "eval_peak_memory_mib"} <= set(metrics)
    assert metrics["eval_peak_memory_mib"] > 0
    assert all(isinstance(value, float) for value in metrics.values())
    assert images["img"].shape == (12, 40, 3)


def test_the_peak_of_training_outlives_the_viewers_pictures(
    make_model: MakeModel, camera: Cameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = {"now": 0.0}
    monkeypatch.setattr("f3rm_ext.engine.cost.peak_mib", lambda device: peaks["now"])
    for module in ("f3rm_ext.engine.cost", "f3rm_ext.nerf.queryable"):
        monkeypatch.setattr(f"{module}.reset_peak", lambda device: peaks.update(now=0.0))
    model = make_model()
    for step, taken in enumerate((70.0, 30.0)):
        _run_callbacks(model, step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
        peaks["now"] = taken
        _run_callbacks(model, step, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
        model.eval().get_outputs_for_camera(camera)
        peaks["now"] = 900.0
        model.train()
    assert model.cost.metrics(model.device)["train_peak_memory_mib"] == 70
    assert model.cost.metrics(model.device)["eval_peak_memory_mib"] == 900


def test_a_checkpoint_restores_heads_and_counters(make_model: MakeModel, make_spec: MakeSpec, camera: Cameras) -> None:
    trained = make_model((make_spec("a"),)).eval()
    trained.cost.peak_mib, trained.cost.it_per_s = 123.0, 4.5
    assert not [key for key in trained.state_dict() if "lpips" in key.lower()]
    bare = make_model(()).eval()
    bare.load_state_dict(trained.state_dict())
    assert bare.cost.state() == {"train_peak_mib": 123.0, "train_it_per_s": 4.5}
    torch.testing.assert_close(
        bare.get_outputs_for_camera(camera)["feature_pca"], trained.get_outputs_for_camera(camera)["feature_pca"]
    )


def test_parameter_groups_cover_every_parameter_once(make_model: MakeModel, make_spec: MakeSpec) -> None:
    model = make_model((make_spec("a"),))
    grouped = [id(p) for group in model.get_param_groups().values() for p in group]
    everything = [id(p) for name, p in model.named_parameters() if name != "device_indicator_param"]
    assert sorted(grouped) == sorted(everything)
    off = make_model(camera_optimizer=CameraOptimizerConfig(mode="off"))
    assert "camera_opt" not in off.get_param_groups()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("proposals", ()),
        ("eval_num_rays_per_chunk", -1),
        ("depth_loss_steps", 0),
        ("near_plane", 0.0),
        ("init_density", -1.0),
        ("feature_num_hidden", 0),
        ("feature_grid", GridOptions(num_levels=0)),
    ],
)
def test_options_that_cannot_work(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option.replace("_", "-")):
        F3rmModelConfig(**{option: value})


@pytest.mark.shapes
def test_wrong_shapes_are_refused(make_model: MakeModel) -> None:
    with pytest.raises(Exception, match="positions"):
        make_model().field.density(torch.zeros(4, 3))


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def left_half() -> torch.Tensor:
    mask = torch.zeros(12, 20, 1, dtype=torch.bool)
    mask[:, :10] = True
    return mask


def test_masked_pixels_do_not_count_in_evaluation(
    make_model: MakeModel, make_spec: MakeSpec, camera: Cameras, left_half: torch.Tensor
) -> None:
    model = make_model((make_spec("a", 12),), eval_num_rays_per_chunk=16).eval()
    outputs = model.get_outputs_for_camera(camera)
    grid = PatchGrid.covering(3, 4, 12, 20)
    values = evaluation.render_pixels(model, camera, torch.from_numpy(grid.centres_px()).flatten(0, 1))["a"]
    values = values.view(3, 4, 12) * torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None]
    batch = {
        "image": torch.where(left_half, outputs["rgb"], 1 - outputs["rgb"]),
        "mask": left_half,
        "camera": camera,
        "feature_maps": {"a": _feature_map(values.numpy())},
    }
    metrics, images = model.get_image_metrics_and_images(outputs, batch)
    assert metrics["psnr"] == pytest.approx(100) and metrics["ssim"] == pytest.approx(1) and metrics["l1"] == 0
    assert metrics["feature_cosine_a"] == pytest.approx(1, abs=1e-3)
    assert metrics["feature_mse_a"] == pytest.approx(0, abs=1e-5)
    del batch["mask"]
    without, _ = model.get_image_metrics_and_images(outputs, batch)
    assert without["psnr"] < 30 and abs(without["feature_cosine_a"]) < 0.1
    for picture in images.values():
        for start in range(0, picture.shape[1], 20):
            assert (picture[:, start + 10 : start + 20] == 0.5).all() and (picture[:, start : start + 10] != 0.5).any()


def test_a_mask_that_keeps_nothing_leaves_no_metrics_of_pictures(
    make_model: MakeModel, make_spec: MakeSpec, camera: Cameras
) -> None:
    model = make_model((make_spec("a", 12),)).eval()
    outputs = model.get_outputs_for_camera(camera)
    batch = {
        "image": outputs["rgb"],
        "mask": torch.zeros(12, 20, 1, dtype=torch.bool),
        "camera": camera,
        "feature_maps": {"a": _feature_map(np.ones((3, 4, 12)))},
    }
    metrics, images = model.get_image_metrics_and_images(outputs, batch)
    assert set(metrics) == {"train_peak_memory_mib", "train_it_per_s", "eval_peak_memory_mib"}
    assert (images["img"] == 0.5).all()


def test_masked_pixels_that_are_trained_have_no_features(
    make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec
) -> None:
    model = make_model((make_spec("a"),), fraction=1.0)
    kept = torch.tensor([True, True, False, True, False, False, True, False])[:, None]
    outputs = model(make_rays(8))
    target = torch.randn(8, 12)

    def values(wanted: torch.Tensor, **batch: torch.Tensor) -> tuple[float, float]:
        full = {"image": torch.zeros(8, 3), "features": {"a": wanted}, **batch}
        metrics = model.get_metrics_dict(outputs, full)
        return float(model.get_loss_dict(outputs, full, metrics)["feature_loss_a"]), float(metrics["feature_cosine_a"])

    assert values(target, kept=kept) == values(torch.where(kept, target, -target), kept=kept) != values(target)
    nothing = {"image": torch.zeros(8, 3), "features": {"a": target}, "kept": torch.zeros_like(kept)}
    metrics = model.get_metrics_dict(outputs, nothing)
    losses = model.get_loss_dict(outputs, nothing, metrics)
    assert "feature_loss_a" not in losses and "psnr" not in metrics


def test_masked_pixels_that_are_trained_teach_emptiness(make_model: MakeModel) -> None:
    """Over a random background only a ray that stops nowhere has the colour of its pixel."""
    model = make_model(metadata={"masked_pixels": "background"})
    batch = {"image": torch.tensor([[0.7, 0.2, 0.4, 0.0]]).expand(64, 4)}
    solid = torch.full((64, 1), 0.5, requires_grad=True)
    outputs = {"rgb": 0.5 * torch.rand(64, 3), "accumulation": solid}
    model.eval().get_loss_dict(outputs, batch)["rgb_loss"].backward()
    assert solid.grad is not None and solid.grad.abs().sum() > 0
    empty = {"rgb": torch.zeros(64, 3), "accumulation": torch.zeros(64, 1)}
    assert float(model.get_loss_dict(empty, batch)["rgb_loss"]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("chosen", "masked", "expected"),
    [
        ("last_sample", "background", "random"),
        ("last_sample", "ignore", "last_sample"),
        ("white", "background", "white"),
        ("random", "ignore", "random"),
    ],
)
def test_what_is_behind_masked_pixels(make_model: MakeModel, chosen: str, masked: str, expected: str) -> None:
    model = make_model(background_color=chosen, metadata={"masked_pixels": masked})
    assert model.renderer_rgb.background_color == expected


def test_a_resumed_run_knows_how_far_the_sampler_was(make_model: MakeModel) -> None:
    model = make_model()
    # In its first ten steps the sampler updates the proposal networks each time.
    _run_callbacks(model, 11, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
    assert model.proposal_sampler._step == 10

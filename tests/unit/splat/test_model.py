"""The model of splats without a trainer: pictures, losses, masks, checkpoints, and a training step of every mode."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox, SceneBox

from f3rm_ext.data.background import Background, PhotoBackground
from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.splat import rendering
from f3rm_ext.splat.densify import DensifyOptions
from f3rm_ext.splat.files import SplatInfo, export_splats
from f3rm_ext.splat.gaussians import sh_to_rgb
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.memory.packed import forget_gradient, packed_gradient
from f3rm_ext.splat.model import SplatModel, SplatModelConfig
from f3rm_ext.splat.regularization.options import RegularizationOptions

HEIGHT, WIDTH = 24, 32
SURFACE_STEP = 80
"""Step of a run of 100 at which surfaces are regularised."""
LOSSES = {
    "none": set(),
    "density": {"surface_density", "surface_normal"},
    "sdf": {"surface_sdf", "surface_normal"},
    "dn-consistency": {"surface_density", "surface_normal", "dn_consistency"},
    "planar": {"thickness", "plane_normals", "multiview", "patches"},
}
"""Losses of each regularisation beside that of colours."""
Make = Callable[..., SplatModel]


@pytest.fixture
def camera(ring_cameras: Callable[..., Any]) -> Any:
    view = ring_cameras()[1:2]
    view.metadata = {"cam_idx": 1}
    return view


@pytest.fixture
def batch() -> dict[str, Any]:
    return {"image": torch.rand(HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(3)), "image_idx": 1}


class Run:
    """A model in training, one camera and its photo."""

    def __init__(self, model: SplatModel, hooks: Any, camera: Any, batch: dict[str, Any]) -> None:
        self.model, self.hooks, self.camera, self.batch = model, hooks, camera, batch

    def render(self, step: int) -> dict[str, Any]:
        """Renders the camera in a step."""
        self.hooks.before(step)
        return self.model(self.camera)

    def backward(self, step: int, **changes: Any) -> dict[str, Any]:
        """Returns the losses of a step after their backward pass; `changes` are made to the batch."""
        losses = self.model.get_loss_dict(self.render(step), {**self.batch, **changes})
        for parameter in self.model.gauss_params.values():
            forget_gradient(parameter)
        torch.stack(list(losses.values())).sum().backward()
        return losses

    def step(self, step: int, **changes: Any) -> dict[str, Any]:
        """Takes a whole step."""
        losses = self.backward(step, **changes)
        self.hooks.after(step)
        return losses

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of all parameters that have one; those of harmonics are packed."""
        params = self.model.gauss_params
        values = {name: value.grad.clone() for name, value in params.items() if value.grad is not None}
        if (packed := packed_gradient(params["features_rest"])) is not None:
            rows = packed.rows()
            values["features_rest"] = packed.unpack(rows, 0, values["features_rest"].shape[1])
        return values


Train = Callable[..., Run]


@pytest.fixture
def train(
    make_splat_model: Callable[..., SplatModel], begin_training: Callable[..., Any], camera: Any, batch: dict[str, Any]
) -> Callable[..., Run]:
    """Starts to train 60 Gaussians, or a given model."""

    def start(model: SplatModel | None = None, **options: Any) -> Run:
        if model is None:
            model = make_splat_model(**{"surface": RegularizationOptions(samples=500, neighbours=8), **options})
        return Run(model, begin_training(model), camera, batch)

    return start


# --- images ----------------------------------------------------------------------------------------------------------


def test_outputs_have_shapes_and_ranges(make_splat_model: Make, camera: Any) -> None:
    outputs = make_splat_model().get_outputs_for_camera(camera)
    channels = {"rgb": 3, "depth": 1, "accumulation": 1, "plane_depth": 1, "normal": 3, "normal_from_depth": 3}
    assert {name: tuple(outputs[name].shape) for name in channels} == {
        name: (HEIGHT, WIDTH, count) for name, count in channels.items()
    }
    for name in ("rgb", "accumulation", "normal", "normal_from_depth"):
        assert 0 <= outputs[name].min() and outputs[name].max() <= 1 and outputs[name].std() > 0.01, name
    seen = outputs["accumulation"] > 0.1
    # The ball of Gaussians is around the origin, 2 from the camera.
    assert (outputs["depth"][seen] > 1).all() and (outputs["depth"][seen] < 3).all()
    assert not outputs["rgb"].requires_grad


@pytest.mark.parametrize(("color", "value"), [("random", 0.0), ("black", 0.0), ("white", 1.0)])
def test_background(make_splat_model: Make, train: Train, camera: Any, color: Background, value: float) -> None:
    model = make_splat_model(background_color=color)
    outputs = model.get_outputs_for_camera(camera)
    empty = outputs["accumulation"][..., 0] == 0
    assert empty.any() and (outputs["rgb"][empty] == value).all()
    assert torch.equal(model.get_outputs_for_camera(camera)["rgb"], outputs["rgb"])
    run, backgrounds = train(model), []
    for step in (5, 6, 5):
        outputs = run.render(step)
        assert (outputs["rgb"][outputs["accumulation"][..., 0] == 0] == outputs["background"]).all()
        backgrounds.append(outputs["background"].clone())
    assert torch.equal(backgrounds[0], backgrounds[2]), "a resumed run must see the same background"
    assert torch.equal(backgrounds[0], backgrounds[1]) is (color != "random")
    photos = {"measure_background": lambda: PhotoBackground(color, (0.2, 0.4, 0.6))}
    measured = make_splat_model(background_color="auto", metadata=photos)
    assert measured.choices["background_color"] == color
    shown = [0.2, 0.4, 0.6] if color == "random" else [value] * 3
    assert measured.background.tolist() == pytest.approx(shown), "holes have the mean colour of the photos"
    opened = make_splat_model(background_color=color)
    opened.load_state_dict(measured.state_dict())
    assert torch.equal(opened.background, measured.background)
    assert make_splat_model(background_color="auto").choices["background_color"] == "random", "nothing is known"
    assert "normal" not in outputs


def test_another_seed_draws_other_backgrounds_and_points(train: Train) -> None:
    def draw(seed: int) -> tuple[list[float], float]:
        background = train(background_color="random", seed=seed).render(5)["background"]
        losses = train(background_color="black", regularization="density", seed=seed).backward(SURFACE_STEP)
        return background.tolist(), float(losses["surface_density"])

    one, again, two = (draw(seed) for seed in (0, 0, 1))
    assert one == again and one[0] != two[0] and one[1] != two[1]


def test_exposures_belong_to_photos_and_not_to_the_scene(make_splat_model: Make, train: Train, camera: Any) -> None:
    model = make_splat_model(exposure="on", background_color="white")
    run = train(model)
    assert model.exposures is not None and model.get_param_groups()["exposure"] == [model.exposures.stops]
    plain = run.render(5)
    scene = model.eval().get_outputs_for_camera(camera)["rgb"]
    model.train()
    run.backward(5)
    gradient = model.exposures.stops.grad
    assert gradient is not None and gradient[1].all() and not gradient[0].any()
    model.exposures.stops.data[1] += 1
    shown = run.render(5)
    empty = shown["accumulation"][..., 0] == 0
    assert empty.any() and (shown["rgb"][empty] == 1).all(), "the background has no exposure"
    covered = shown["accumulation"][..., 0] > 0.5
    assert (shown["rgb"][covered] >= plain["rgb"][covered]).all() and not torch.equal(shown["rgb"], plain["rgb"])
    assert torch.equal(model.eval().get_outputs_for_camera(camera)["rgb"], scene)
    model.train()
    run.hooks.after(5)
    assert model.exposures.stops.mean(dim=0).abs().max() < 1e-6


@pytest.mark.parametrize("empty", [True, False])
def test_a_box_crops_the_scene(make_splat_model: Make, camera: Any, empty: bool) -> None:
    model = make_splat_model(background_color="white")
    size = (1.0, 2.0, 2.0)
    box = OrientedBox.from_params((50.0 if empty else 0.5, 0.0, 0.0), (0.0, 0.0, 0.0), size)
    cropped = model.get_outputs_for_camera(camera, obb_box=box)
    if empty:
        assert (cropped["rgb"] == 1).all() and not cropped["accumulation"].any() and not cropped["depth"].any()
        return
    assert 0 < cropped["accumulation"].sum() < model.get_outputs_for_camera(camera)["accumulation"].sum()
    right = model.gauss_params["means"][:, 0] > 0
    assert 0 < right.sum() < len(right)
    model.set_gaussians(model.gaussians[right], model.filter_3d[right])
    torch.testing.assert_close(model.get_outputs_for_camera(camera)["rgb"], cropped["rgb"])


def test_a_failure_on_the_viewers_thread_is_a_black_image(
    make_splat_model: Make, camera: Any, as_viewer_thread: Callable[[], None], capsys: pytest.CaptureFixture
) -> None:
    model = make_splat_model()
    model.filter_3d = torch.zeros(7)  # of another number of Gaussians
    with pytest.raises(Exception, match="7"):
        model.get_outputs_for_camera(camera)
    as_viewer_thread()
    outputs = model.get_outputs_for_camera(camera)
    assert outputs["rgb"].shape == (HEIGHT, WIDTH, 3) and not outputs["rgb"].any()
    assert "7" in capsys.readouterr().out


# --- losses, masks and alpha -----------------------------------------------------------------------------------------


def test_masked_pixels_teach_nothing(train: Train) -> None:
    run = train()
    mask = torch.zeros(HEIGHT, WIDTH, 1, dtype=torch.bool)
    mask[:, : WIDTH // 2] = True
    outputs = run.render(5)
    outputs["rgb"].retain_grad()
    run.model.get_loss_dict(outputs, {**run.batch, "mask": mask})["rgb_loss"].backward()
    grad = outputs["rgb"].grad
    assert not grad[~mask[..., 0]].any() and grad[mask[..., 0]].any()
    other = torch.where(mask, run.batch["image"], 1 - run.batch["image"])
    one, two, unmasked = (
        float(run.backward(5, **changes)["rgb_loss"])
        for changes in ({"mask": mask}, {"mask": mask, "image": other}, {})
    )
    assert one == two != unmasked


def test_masked_pixels_do_not_count_in_evaluation(make_splat_model: Make, camera: Any, batch: dict[str, Any]) -> None:
    model = make_splat_model()
    outputs = model.get_outputs_for_camera(camera)
    mask = torch.rand(HEIGHT, WIDTH, 1) > 0.5
    truth = torch.where(mask, outputs["rgb"], batch["image"])
    metrics, images = model.get_image_metrics_and_images(outputs, {"image": truth, "mask": mask})
    assert metrics["psnr"] == pytest.approx(100) and metrics["l1"] == 0
    assert float(model.get_metrics_dict(outputs, {"image": truth, "mask": mask})["psnr"]) == pytest.approx(100)
    for picture in images.values():
        assert (picture[:, -WIDTH:][~mask[..., 0]] == 0.5).all() and (picture[:, :WIDTH][~mask[..., 0]] == 0.5).all()
    # Kept pixels count as if there were no others, in training as in evaluation.
    other = {"image": torch.where(mask, outputs["rgb"] + 0.1, 0.0), "mask": mask}
    off = {"rgb": torch.where(mask, outputs["rgb"], 0.0)}
    assert float(model.get_metrics_dict(off, other)["psnr"]) == pytest.approx(20, abs=1e-3)
    metrics, _ = model.get_image_metrics_and_images(outputs, {"image": truth})
    assert metrics["psnr"] < 40 and metrics["l1"] > 0


@pytest.mark.parametrize("mode", LOSSES)
def test_a_mask_that_leaves_nothing_does_no_harm(train: Train, mode: str) -> None:
    run = train(regularization=mode)
    mask = torch.zeros(HEIGHT, WIDTH, 1, dtype=torch.bool)
    losses = run.backward(SURFACE_STEP, mask=mask)
    assert float(losses["rgb_loss"]) == pytest.approx(0, abs=1e-6)
    assert all(torch.isfinite(value).all() for value in (*losses.values(), *run.gradients().values()))
    run.hooks.after(SURFACE_STEP)
    outputs, masked = run.model.eval().get_outputs_for_camera(run.camera), {**run.batch, "mask": mask}
    metrics, _ = run.model.get_image_metrics_and_images(outputs, masked)
    assert not [name for name, value in metrics.items() if value != value]
    assert "psnr" not in metrics and "psnr" not in run.model.get_metrics_dict(outputs, masked)


def test_transparent_truth_lies_over_the_background_of_the_step(train: Train) -> None:
    run = train(ssim_weight=0.0)
    outputs = run.render(5)
    alpha = torch.zeros(HEIGHT, WIDTH, 1)
    alpha[:, :8] = 0.25
    batch = {**run.batch, "alpha": alpha}
    outputs["rgb"] = (alpha * batch["image"] + (1 - alpha) * outputs["background"]).requires_grad_()
    assert float(run.model.get_loss_dict(outputs, batch)["rgb_loss"]) == pytest.approx(0, abs=1e-6)
    # In evaluation the background is the model's: black.
    metrics, images = run.model.eval().get_image_metrics_and_images(
        {"rgb": alpha * batch["image"], "accumulation": alpha, "depth": alpha}, batch
    )
    assert metrics["psnr"] == pytest.approx(100)
    assert not images["img"][:, 8:WIDTH].any()


def test_metrics_of_an_image(make_splat_model: Make, camera: Any, batch: dict[str, Any]) -> None:
    model = make_splat_model()
    outputs = model.get_outputs_for_camera(camera)
    metrics, images = model.get_image_metrics_and_images(outputs, batch)
    expected = {"psnr", "ssim", "l1", "gaussian_count", "mean_opacity", "eval_peak_memory_mib", "train_peak_memory_mib"}
    assert expected <= set(metrics)
    assert metrics["gaussian_count"] == 60
    assert metrics["mean_opacity"] == pytest.approx(float(model.gauss_params["opacities"].sigmoid().mean()))
    assert torch.equal(images["img"], torch.cat([batch["image"], outputs["rgb"]], dim=1))
    assert images["normal"].shape == (HEIGHT, 2 * WIDTH, 3)
    training = model.get_metrics_dict(outputs, batch)
    assert float(training["psnr"]) == pytest.approx(metrics["psnr"], abs=1e-3)
    assert float(training["gaussian_count"]) == 60


# --- training steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LOSSES)
def test_a_step_of_every_mode(train: Train, mode: str, watch_calls: Callable[..., Any]) -> None:
    run = train(regularization=mode)
    assert run.model.regularizer is not None
    calls = watch_calls(run.model.regularizer, "losses")
    assert set(run.backward(SURFACE_STEP)) == {"rgb_loss"} | LOSSES[mode]
    for name, grad in run.gradients().items():
        assert torch.isfinite(grad).all() and grad.any(), name
    assert set(run.gradients()) == set(run.model.gauss_params)
    if mode == "none":
        assert not calls, "no time goes into what is off"
        return
    (call,) = calls
    step, view = call.args
    assert step == SURFACE_STEP and len(view.gaussians) == len(view.visible) == 60 and view.visible.any()
    assert view.depth is not None and view.alpha is not None and view.mask is None
    assert view.depth.shape == view.alpha.shape == (HEIGHT, WIDTH)
    assert (view.normals is not None) == (mode in ("dn-consistency", "planar"))
    assert (view.plane_depth is not None) == (view.other is not None) == (mode == "planar")
    assert view.extent == run.model.extent == pytest.approx(2.2, abs=0.1)
    run.hooks.after(SURFACE_STEP)
    assert run.model.cost.peak_mib > 0


def test_planar_compares_with_a_nearby_view_of_the_same_size(train: Train) -> None:
    run = train(regularization="planar")
    assert "multiview" not in run.model.get_loss_dict(run.render(10), run.batch)
    other, again = run.render(SURFACE_STEP)["other"], run.model(run.camera)["other"]
    assert other.depth.shape == (HEIGHT, WIDTH) and not other.depth.requires_grad and bool((other.depth > 0).any())
    assert torch.equal(other.viewmat, again.viewmat), "another choice at the same step"
    assert not torch.equal(other.viewmat, run.model(run.camera)["view"].viewmats[0])
    run.camera.rescale_output_resolution(0.5)
    assert run.model(run.camera)["other"].depth.shape == (HEIGHT // 2, WIDTH // 2)


def test_planar_compares_with_the_photo_of_the_nearby_view_where_it_is_not_masked(
    train: Train, watch_calls: Callable[..., Any]
) -> None:
    run = train(regularization="planar", background_color="white")
    model, camera = run.model, run.camera
    rendered = run.render(SURFACE_STEP)["picture"]
    asked: list[int] = []
    # As of a photo that rounding made a row taller.
    photo = torch.linspace(0, 1, (HEIGHT + 1) * WIDTH * 3).view(HEIGHT + 1, WIDTH, 3)
    batch = {"image": photo}
    evaluations = watch_calls(rendering, "packed_sh_colors")

    def train_photo(image_idx: int) -> dict[str, Any]:
        asked.append(image_idx)
        return batch

    model.train_photo = train_photo
    outputs = model(camera)
    assert torch.equal(outputs["picture"], photo)
    assert outputs["other"].depth.shape == (-(-(HEIGHT + 1) // 2), -(-WIDTH // 2)), "half of the rows and columns"
    (nearest,) = asked
    torch.testing.assert_close(
        outputs["other"].fit(photo).K, model.nearby.camera(nearest, photo.shape[:2]).Ks[0], rtol=1e-6, atol=0
    )
    assert len(evaluations) == 1, "colours are rendered that the photo replaces"
    assert model.nearby is not None and asked[0] in model.nearby.nearest[camera.metadata["cam_idx"]]
    batch["alpha"] = torch.full((HEIGHT + 1, WIDTH, 1), 0.25)
    torch.testing.assert_close(model(camera)["picture"], 0.25 * photo + 0.75)
    batch = {"image": photo[:HEIGHT], "mask": torch.arange(HEIGHT)[:, None, None].expand(-1, WIDTH, 1) < 3}
    picture = model(camera)["picture"]
    assert torch.equal(picture[:3], photo[:3]) and torch.equal(picture[3:], rendered[3:])
    model.train_photo = lambda _: None
    assert torch.equal(model(camera)["picture"], rendered)


def test_transparent_gaussians_go_when_the_surface_begins(train: Train) -> None:
    run = train(regularization="density")
    model = run.model
    step = model.schedule.surface(model.config.surface).prune_step
    opaque = (model.gaussians.alphas() >= 0.5).clone()
    assert 0 < opaque.sum() < 60
    run.backward(step)
    filters = model.filter_3d[opaque].clone()
    run.hooks.after(step)
    assert model.num_gaussians == int(opaque.sum()) and (model.gaussians.alphas() >= 0.5).all()
    assert torch.equal(model.filter_3d, filters)
    # The optimisers have the new parameters, and the next step works.
    assert run.hooks.optimizers["means"].param_groups[0]["params"][0] is model.gauss_params["means"]
    run.step(step + 1)


def test_gaussians_before_a_camera_go_in_rounds(train: Train, ring_cameras: Callable[..., Any]) -> None:
    cameras = ring_cameras()
    points = (torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) * 0.1, torch.zeros(200, 3))
    run = train(make_bare(seed_points=points, metadata={"cameras": cameras}, densify=DensifyOptions(grow_grad2d=1e9)))
    model, position = run.model, cameras.camera_to_worlds[2, :, 3]
    assert model.num_gaussians == 200
    with torch.no_grad():
        model.gauss_params["means"][[3, 50]] = torch.stack([0.9 * position, 1.1 * position])
    every = model.densifier.options.every
    run.step(next(step for step in range(100) if model.schedule.position(step) % every))
    assert model.num_gaussians == 200, "between rounds"
    run.step(next(step for step in range(1, 100) if model.schedule.position(step) % every == 0))
    assert model.num_gaussians == 198 and len(model.filter_3d) == 198
    assert (model.gaussians.means - position).norm(dim=1).min() > 1
    run.step(99)
    resumed = make_bare(metadata={"cameras": cameras})
    assert resumed.free_space is None
    resumed.load_state_dict(model.state_dict())
    assert resumed.free_space is not None and model.free_space is not None
    assert torch.equal(resumed.free_space.radii, model.free_space.radii)
    assert torch.equal(resumed.free_space.centres, model.free_space.centres)
    fixed = make_bare(metadata={"cameras": cameras}, densify=DensifyOptions(strategy="none"))
    fixed.load_state_dict(model.state_dict())
    assert fixed.free_space is None, "their number stays"


def test_the_filter_is_computed_on_schedule(make_splat_model: Make, train: Train) -> None:
    for filter_3d in (True, False):
        model = make_splat_model()
        expected, model.filter_3d = model.filter_3d.clone(), torch.zeros(60)
        model.config.mip.filter_3d = filter_3d
        train(model).hooks.before(0)
        torch.testing.assert_close(model.filter_3d, expected * filter_3d)


def test_the_degree_of_colors_rises(train: Train) -> None:
    run, degrees = train(sh_degree=3, sh_steps_per_degree=3000), []
    for step in (0, 19, 20, 40, 60, 98):
        run.hooks.before(step)
        degrees.append(run.model.current_sh_degree)
    assert degrees == [0, 0, 1, 2, 3, 3]


# --- initial Gaussians -----------------------------------------------------------------------------------------------


def make_bare(**options: Any) -> SplatModel:
    box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
    given = {name: options.pop(name) for name in ("seed_points", "metadata") if name in options}
    return SplatModelConfig(**{"num_random": 20, "sh_degree": 1, **options}).setup(
        scene_box=box, num_train_data=3, **{"metadata": {}, **given}
    )


@pytest.mark.parametrize(
    ("count", "limit", "total", "words"),
    [
        (130, 0, 130, ["the 130 points of sparse.ply."]),
        (7, 0, 27, ["the 7 points of sparse.ply", "random points"]),
        (0, 0, 20, ["random points"]),
        (130, 7, 7, ["7 of the 130 points of sparse.ply."]),
    ],
)
def test_points_of_the_capture_are_the_first_gaussians_and_the_log_says_so(
    train: Train, capsys: pytest.CaptureFixture, count: int, limit: int, total: int, words: list[str]
) -> None:
    points, colors = torch.randn(count, 3), torch.randint(0, 256, (count, 3))
    model = make_bare(
        seed_points=(points, colors),
        metadata={"points3D_source": "sparse.ply"},
        densify=DensifyOptions(max_gaussians=limit),
    )
    means = model.gauss_params["means"].data
    assert len(means) == model.num_gaussians == total
    if limit:
        assert all((points == row).all(dim=1).any() for row in means)
    else:
        assert torch.equal(means[:count], points)
        first = model.gauss_params["features_dc"].data[:count]
        torch.testing.assert_close(sh_to_rgb(first), colors / 255.0)
    train(model)
    log = " ".join(capsys.readouterr().out.split())
    assert f"{total} Gaussians" in log and all(part in log for part in words)
    resumed = make_bare()
    resumed.load_state_dict(model.state_dict())
    train(resumed)
    assert "Gaussians" not in capsys.readouterr().out


def test_half_of_the_first_gaussians_are_at_points_of_stereo_where_not_all_have_room() -> None:
    points, limit = torch.randn(130, 3), DensifyOptions(max_gaussians=20)
    for dense, kept in ((30, 10), (4, 4), (130, 20)):
        given = {"seed_points": (points, torch.zeros(130, 3)), "metadata": {"points3D_dense": dense}}
        means = make_bare(**given, densify=limit).gauss_params["means"].data
        of_stereo = (points[130 - dense :, None] == means).all(dim=2).any(dim=1)
        assert len(means) == 20 and int(of_stereo.sum()) == kept


@pytest.mark.parametrize(("depth", "count", "size"), [(1.0, 130, 2.2), (44.0, 130, 22.0), (44.0, 0, 2.2)])
def test_far_points_before_cameras_that_look_one_way_make_the_scene_large(
    train: Train, ring_cameras: Callable[..., Any], depth: float, count: int, size: float
) -> None:
    """Otherwise densification removes most of what they see as too large, and positions hardly move. Random points say
    nothing."""
    cameras = ring_cameras(4, 2.0)
    cameras.camera_to_worlds[:, :, :3] = cameras.camera_to_worlds[0, :, :3]
    points = 0.01 * torch.randn(count, 3) - depth * cameras.camera_to_worlds[0, :, 2]
    model = make_bare(seed_points=(points, torch.zeros(count, 3)), metadata={"cameras": cameras})
    densifier: Any = train(model).model.densifier
    assert densifier.statistics["scene_scale"] == model.extent == pytest.approx(size, rel=0.05)
    assert model.rate_factors["means"] == pytest.approx(size / 2.2, rel=0.05)


def test_without_cameras_and_points_gaussians_start_anywhere() -> None:
    means = make_bare().gauss_params["means"]
    assert len(means) == 20 and means.abs().max() <= 1
    assert torch.equal(means, make_bare().gauss_params["means"])
    assert not torch.equal(means, make_bare(seed=1).gauss_params["means"])


@pytest.mark.parametrize("suffix", [".ply", ".ckpt"])
def test_start_from_replaces_the_first_gaussians(
    train: Train, make_splat_model: Make, colorful: Any, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".ply":
        export_splats(colorful(40, 3), path, SplatInfo())
    else:
        state = {f"_model.gauss_params.{name}": value for name, value in colorful(40, 3).tensors().items()}
        torch.save({"step": 9, "pipeline": state}, path)
    run = train(make_bare(start_from=path))
    log = " ".join(capsys.readouterr().out.split())
    assert run.model.num_gaussians == 40 and "40 Gaussians" in log and "degrees that are dropped" in log
    torch.testing.assert_close(run.model.gauss_params["means"].data, colorful(40, 3).means, atol=1e-5, rtol=0)
    assert run.model.gauss_params["features_rest"].shape == (40, 3, 3)
    run.backward(0)
    assert (run.model.filter_3d > 0).all()
    run.hooks.after(0)
    resumed = make_bare(start_from=path)
    resumed.load_state_dict(make_splat_model().state_dict())
    assert train(resumed).model.num_gaussians == 60, "a resumed run does not start again from the file"


def test_a_late_stage_begins_at_once(train: Train, colorful: Any, tmp_path: Path) -> None:
    export_splats(colorful(40), tmp_path / "a.ply", SplatInfo())
    surface = RegularizationOptions(samples=500, neighbours=8)
    options = {"start_from": tmp_path / "a.ply", "start_stage": "regularized", "surface": surface}
    assert "surface_density" in train(make_bare(regularization="density", **options)).backward(3)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 3), (1, 1)])
def test_a_checkpoint_of_another_number_and_degree(
    make_splat_model: Make, camera: Any, capsys: pytest.CaptureFixture, theirs: int, ours: int
) -> None:
    other, model = make_splat_model(45, sh_degree=theirs), make_splat_model(60, sh_degree=ours)
    parameter = model.gauss_params["means"]
    capsys.readouterr()
    model.load_state_dict(other.state_dict())
    log = " ".join(capsys.readouterr().out.split())
    assert model.num_gaussians == 45 and model.gauss_params["means"] is parameter
    assert torch.equal(model.filter_3d, other.filter_3d) and model.current_sh_degree == min(ours, theirs)
    one, two = (item.get_outputs_for_camera(camera)["rgb"] for item in (model, other))
    if theirs == ours:
        assert "SH degree" not in log
    else:
        assert f"SH degree {theirs}" in log and f"degree {ours}" in log
        assert ("nothing is lost" in log) == (theirs < ours)
    if theirs > ours:
        assert torch.equal(model.gauss_params["features_rest"].data, other.gauss_params["features_rest"].data[:, :3])
        assert 0.01 < (one - two).abs().max() < 0.6
    else:
        torch.testing.assert_close(one, two)


def test_splatfactos_checkpoint_has_no_filter(make_splat_model: Make) -> None:
    state = {name: value for name, value in make_splat_model(45).state_dict().items() if name.startswith("gauss_")}
    model = make_splat_model()
    model.load_state_dict(state, strict=False)
    assert model.num_gaussians == 45 and not model.filter_3d.any()


@pytest.mark.parametrize("first", ["state", "training"])
def test_a_resumed_run_goes_the_same_way(make_splat_model: Make, train: Train, first: str) -> None:
    surface = RegularizationOptions(samples=500, neighbours=8)
    options: dict[str, Any] = {"regularization": "density", "surface": surface, "sh_degree": 2}
    run = train(**options)
    model = run.model
    for step in range(SURFACE_STEP, SURFACE_STEP + 3):
        run.step(step)
    model.current_sh_degree = 1
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    json.loads(state["_extra_state"]["about"])  # text that other programs can read
    other = make_splat_model(33, **options)
    if first == "state":
        other.load_state_dict(state)
    again = train(other)
    if first == "training":
        other.load_state_dict(state)
    assert (other.cost.state(), other.extent, other.current_sh_degree) == (model.cost.state(), model.extent, 1)
    assert model.densifier is not None and other.densifier is not None
    assert model.regularizer is not None and other.regularizer is not None
    index, restored = model.regularizer.neighbours.index, other.regularizer.neighbours.index
    assert index is not None and restored is not None and torch.equal(index, restored)
    assert torch.equal(model.densifier.generator.get_state(), other.densifier.generator.get_state())
    one, two = run.backward(SURFACE_STEP + 3), again.backward(SURFACE_STEP + 3)
    for name, loss in one.items():
        torch.testing.assert_close(two[name], loss, msg=name)


@pytest.mark.parametrize(
    ("was", "now", "step", "fine"),
    [
        ("none", "density", 20, True),  # alike until the entropy stage begins
        ("none", "density", SURFACE_STEP, False),
        ("density", "none", SURFACE_STEP, True),
        ("none", "planar", 20, False),
        ("density", "planar", SURFACE_STEP, True),
    ],
)
@pytest.mark.parametrize("first", ["state", "callbacks"])
def test_a_checkpoint_of_another_stage(
    make_splat_model: Make, train: Train, was: str, now: str, step: int, fine: bool, first: str
) -> None:
    trained = train(regularization=was)
    trained.hooks.before(step)
    state = trained.model.state_dict()
    model = make_splat_model(regularization=now)
    calls = [lambda: model.load_state_dict(state), lambda: train(model)]
    calls[first == "callbacks"]()
    if fine:
        calls[first == "state"]()
        return
    first_step = 17 if now == "planar" else 47
    with pytest.raises(ConfigError, match=f"{step}.*{now}.*{first_step}.*--pipeline.model.regularization"):
        calls[first == "state"]()


def test_a_checkpoint_opened_for_viewing_needs_no_trainer(make_splat_model: Make, train: Train) -> None:
    run = train()
    run.step(0)
    other = make_splat_model()
    other.load_state_dict(run.model.state_dict())
    one, two = (model.get_outputs_for_camera(run.camera) for model in (other, run.model.eval()))
    torch.testing.assert_close(one["rgb"], two["rgb"])
    assert other.get_loss_dict(one, run.batch).keys() == {"rgb_loss"}


# --- half precision --------------------------------------------------------------------------------------------------


def test_harmonics_in_half_precision(make_splat_model: Make, camera: Any, capsys: pytest.CaptureFixture) -> None:
    half = make_splat_model(sh_degree=2, memory=MemoryOptions(sh_storage="float16"))
    single = make_splat_model(sh_degree=2)
    stored = {name: value.dtype for name, value in half.gauss_params.items()}
    assert stored.pop("features_rest") == torch.float16 and set(stored.values()) == {torch.float32}
    one, two = (model.get_outputs_for_camera(camera)["rgb"] for model in (half, single))
    assert 0 < float((one - two).abs().max()) < 2e-3
    other = make_splat_model(45, sh_degree=2)
    capsys.readouterr()
    other.load_state_dict(half.state_dict())
    assert other.gauss_params["features_rest"].dtype == torch.float32
    assert "SH degree" not in capsys.readouterr().out, "nothing is lost"
    half.load_state_dict(make_splat_model(45, sh_degree=2).state_dict())
    assert "by rounding" in " ".join(capsys.readouterr().out.split())
    wanted = make_splat_model(45, sh_degree=2).gauss_params["features_rest"].data.half()
    rest = half.gauss_params["features_rest"]
    assert rest.dtype == torch.float16 and torch.equal(rest.data, wanted)


@pytest.mark.parametrize(
    ("memory", "moments", "reflective"),
    [
        (MemoryOptions(), "float32", 0.0),
        (MemoryOptions(optimize_memory=True, expandable_segments=False), "bfloat16", 0.0),
        (MemoryOptions(sh_storage="selective", sh_moments="int8"), "int8", 0.05),
    ],
)
def test_the_optimiser_follows_the_memory_options(memory: MemoryOptions, moments: str, reflective: float) -> None:
    config = make_splat_config("sugar-ext")
    config.pipeline.model.memory = memory
    config.pipeline.model.fit_optimizers(config.optimizers)
    optimizer = config.optimizers["features_rest"]["optimizer"]
    assert optimizer.moments == moments and optimizer.reflective_above == reflective

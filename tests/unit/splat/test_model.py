"""The model of splats without a trainer: pictures, losses, masks, checkpoints, and a training step of every mode."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox, SceneBox

from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.splat import rendering
from f3rm_ext.splat.files import SplatInfo, export_splats
from f3rm_ext.splat.gaussians import Gaussians, sh_to_rgb
from f3rm_ext.splat.memory.packed import forget_gradient, packed_gradient
from f3rm_ext.splat.model import SplatModel, SplatModelConfig
from f3rm_ext.splat.regularization.options import RegularizationOptions
from f3rm_ext.splat.regularization.table import gaussian_table

HEIGHT, WIDTH = 24, 32
STEPS = 100
ENTROPY_STEP, SURFACE_STEP = 50, 80
"""Steps of a run of 100 at which these stages are at work."""


@pytest.fixture
def camera(ring_cameras: Callable[..., Any]) -> Any:
    found = ring_cameras()[1:2]
    found.metadata = {"cam_idx": 1}
    return found


@pytest.fixture
def batch() -> dict[str, Any]:
    return {"image": torch.rand(HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(3)), "image_idx": 1}


def small(**options: Any) -> RegularizationOptions:
    return RegularizationOptions(**{"samples": 500, "neighbours": 8, **options})


def gradients(model: SplatModel) -> dict[str, torch.Tensor]:
    """Of all parameters that have one; colours beyond the first gather it beside them."""
    found = {name: value.grad.clone() for name, value in model.gauss_params.items() if value.grad is not None}
    packed = packed_gradient(model.gauss_params["features_rest"])
    if packed is not None:
        rows = packed.rows()
        found["features_rest"] = packed.multiplied(rows, 0, found["features_rest"].shape[1])
    return found


def backward(model: SplatModel, hooks: Any, step: int, camera: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The losses of a step, after their backward pass."""
    hooks.before(step)
    outputs = model(camera)
    losses = model.get_loss_dict(outputs, batch)
    for parameter in model.gauss_params.values():
        forget_gradient(parameter)
    torch.stack(list(losses.values())).sum().backward()
    return losses


# --- pictures --------------------------------------------------------------------------------------------------------


def test_outputs_have_shapes_and_ranges(make_splat_model: Callable[..., SplatModel], camera: Any) -> None:
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
def test_background_outside_training(
    make_splat_model: Callable[..., SplatModel], camera: Any, color: str, value: float
) -> None:
    model = make_splat_model(background_color=color)
    outputs = model.get_outputs_for_camera(camera)
    empty = outputs["accumulation"][..., 0] == 0
    assert empty.any() and (outputs["rgb"][empty] == value).all()
    assert torch.equal(model.get_outputs_for_camera(camera)["rgb"], outputs["rgb"])


@pytest.mark.parametrize(("color", "same"), [("random", False), ("black", True), ("white", True)])
def test_background_in_training(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    color: str,
    same: bool,
) -> None:
    model = make_splat_model(background_color=color)
    hooks = begin_training(model, STEPS)
    corners = []
    for step in (5, 6, 5):
        hooks.before(step)
        outputs = model(camera)
        empty = outputs["accumulation"][..., 0] == 0
        assert (outputs["rgb"][empty] == outputs["background"]).all()
        corners.append(outputs["background"].clone())
    assert torch.equal(corners[0], corners[2]), "a resumed run must see the same background"
    assert torch.equal(corners[0], corners[1]) is same
    assert "normal" not in outputs


def test_a_box_leaves_out_what_is_outside(make_splat_model: Callable[..., SplatModel], camera: Any) -> None:
    model = make_splat_model()
    box = OrientedBox.from_params((0.5, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 2.0, 2.0))
    cropped = model.get_outputs_for_camera(camera, obb_box=box)
    whole = model.get_outputs_for_camera(camera)["accumulation"].sum()
    assert 0 < cropped["accumulation"].sum() < whole
    right = model.gauss_params["means"][:, 0] > 0
    assert 0 < right.sum() < len(right)
    model.set_gaussians(model.gaussians[right], model.filter_3d[right])
    torch.testing.assert_close(model.get_outputs_for_camera(camera)["rgb"], cropped["rgb"])


def test_an_empty_box_shows_the_background(make_splat_model: Callable[..., SplatModel], camera: Any) -> None:
    model = make_splat_model(background_color="white")
    box = OrientedBox.from_params((50.0, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    outputs = model.get_outputs_for_camera(camera, obb_box=box)
    assert (outputs["rgb"] == 1).all() and not outputs["accumulation"].any() and not outputs["depth"].any()


def test_a_failure_on_the_viewers_thread_is_a_black_picture(
    make_splat_model: Callable[..., SplatModel],
    camera: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    model = make_splat_model()

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr("f3rm_ext.splat.model.render_outputs", broken)
    with pytest.raises(ZeroDivisionError):
        model.get_outputs_for_camera(camera)
    monkeypatch.setattr("f3rm_ext.compat.is_viewer_thread", lambda: True)
    outputs = model.get_outputs_for_camera(camera)
    assert outputs["rgb"].shape == (HEIGHT, WIDTH, 3) and not outputs["rgb"].any()
    assert "broken on purpose" in " ".join(capsys.readouterr().out.split())


# --- losses, masks and alpha -----------------------------------------------------------------------------------------


def test_masked_pixels_teach_nothing(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
) -> None:
    model = make_splat_model()
    hooks = begin_training(model, STEPS)
    mask = torch.zeros(HEIGHT, WIDTH, 1, dtype=torch.bool)
    mask[:, : WIDTH // 2] = True
    hooks.before(5)
    outputs = model(camera)
    outputs["rgb"].retain_grad()
    model.get_loss_dict(outputs, {**batch, "mask": mask})["rgb_loss"].backward()
    grad = outputs["rgb"].grad
    assert not grad[~mask[..., 0]].any() and grad[mask[..., 0]].any()

    other = batch["image"].clone()
    other[:, WIDTH // 2 :] = 1 - other[:, WIDTH // 2 :]

    def loss(**changes: torch.Tensor) -> float:
        return float(backward(model, hooks, 5, camera, {**batch, **changes})["rgb_loss"])

    assert loss(mask=mask) == loss(mask=mask, image=other) != loss()


def test_masked_pixels_do_not_count_in_evaluation(
    make_splat_model: Callable[..., SplatModel], camera: Any, batch: dict[str, Any]
) -> None:
    model = make_splat_model()
    outputs = model.get_outputs_for_camera(camera)
    mask = torch.rand(HEIGHT, WIDTH, 1) > 0.5
    truth = torch.where(mask, outputs["rgb"], batch["image"])
    metrics, images = model.get_image_metrics_and_images(outputs, {"image": truth, "mask": mask})
    assert metrics["psnr"] == pytest.approx(100) and metrics["l1"] == 0
    assert float(model.get_metrics_dict(outputs, {"image": truth, "mask": mask})["psnr"]) == pytest.approx(100)
    for picture in images.values():
        assert (picture[:, -WIDTH:][~mask[..., 0]] == 0.5).all() and (picture[:, :WIDTH][~mask[..., 0]] == 0.5).all()
    # All that is kept counts as if there was nothing else, in training as in evaluation.
    other = {"image": torch.where(mask, outputs["rgb"] + 0.1, 0.0), "mask": mask}
    off = {"rgb": torch.where(mask, outputs["rgb"], 0.0)}
    assert float(model.get_metrics_dict(off, other)["psnr"]) == pytest.approx(20, abs=1e-3)
    metrics, _ = model.get_image_metrics_and_images(outputs, {"image": truth})
    assert metrics["psnr"] < 40 and metrics["l1"] > 0


@pytest.mark.parametrize("mode", ["none", "density", "sdf", "dn-consistency", "planar"])
def test_a_mask_that_leaves_nothing_does_no_harm(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
    mode: str,
) -> None:
    model = make_splat_model(regularization=mode, surface=small())
    hooks = begin_training(model, STEPS)
    batch["mask"] = torch.zeros(HEIGHT, WIDTH, 1, dtype=torch.bool)
    losses = backward(model, hooks, SURFACE_STEP, camera, batch)
    assert float(losses["rgb_loss"]) == pytest.approx(0, abs=1e-6)
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())
    hooks.after(SURFACE_STEP)
    metrics, _ = model.eval().get_image_metrics_and_images(model.get_outputs_for_camera(camera), batch)
    assert not [name for name, value in metrics.items() if value != value]
    assert "psnr" not in metrics and "psnr" not in model.get_metrics_dict(model.get_outputs_for_camera(camera), batch)


def test_transparent_truth_lies_over_the_background_of_the_step(
    make_splat_model: Callable[..., SplatModel], begin_training: Callable[..., Any], camera: Any, batch: dict[str, Any]
) -> None:
    model = make_splat_model(ssim_weight=0.0)
    hooks = begin_training(model, STEPS)
    hooks.before(5)
    outputs = model(camera)
    background = outputs["background"]
    alpha = torch.zeros(HEIGHT, WIDTH, 1)
    alpha[:, :8] = 0.25
    expected = 0.25 * batch["image"] + 0.75 * background
    expected[:, 8:] = background
    outputs["rgb"] = expected.requires_grad_()
    batch["alpha"] = alpha
    assert float(model.get_loss_dict(outputs, batch)["rgb_loss"]) == pytest.approx(0, abs=1e-6)
    # Without the step's own background, as in evaluation, it is the model's: black.
    metrics, images = model.eval().get_image_metrics_and_images(
        {"rgb": alpha * batch["image"], "accumulation": alpha, "depth": alpha}, batch
    )
    assert metrics["psnr"] == pytest.approx(100)
    assert not images["img"][:, 8:WIDTH].any()


def test_metrics_of_an_image(make_splat_model: Callable[..., SplatModel], camera: Any, batch: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("none", set()),
        ("density", {"surface_density", "surface_normal"}),
        ("sdf", {"surface_sdf", "surface_normal"}),
        ("dn-consistency", {"surface_density", "surface_normal", "dn_consistency"}),
        ("planar", {"thickness", "plane_normals", "multiview", "patches"}),
    ],
)
def test_a_step_of_every_mode(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
    mode: str,
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_splat_model(regularization=mode, surface=small())
    hooks = begin_training(model, STEPS)
    assert model.regularizer is not None
    given: dict[str, Any] = {}
    losses_of = model.regularizer.losses

    def watched(*arguments: Any, **options: Any) -> Any:
        given.update(options, arguments=arguments)
        return losses_of(*arguments, **options)

    monkeypatch.setattr(model.regularizer, "losses", watched)
    losses = backward(model, hooks, SURFACE_STEP, camera, batch)
    assert set(losses) == {"rgb_loss"} | names
    for name, grad in gradients(model).items():
        assert torch.isfinite(grad).all() and grad.any(), name
    assert set(gradients(model)) == set(model.gauss_params)

    if mode == "none":
        assert not given, "no time goes into what is off"
        return
    step, gaussians, visible = given["arguments"][:3]
    assert step == SURFACE_STEP and len(gaussians) == len(visible) == 60 and visible.any()
    assert given["depth"].shape == given["alpha"].shape == (HEIGHT, WIDTH) and given["mask"] is None
    assert (given["normals"] is not None) == (mode in ("dn-consistency", "planar"))
    assert (given["plane_depth"] is not None) == (given["other"] is not None) == (mode == "planar")
    assert given["extent"] == model.extent == pytest.approx(2.2, abs=0.1)
    hooks.after(SURFACE_STEP)
    assert model.cost.peak_mib > 0


def test_planar_compares_with_a_nearby_view_of_the_same_size(
    make_splat_model: Callable[..., SplatModel], begin_training: Callable[..., Any], camera: Any, batch: dict[str, Any]
) -> None:
    model = make_splat_model(regularization="planar", surface=small())
    hooks = begin_training(model, STEPS)
    hooks.before(10)
    assert "multiview" not in model.get_loss_dict(model(camera), batch)
    hooks.before(SURFACE_STEP)
    other, again = model(camera)["other"], model(camera)["other"]
    assert other.depth.shape == (HEIGHT, WIDTH) and not other.depth.requires_grad and bool((other.depth > 0).any())
    assert torch.equal(other.viewmat, again.viewmat), "another choice at the same step"
    assert not torch.equal(other.viewmat, model(camera)["view"].viewmats[0])
    camera.rescale_output_resolution(0.5)
    assert model(camera)["other"].depth.shape == (HEIGHT // 2, WIDTH // 2)


def test_planar_compares_with_the_photo_of_the_nearby_view_where_it_is_not_masked(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_splat_model(regularization="planar", surface=small(), background_color="white")
    begin_training(model, STEPS).before(SURFACE_STEP)
    rendered = model(camera)["picture"]
    asked: list[int] = []
    # As of a photo that rounding made a row taller.
    photo = torch.linspace(0, 1, (HEIGHT + 1) * WIDTH * 3).view(HEIGHT + 1, WIDTH, 3)
    batch = {"image": photo}
    evaluated: list[int] = []
    sh_colors = rendering.stored_sh_colors
    monkeypatch.setattr(rendering, "stored_sh_colors", lambda *args: evaluated.append(1) or sh_colors(*args))

    def train_photo(image_idx: int) -> dict[str, Any]:
        asked.append(image_idx)
        return batch

    model.train_photo = train_photo
    outputs = model(camera)
    assert torch.equal(outputs["picture"], photo) and outputs["other"].depth.shape == photo.shape[:2]
    assert len(evaluated) == 1, "colours are rendered that the photo replaces"
    assert model.nearby is not None and asked[0] in model.nearby.nearest[camera.metadata["cam_idx"]]
    batch["alpha"] = torch.full((HEIGHT + 1, WIDTH, 1), 0.25)
    torch.testing.assert_close(model(camera)["picture"], 0.25 * photo + 0.75)
    batch = {"image": photo[:HEIGHT], "mask": torch.arange(HEIGHT)[:, None, None].expand(-1, WIDTH, 1) < 3}
    picture = model(camera)["picture"]
    assert torch.equal(picture[:3], photo[:3]) and torch.equal(picture[3:], rendered[3:])
    model.train_photo = lambda _: None
    assert torch.equal(model(camera)["picture"], rendered)


def test_the_peak_of_training_outlives_the_viewers_pictures(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {"now": 0.0}
    monkeypatch.setattr("f3rm_ext.engine.cost.peak_mib", lambda device: peaks["now"])
    for module in ("f3rm_ext.engine.cost", "f3rm_ext.splat.features.queryable"):
        monkeypatch.setattr(f"{module}.reset_peak", lambda device: peaks.update(now=0.0))
    model = make_splat_model(regularization="none")
    hooks = begin_training(model)
    for step, taken in enumerate((70.0, 30.0)):
        backward(model, hooks, step, camera, batch)
        peaks["now"] = taken
        hooks.after(step)
        model.eval().get_outputs_for_camera(camera)
        peaks["now"] = 900.0
        model.train()
    assert model.cost.metrics(model.device)["train_peak_memory_mib"] == 70
    assert model.cost.metrics(model.device)["eval_peak_memory_mib"] == 900


@pytest.mark.parametrize("mode", ["density", "sdf", "dn-consistency"])
def test_the_surface_is_done_with_before_the_picture(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Going backwards. Otherwise both would be in memory at once."""
    model = make_splat_model(regularization=mode, surface=small())
    hooks = begin_training(model, STEPS)
    order = []

    def watched(gaussians: Gaussians) -> torch.Tensor:
        table = gaussian_table(gaussians)
        table.register_hook(lambda grad: order.append("surface"))
        return table

    monkeypatch.setattr("f3rm_ext.splat.regularization.regularizer.gaussian_table", watched)
    hooks.before(SURFACE_STEP)
    outputs = model(camera)
    outputs["rendered"].rasterization.means2d.register_hook(lambda grad: order.append("picture"))
    sum(model.get_loss_dict(outputs, batch).values()).backward()
    assert order == ["surface", "picture"]


def test_points_of_a_step_are_those_of_its_number(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
) -> None:
    def density(step: int) -> float:
        model = make_splat_model(regularization="density", surface=small(), background_color="black")
        return float(backward(model, begin_training(model, STEPS), step, camera, batch)["surface_density"])

    assert density(SURFACE_STEP) == density(SURFACE_STEP) != density(SURFACE_STEP + 1)


def test_entropy_comes_before_the_surface(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
) -> None:
    model = make_splat_model(regularization="density", surface=small())
    hooks = begin_training(model, STEPS)
    assert set(backward(model, hooks, 5, camera, batch)) == {"rgb_loss"}
    assert set(backward(model, hooks, ENTROPY_STEP, camera, batch)) == {"rgb_loss", "opacity_entropy"}


def test_transparent_gaussians_go_when_the_surface_begins(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
) -> None:
    model = make_splat_model(regularization="density", surface=small())
    hooks = begin_training(model, STEPS)
    step = model.schedule.surface(model.config.surface).prune_step
    opaque = (model.gaussians.alphas() >= 0.5).clone()
    assert 0 < opaque.sum() < 60
    backward(model, hooks, step, camera, batch)
    filters = model.filter_3d[opaque].clone()
    hooks.after(step)
    assert model.num_gaussians == int(opaque.sum()) and (model.gaussians.alphas() >= 0.5).all()
    assert torch.equal(model.filter_3d, filters)
    # The optimisers have the new parameters, and the next step works.
    assert hooks.optimizers["means"].param_groups[0]["params"][0] is model.gauss_params["means"]
    backward(model, hooks, step + 1, camera, batch)
    hooks.after(step + 1)


@pytest.mark.parametrize("opaque", [0, 1])
def test_pruning_that_would_leave_next_to_nothing_is_left_out(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    opaque: int,
) -> None:
    log: list[str] = []
    monkeypatch.setattr("f3rm_ext.splat.model.CONSOLE.log", lambda line, **_: log.append(line))
    model = make_splat_model(200, regularization="density", surface=small())
    hooks = begin_training(model, STEPS)
    model.gauss_params["opacities"].data.fill_(-1.0)
    model.gauss_params["opacities"].data[:opaque] = 1.0
    step = model.schedule.surface(model.config.surface).prune_step
    for later in range(3):  # The surface is regularised afterwards.
        backward(model, hooks, step + later, camera, batch)
        hooks.after(step + later)
    assert model.num_gaussians == 200
    (said,) = (line for line in log if f"only {opaque} of 200 Gaussians have an opacity of 0.5 or more" in line)
    assert "--pipeline.model.surface.prune-opacity" in said


def test_the_filter_is_computed_on_schedule(
    make_splat_model: Callable[..., SplatModel], begin_training: Callable[..., Any]
) -> None:
    model = make_splat_model()
    expected = model.filter_3d.clone()
    model.filter_3d = torch.zeros(60)
    hooks = begin_training(model, STEPS)
    hooks.before(0)
    torch.testing.assert_close(model.filter_3d, expected)
    off = make_splat_model()
    off.config.mip.filter_3d = False
    off.filter_3d = torch.zeros(60)
    begin_training(off, STEPS).before(0)
    assert not off.filter_3d.any()


def test_the_degree_of_colors_rises(
    make_splat_model: Callable[..., SplatModel], begin_training: Callable[..., Any]
) -> None:
    model = make_splat_model(sh_degree=3, sh_steps_per_degree=3000)
    hooks = begin_training(model, STEPS)
    degrees = []
    for step in (0, 19, 20, 40, 60, 98):
        hooks.before(step)
        degrees.append(model.current_sh_degree)
    assert degrees == [0, 0, 1, 2, 3, 3]


# --- where it begins -------------------------------------------------------------------------------------------------


def make_bare(**options: Any) -> SplatModel:
    box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
    given = {name: options.pop(name) for name in ("seed_points", "metadata") if name in options}
    return SplatModelConfig(**{"num_random": 20, "sh_degree": 1, **options}).setup(
        scene_box=box, num_train_data=3, **{"metadata": {}, **given}
    )


def test_points_of_the_capture_are_where_it_begins() -> None:
    points, colors = torch.randn(130, 3), torch.randint(0, 256, (130, 3))
    model = make_bare(seed_points=(points, colors))
    assert torch.equal(model.gauss_params["means"].data, points)
    torch.testing.assert_close(sh_to_rgb(model.gauss_params["features_dc"].data), colors / 255.0)


@pytest.mark.parametrize(
    ("count", "begins", "said"),
    [
        (130, 130, "Starting with 130 Gaussians at the 130 points of sparse.ply."),
        (7, 27, "Starting with 27 Gaussians at the 7 points of sparse.ply and at random points, as 7 are too few."),
        (0, 20, "Starting with 20 Gaussians at random points, as none are known."),
    ],
)
def test_the_log_says_where_a_run_begins(
    begin_training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, count: int, begins: int, said: str
) -> None:
    log: list[str] = []
    monkeypatch.setattr("f3rm_ext.splat.model.CONSOLE.log", lambda line, **_: log.append(line))
    points = torch.randn(count, 3)
    model = make_bare(
        seed_points=(points, torch.zeros(count, 3, dtype=torch.uint8)), metadata={"points3D_source": "sparse.ply"}
    )
    assert model.num_gaussians == begins and torch.equal(model.gauss_params["means"].data[:count], points)
    begin_training(model, STEPS)
    assert log == [said]
    resumed = make_bare()
    resumed.load_state_dict(model.state_dict())
    begin_training(resumed, STEPS)
    assert log == [said]


def test_no_more_begin_than_there_may_be() -> None:
    from f3rm_ext.splat.densify import DensifyOptions

    points = torch.randn(130, 3)
    model = make_bare(seed_points=(points, torch.zeros(130, 3)), densify=DensifyOptions(max_gaussians=7))
    assert "Starting with 7 Gaussians at 7 of the 130 points of the capture." in model._start_notice
    kept = model.gauss_params["means"].data
    assert len(kept) == 7 and all((points == row).all(dim=1).any() for row in kept)


def test_without_cameras_and_points_it_begins_anywhere() -> None:
    means = make_bare().gauss_params["means"]
    assert len(means) == 20 and means.abs().max() <= 1
    assert torch.equal(means, make_bare().gauss_params["means"])
    assert not torch.equal(means, make_bare(seed=1).gauss_params["means"])


@pytest.mark.parametrize("suffix", [".ply", ".ckpt"])
def test_start_from_replaces_the_first_gaussians(
    begin_training: Callable[..., Any],
    colorful: Callable[..., Gaussians],
    camera: Any,
    batch: dict[str, Any],
    tmp_path: Any,
    suffix: str,
    capsys: pytest.CaptureFixture,
) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".ply":
        export_splats(colorful(40, 3), path, SplatInfo())
    else:
        state = {f"_model.gauss_params.{name}": value for name, value in colorful(40, 3).tensors().items()}
        torch.save({"step": 9, "pipeline": state}, path)
    model = make_bare(start_from=path)
    hooks = begin_training(model, STEPS)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        model.num_gaussians == 40 and "Starting from 40 Gaussians of" in said and "by degrees that are dropped" in said
    )
    torch.testing.assert_close(model.gauss_params["means"].data, colorful(40, 3).means, atol=1e-5, rtol=0)
    assert model.gauss_params["features_rest"].shape == (40, 3, 3)
    backward(model, hooks, 0, camera, batch)
    assert (model.filter_3d > 0).all()
    hooks.after(0)


def test_a_resumed_run_does_not_start_again_from_the_file(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    colorful: Callable[..., Gaussians],
    tmp_path: Any,
) -> None:
    export_splats(colorful(40), tmp_path / "a.ply", SplatInfo())
    model = make_bare(start_from=tmp_path / "a.ply")
    model.load_state_dict(make_splat_model().state_dict())
    begin_training(model, STEPS)
    assert model.num_gaussians == 60


def test_a_part_of_a_schedule_has_the_stages_of_the_whole(
    make_splat_model: Callable[..., SplatModel], begin_training: Callable[..., Any]
) -> None:
    whole, part = make_splat_model(), make_splat_model()
    begin_training(whole, STEPS)
    begin_training(part, 20, schedule_steps=STEPS)
    assert part.schedule == whole.schedule
    assert part.regularizer is not None and whole.regularizer is not None
    assert part.regularizer.options == whole.regularizer.options
    assert part.densifier is not None and whole.densifier is not None
    assert part.densifier.options == whole.densifier.options


def test_a_late_stage_begins_at_once(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    colorful: Callable[..., Gaussians],
    camera: Any,
    batch: dict[str, Any],
    tmp_path: Any,
) -> None:
    export_splats(colorful(40), tmp_path / "a.ply", SplatInfo())
    options = {"start_from": tmp_path / "a.ply", "start_stage": "regularized", "surface": small()}
    model = make_bare(regularization="density", **options)
    hooks = begin_training(model, STEPS)
    assert "surface_density" in backward(model, hooks, 3, camera, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sh_degree": 4}, "it must be from 0 to 3"),
        ({"num_random": 0}, "num-random is 0, but it must be at least 1"),
        ({"sh_steps_per_degree": 0}, "sh-steps-per-degree is 0"),
        ({"ssim_weight": 1.5}, "it must be from 0 to 1"),
        ({"ssim_weight": float("nan")}, "it must be from 0 to 1"),
        ({"near_plane": 0.0}, "it must be above 0"),
        ({"start_stage": "regularized"}, "give them by --pipeline.model.start-from, or start with vanilla"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SplatModelConfig(**options)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_size_and_degree(
    make_splat_model: Callable[..., SplatModel], camera: Any, capsys: pytest.CaptureFixture
) -> None:
    theirs = make_splat_model(45, sh_degree=2)
    model = make_splat_model(60, sh_degree=1)
    parameter = model.gauss_params["means"]
    model.load_state_dict(theirs.state_dict())
    said = " ".join(capsys.readouterr().out.split())
    assert "colours of SH degree 2 are opened as degree 1" in said and "by degrees that are dropped" in said
    assert model.num_gaussians == 45 and model.gauss_params["means"] is parameter
    assert torch.equal(model.gauss_params["features_rest"].data, theirs.gauss_params["features_rest"].data[:, :3])
    assert torch.equal(model.filter_3d, theirs.filter_3d) and model.current_sh_degree == 1
    loss = (model.get_outputs_for_camera(camera)["rgb"] - theirs.get_outputs_for_camera(camera)["rgb"]).abs().max()
    assert 0.01 < loss < 0.6


def test_a_checkpoint_of_a_lower_degree_loses_nothing(
    make_splat_model: Callable[..., SplatModel], camera: Any, capsys: pytest.CaptureFixture
) -> None:
    theirs, model = make_splat_model(45, sh_degree=1), make_splat_model(60, sh_degree=3)
    model.load_state_dict(theirs.state_dict())
    assert "are opened as degree 3: nothing is lost" in " ".join(capsys.readouterr().out.split())
    torch.testing.assert_close(
        model.get_outputs_for_camera(camera)["rgb"], theirs.get_outputs_for_camera(camera)["rgb"]
    )


def test_a_checkpoint_of_the_same_degree_says_nothing(
    make_splat_model: Callable[..., SplatModel], capsys: pytest.CaptureFixture
) -> None:
    make_splat_model().load_state_dict(make_splat_model(45).state_dict())
    assert "SH degree" not in capsys.readouterr().out


def test_splatfactos_checkpoint_has_no_filter(make_splat_model: Callable[..., SplatModel]) -> None:
    state = {name: value for name, value in make_splat_model(45).state_dict().items() if name.startswith("gauss_")}
    model = make_splat_model()
    model.load_state_dict(state, strict=False)
    assert model.num_gaussians == 45 and not model.filter_3d.any()


def test_a_checkpoint_of_another_method(make_splat_model: Callable[..., SplatModel]) -> None:
    with pytest.raises(CheckpointError, match="holds no Gaussians, so it is of another method"):
        make_splat_model().load_state_dict({"field.weight": torch.ones(3)})


@pytest.mark.parametrize("first", ["state", "training"])
def test_training_goes_on_where_it_was(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    camera: Any,
    batch: dict[str, Any],
    first: str,
) -> None:
    options: dict[str, Any] = {"regularization": "density", "surface": small(), "sh_degree": 2}
    model = make_splat_model(**options)
    hooks = begin_training(model, STEPS)
    for step in range(SURFACE_STEP, SURFACE_STEP + 3):
        backward(model, hooks, step, camera, batch)
        hooks.after(step)
    model.current_sh_degree = 1
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    json.loads(state["_extra_state"]["about"])  # text that other programs can read

    other = make_splat_model(33, **options)
    if first == "state":
        other.load_state_dict(state)
        again = begin_training(other, STEPS)
    else:
        again = begin_training(other, STEPS)
        other.load_state_dict(state)
    assert (other.cost.state(), other.extent) == (model.cost.state(), model.extent)
    assert other.current_sh_degree == 1
    assert model.densifier is not None and other.densifier is not None
    assert model.regularizer is not None and other.regularizer is not None
    index, restored = model.regularizer.neighbours.index, other.regularizer.neighbours.index
    assert index is not None and restored is not None and torch.equal(index, restored)
    assert torch.equal(model.densifier.generator.get_state(), other.densifier.generator.get_state())
    step = SURFACE_STEP + 3
    one = backward(model, hooks, step, camera, batch)
    two = backward(other, again, step, camera, batch)
    for name, loss in one.items():
        torch.testing.assert_close(two[name], loss, msg=name)


@pytest.mark.parametrize(
    ("was", "now", "step", "fine"),
    [
        ("none", "density", 20, True),  # alike until the entropy stage begins
        ("none", "density", SURFACE_STEP, False),
        ("none", "dn-consistency", ENTROPY_STEP, False),
        ("density", "dn-consistency", SURFACE_STEP, True),
        ("density", "none", SURFACE_STEP, True),
        ("none", "planar", 10, True),
        ("none", "planar", 20, False),
        ("density", "planar", SURFACE_STEP, True),
    ],
)
@pytest.mark.parametrize("first", ["state", "callbacks"])
def test_a_checkpoint_of_another_stage(
    make_splat_model: Callable[..., SplatModel],
    begin_training: Callable[..., Any],
    was: str,
    now: str,
    step: int,
    fine: bool,
    first: str,
) -> None:
    trained = make_splat_model(regularization=was, surface=small())
    begin_training(trained, STEPS).before(step)
    state = trained.state_dict()
    model = make_splat_model(regularization=now, surface=small())
    calls = [lambda: model.load_state_dict(state), lambda: begin_training(model, STEPS)]
    calls[first == "callbacks"]()
    if fine:
        calls[first == "state"]()
        return
    first_step = 17 if now == "planar" else 47
    said = f"of step {step} is of a run without regularisation.* {now} at step {first_step}"
    with pytest.raises(ConfigError, match=said):
        calls[first == "state"]()


def test_a_checkpoint_opened_for_looking_needs_no_trainer(
    make_splat_model: Callable[..., SplatModel], begin_training: Callable[..., Any], camera: Any, batch: dict[str, Any]
) -> None:
    model = make_splat_model()
    hooks = begin_training(model, STEPS)
    backward(model, hooks, 0, camera, batch)
    hooks.after(0)
    other = make_splat_model()
    other.load_state_dict(model.state_dict())
    model.eval()
    torch.testing.assert_close(other.get_outputs_for_camera(camera)["rgb"], model.get_outputs_for_camera(camera)["rgb"])
    assert other.get_loss_dict(other.get_outputs_for_camera(camera), batch).keys() == {"rgb_loss"}


def test_groups_are_the_parameters(make_splat_model: Callable[..., SplatModel]) -> None:
    model = make_splat_model()
    groups = model.get_param_groups()
    assert set(groups) == {"means", "scales", "quats", "opacities", "features_dc", "features_rest"}
    assert all(groups[name] == [model.gauss_params[name]] for name in groups)

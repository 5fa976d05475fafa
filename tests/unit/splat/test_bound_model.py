"""The model that refines a mesh: what it draws, what it learns, what it keeps, and which meshes it refuses."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from nerfstudio.data.scene_box import SceneBox

from f3rm_ext.errors import CheckpointError, ConfigError, MeshError
from f3rm_ext.export.splats import SplatRun
from f3rm_ext.mesh.bound.gaussians import THICKNESS
from f3rm_ext.mesh.bound.model import FREE, PARAMETERS, BoundModel, BoundModelConfig
from f3rm_ext.mesh.mesh_files import write_mesh
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.splat.memory.packed import forget_gradient
from f3rm_ext.splat.mip import fuse


@pytest.fixture(scope="module")
def ball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ball of 80 triangles in the scene frame, of the colours of its directions."""
    mesh = trimesh.creation.icosphere(subdivisions=1, radius=0.6)
    colors = (np.asarray(mesh.vertices) / 0.6 * 127 + 128).astype(np.uint8)
    mesh = trimesh.Trimesh(mesh.vertices, mesh.faces, vertex_colors=colors, process=False)
    path = tmp_path_factory.mktemp("mesh") / "ball.ply"
    write_mesh(path, mesh, {"frame": "scene"})
    return path


@pytest.fixture
def make_model(ring_cameras: Callable[..., Any], ball: Path) -> Callable[..., BoundModel]:
    """Makes a model that has no mesh yet."""

    def make(**options: Any) -> BoundModel:
        config = BoundModelConfig(**{"mesh": ball, "sh_degree": 1, **options})
        box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        return config.setup(scene_box=box, num_train_data=6, metadata={"cameras": ring_cameras()})

    return make


@pytest.fixture
def do_step(ring_cameras: Callable[..., Any]) -> Callable[..., dict[str, torch.Tensor]]:
    """Takes a step of a run with one of the cameras."""
    batch = {"image": torch.rand(24, 32, 3, generator=torch.Generator().manual_seed(3)), "image_idx": 1}

    def take(model: BoundModel, hooks: Any, step: int, camera: int = 1) -> dict[str, torch.Tensor]:
        hooks.before(step)
        losses = model.get_loss_dict(model(ring_cameras()[camera : camera + 1]), batch)
        for parameter in model.gauss_params.values():
            forget_gradient(parameter)
        torch.stack(list(losses.values())).sum().backward()
        for name, optimizer in hooks.optimizers.items():
            if name != "features_rest":  # its gradient is packed, for another optimiser
                optimizer.step()
        hooks.after(step)
        return losses

    return take


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_training_starts_with_gaussians_on_the_mesh_in_its_colors(
    make_model: Any, begin_training: Any, ring_cameras: Any, count: int
) -> None:
    model = make_model(gaussians_per_triangle=count, initial_opacity=0.9)
    assert model.num_gaussians == 0
    begin_training(model)
    model.eval()
    assert model.num_gaussians == 80 * count and len(model.faces) == 80 and model.bound.per_triangle == count
    with torch.no_grad():
        found = model.gaussians
        assert found is model.gaussians, "a model that stays is not computed anew"
        torch.testing.assert_close(found.sizes()[:, 2], torch.full((80 * count,), THICKNESS * model.extent))
        picture = model.get_outputs_for_camera(ring_cameras()[:1])
    assert float(picture["accumulation"].max()) > 0.9
    # The camera is at +x, where the ball is red; between round Gaussians its far side shows.
    middle = picture["rgb"][12, 16] / picture["accumulation"][12, 16]
    assert float(middle[0]) > 0.05 + float(middle[1:].max())


def test_every_parameter_learns_and_the_number_stays(make_model: Any, begin_training: Any, do_step: Any) -> None:
    model = make_model()
    hooks = begin_training(model)
    before = {name: value.detach().clone() for name, value in model.gauss_params.items()}
    for step in range(2):
        losses = do_step(model, hooks, step)
    assert set(losses) == {"rgb_loss", "normal_consistency"} and float(losses["normal_consistency"]) > 0
    for name in PARAMETERS:
        if name != "features_rest" and name not in FREE:
            assert not torch.equal(before[name], model.gauss_params[name]), name
    assert model.num_gaussians == 80 and not model.filter_3d.any()
    assert not any(option.name.endswith("max-gaussians") for option in model.memory_options())
    without = make_model(normal_consistency=0.0)
    assert set(do_step(without, begin_training(without), 0)) == {"rgb_loss"}


def test_splats_far_from_the_mesh_stay_free(
    make_model: Any, make_splat_model: Any, begin_training: Any, do_step: Any, tmp_path: Path
) -> None:
    free = make_splat_model(200, sh_degree=2)
    state = {f"_model.{name}": value for name, value in free.state_dict().items() if isinstance(value, torch.Tensor)}
    torch.save({"pipeline": state}, tmp_path / "free.ckpt")
    model = make_model(start_from=tmp_path / "free.ckpt", free_beyond=0.1, laplacian=5.0)
    hooks = begin_training(model)
    bound = len(model.bound.scales)
    count = model.num_gaussians - bound
    # Where splats are dense, triangles are divided.
    assert 0 < count < 200 and model.bound.per_triangle == 1 and 80 < bound == len(model.faces) < 400
    with torch.no_grad():
        kept = model.gaussians[bound:]
        # A camera is at 2 from the middle, the ball's surface at about 0.6.
        away = 0.6 - free.gaussians.means.norm(dim=1)
        assert abs(count - int((away > 0.15).sum())) < 40
        drawn = fuse(free.gaussians, free.filter_3d)
        same = (drawn.means[:, None] == kept.means).all(dim=2).nonzero()
        assert len(same) == count
        torch.testing.assert_close(kept.scales[same[:, 1]], drawn.scales[same[:, 0]])
        torch.testing.assert_close(kept.opacities[same[:, 1]], drawn.opacities[same[:, 0]])
    before = {name: value.detach().clone() for name, value in model.gauss_params.items()}
    losses = do_step(model, hooks, 0)
    assert set(losses) == {"rgb_loss", "normal_consistency", "laplacian"}
    for name in (*FREE, "opacities", "vertices"):
        assert not torch.equal(before[name], model.gauss_params[name]), name
    again = make_model()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.bound.free_means, model.bound.free_means)
    started = make_model()
    begin_training(started)
    again.load_state_dict({name: value for name, value in started.state_dict().items() if "free_" not in name})
    assert again.num_gaussians == 80 and not len(again.bound.free_means)


def test_a_picture_follows_the_mesh(make_model: Any, begin_training: Any, ring_cameras: Any) -> None:
    model = make_model()
    begin_training(model)
    model.eval()
    camera = ring_cameras()[:1]
    before = model.get_outputs_for_camera(camera)["accumulation"]
    with torch.no_grad():
        half = model.bound.deform(model.bound.vertices * 0.5)
        model.set_bound(half)
    after = model.get_outputs_for_camera(camera)["accumulation"]
    assert 0.1 < float(after.sum() / before.sum()) < 0.4
    with torch.no_grad():
        old = model.gaussians
        model.gauss_params["vertices"].add_(1.0)
        assert model.gaussians is not old
        assert (model.gauss_params["vertices"] - half.vertices).min() > 0.9, "what was given stays as it was"


def test_a_resumed_run_goes_the_same_way_without_the_mesh_file(
    make_model: Any, begin_training: Any, do_step: Any
) -> None:
    whole = make_model(gaussians_per_triangle=3)
    hooks = begin_training(whole)
    do_step(whole, hooks, 0)
    stream = io.BytesIO()
    torch.save({"model": whole.state_dict(), "opt": {n: o.state_dict() for n, o in hooks.optimizers.items()}}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    part = make_model(gaussians_per_triangle=3, mesh=Path("gone.ply"))
    part.load_state_dict(saved["model"])
    again = begin_training(part)
    for name, state in saved["opt"].items():
        again.optimizers[name].load_state_dict(state)
    for model, run in ((whole, hooks), (part, again)):
        do_step(model, run, 1, camera=2)
    for name, value in whole.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, part.state_dict()[name]), name


def test_a_mesh_that_no_camera_sees(make_model: Any, begin_training: Any, tmp_path: Path) -> None:
    far = trimesh.creation.icosphere(subdivisions=0)
    far.apply_translation([0, 0, 500.0])
    write_mesh(tmp_path / "far.ply", far, {})
    with pytest.raises(MeshError, match=r"camera.*--pipeline\.model\.mesh-frame capture"):
        begin_training(make_model(mesh=tmp_path / "far.ply", mesh_frame="scene"))


def test_a_mesh_of_which_cameras_see_a_part(make_model: Any, begin_training: Any, tmp_path: Path) -> None:
    ball, far = (trimesh.creation.icosphere(subdivisions=0, radius=0.6) for _ in range(2))
    far.apply_translation([0, 0, 500.0])
    both = trimesh.util.concatenate([ball, far])
    assert isinstance(both, trimesh.Trimesh)
    write_mesh(tmp_path / "both.ply", both, {})
    model = make_model(mesh=tmp_path / "both.ply", mesh_frame="scene", gaussians_per_triangle=1)
    begin_training(model)
    assert model.num_gaussians == 40


def test_checkpoints_of_other_methods_are_refused(make_model: Any, make_splat_model: Any, begin_training: Any) -> None:
    with pytest.raises(CheckpointError, match="no mesh"):
        make_model().load_state_dict(make_splat_model().state_dict())
    model = make_model()
    begin_training(model)
    with pytest.raises(CheckpointError, match="no Gaussians"):
        make_splat_model().load_state_dict(model.state_dict())


def test_the_3d_filter_is_not_switched_on_later(make_model: Any) -> None:
    model = make_model()
    run = SplatRun(model, None, None, Path("none.ckpt"), 0)  # type: ignore[arg-type]
    run.set_filters(False, None)
    assert not model.config.mip.filter_2d
    with pytest.raises(ConfigError, match="3D filter"):
        run.set_filters(None, True)
    assert not model.config.mip.filter_3d


def test_the_run_has_a_mesh_and_one_length(ball: Path, tmp_path: Path) -> None:
    config = make_splat_config("sugar-ext-refine")
    model: Any = config.pipeline.model
    with pytest.raises(ConfigError, match=r"no mesh.*--pipeline\.model\.mesh"):
        config.fit_model()
    model.mesh = tmp_path / "gone.ply"
    with pytest.raises(MeshError, match=r"gone\.ply"):
        config.fit_model()
    model.mesh = ball
    config.fit_model()
    assert config.max_num_iterations == 15_000
    for time, steps in (("short", 2_000), ("medium", 7_000), ("long", 15_000)):
        config.max_num_iterations, model.refinement_time = 15_000, time
        config.fit_model()
        config.fit_model()
        assert config.max_num_iterations == steps
    config.max_num_iterations, model.refinement_time = 30, "short"
    with pytest.raises(ConfigError, match=r"short.*2000.*--max-num-iterations.*30"):
        config.fit_model()
    model.mesh, model.refinement_time, config.load_dir = None, None, tmp_path
    config.fit_model()


def test_the_viewer_may_look_at_a_model_without_its_mesh(make_model: Any) -> None:
    assert len(make_model().gaussians.means) == 0

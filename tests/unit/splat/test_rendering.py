"""From Gaussians to pictures: filters, depth, normals, and what is looked at in the viewer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.splat import rendering as drawing
from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh
from f3rm_ext.splat.mip import MipOptions, fuse
from f3rm_ext.splat.rendering import SplatScene, render, render_nearby, render_outputs

PLAIN = MipOptions(filter_2d=False, filter_3d=False)


@pytest.fixture
def view(ring_cameras: Callable[..., Any]) -> PinholeCameras:
    """From (2, 0, 0.4), on to the origin."""
    return PinholeCameras.of(ring_cameras()[:1])


@pytest.fixture
def scene(colorful: Callable[..., Gaussians]) -> SplatScene:
    return SplatScene(colorful(), MipOptions(), torch.full((60,), 0.05))


def wall(view: PinholeCameras, distance: float = 2.0, half: int = 12, apart: float = 0.12) -> Gaussians:
    """Opaque flat Gaussians on a plane across the view; red, their smallest axis along it."""
    turn = view.viewmats[0, :3, :3]
    steps = torch.arange(-half, half + 1) * apart
    x, y = torch.meshgrid(steps, steps, indexing="xy")
    local = torch.stack([x.flatten(), y.flatten(), torch.full((x.numel(),), distance)], dim=1)
    count = len(local)
    x, y, z, w = Rotation.from_matrix(turn.T.numpy()).as_quat().astype(np.float32)
    return Gaussians(
        means=(local - view.viewmats[0, :3, 3]) @ turn,
        scales=torch.tensor([0.1, 0.1, 1e-3]).log().repeat(count, 1),
        quats=torch.tensor([w, x, y, z]).repeat(count, 1),
        opacities=torch.full((count, 1), 6.0),
        features_dc=rgb_to_sh(torch.tensor([1.0, 0.0, 0.0])).repeat(count, 1),
        features_rest=torch.zeros(count, 0, 3),
    )


def test_fused_splats_without_a_filter_are_the_same_picture(scene: SplatScene, view: PinholeCameras) -> None:
    fused = SplatScene(fuse(scene.gaussians, torch.full((60,), 0.05)), replace(scene.mip, filter_3d=False))
    one, two = (render(s, view).rasterization.colors for s in (scene, fused))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    unfiltered = render(replace(scene, mip=PLAIN), view).rasterization.colors
    assert (one - unfiltered).abs().max() > 0.01


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_hidden_gaussians_are_as_good_as_gone(scene: SplatScene, view: PinholeCameras, backend: Any) -> None:
    scene = replace(scene, backend=backend)
    hidden = torch.arange(len(scene.gaussians)) % 2 == 0
    shown, taken = render(scene.hide(hidden), view), render(scene.take(~hidden), view)
    torch.testing.assert_close(shown.rgb, taken.rgb)
    torch.testing.assert_close(shown.rasterization.depth, taken.rasterization.depth)
    assert not torch.allclose(shown.rgb, render(scene, view).rgb, atol=0.01)


def test_normals_beside_colors_leave_them_alone(scene: SplatScene, view: PinholeCameras) -> None:
    background = torch.tensor([0.2, 0.4, 0.6])
    scene = replace(scene, background=background)
    without, along = (render(scene, view, normals=normals) for normals in (False, True))
    assert without.normals is None and along.normals is not None and along.normals.shape == (24, 32, 3)
    for name, value in without.outputs().items():
        torch.testing.assert_close(along.outputs()[name], value, msg=name)
    empty = along.rasterization.alpha == 0
    assert empty.any() and not along.normals[empty].any(), "normals lie over nothing, not over the background"
    assert torch.equal(along.outputs()["rgb"][empty], background.expand(int(empty.sum()), 3))


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_planes_without_colors_are_the_same(scene: SplatScene, view: PinholeCameras, backend: Any) -> None:
    scene = replace(scene, background=torch.tensor([0.2, 0.4, 0.6]), backend=backend)
    depth, colors = render_nearby(scene, view)
    alone, none = render_nearby(scene, view, rgb=False)
    assert none is None and (alone > 0).any()
    torch.testing.assert_close(alone, depth)
    rendered = render(scene, view)
    torch.testing.assert_close(colors, rendered.rasterization.colors)
    normals = render(scene, view, rgb=False, normals=True)
    assert normals.rasterization.colors.shape == (24, 32, 3)
    torch.testing.assert_close(normals.rasterization.colors, normals.normals)


def test_gradients_reach_everything_but_the_direction(scene: SplatScene, view: PinholeCameras) -> None:
    tensors = {name: value.clone().requires_grad_() for name, value in scene.gaussians.tensors().items()}
    drawn = render(replace(scene, gaussians=Gaussians.from_tensors(tensors), sh_degree=0), view, normals=True)
    assert drawn.normals is not None
    drawn.rasterization.colors.square().sum().backward(retain_graph=True)
    for name in ("means", "scales", "quats", "opacities", "features_dc"):
        grad = tensors[name].grad
        assert grad is not None and torch.isfinite(grad).all() and grad.any(), name
    assert tensors["features_rest"].grad is None, "coefficients above the degree in use are not read"


def test_near_plane(scene: SplatScene, view: PinholeCameras) -> None:
    assert render(replace(scene, near_plane=0.01), view).rasterization.alpha.any()
    assert not render(replace(scene, near_plane=5.0), view).rasterization.alpha.any()


@pytest.mark.parametrize("distance", [1.0, 2.0])
def test_a_wall_has_its_distance_and_faces_the_camera(view: PinholeCameras, distance: float) -> None:
    outputs = render_outputs(SplatScene(wall(view, distance), PLAIN), view, OutputGuard())
    middle = slice(4, 20), slice(4, 28)
    torch.testing.assert_close(outputs["accumulation"][middle], torch.ones(16, 24, 1), atol=0.01, rtol=0)
    torch.testing.assert_close(outputs["depth"][middle], torch.full((16, 24, 1), distance), atol=1e-3, rtol=0)
    torch.testing.assert_close(outputs["rgb"][middle], torch.tensor([1.0, 0, 0]).expand(16, 24, 3), atol=0.01, rtol=0)
    towards = (1 - view.forward[0]) / 2  # of the normal −forward, as a colour
    for name in ("normal", "normal_from_depth"):
        torch.testing.assert_close(outputs[name][middle], towards.expand(16, 24, 3), atol=0.02, rtol=0, msg=name)


def test_where_there_is_little_there_is_no_normal(view: PinholeCameras) -> None:
    thin = wall(view)
    thin.opacities.fill_(-3.0)
    outputs = render_outputs(SplatScene(thin, PLAIN), view, OutputGuard())
    faint = outputs["accumulation"][..., 0] < drawing.SOLID
    assert faint.any() and outputs["depth"][faint].any()
    assert not outputs["normal"][faint].any() and not outputs["normal_from_depth"][faint].any()


def test_pictures_are_colors(scene: SplatScene, view: PinholeCameras) -> None:
    bright = replace(scene.gaussians, features_dc=scene.gaussians.features_dc + 5)
    outputs = render_outputs(replace(scene, gaussians=bright), view, OutputGuard())
    assert outputs["rgb"].max() == 1
    assert not any(value.requires_grad for value in outputs.values())


def test_normals_that_fail_leave_the_picture(
    scene: SplatScene, view: PinholeCameras, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("broken on purpose")

    expected = render_outputs(scene, view, OutputGuard())
    monkeypatch.setattr(drawing, "normals_from_depth", broken)
    outputs = render_outputs(scene, view, OutputGuard())
    assert set(expected) - set(outputs) == {"normal_from_depth"}
    assert torch.equal(outputs["rgb"], expected["rgb"]) and torch.equal(outputs["normal"], expected["normal"])
    assert "broken on purpose" in " ".join(capsys.readouterr().out.split())

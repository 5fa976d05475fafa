"""The CUDA rasteriser and densification with gsplat's own Python code of 1.4.0 and 1.5.3, over kernels that check.

The version that is not installed is taken from the package index: reading its signatures from a copy of ours would only
repeat what we believe of it.
"""

import dataclasses
import gc
import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend.gsplat_kernels import Kernels
from pretend.tensors import PretendCuda, on_the_cpu
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rasterize import Rasterization, prepare, rasterize
from f3rm_ext.splat.rasterize.gsplat_backend import CHANNEL_CHUNK
from f3rm_ext.splat.rendering import RenderSettings, SplatScene, render

LEAVES = ("means", "quats", "sizes", "alphas", "colors", "viewmat", "background")


def make_scene(channels: int = 3, count: int = 40) -> dict[str, Tensor]:
    """Gaussians around the origin, some of them off screen, and a camera; on the CPU."""
    generator = torch.Generator().manual_seed(channels)
    means = torch.rand(count, 3, generator=generator) * 2 - 1
    means[::3, 0] *= 12.0
    viewmat = torch.eye(4)
    viewmat[2, 3] = 3.0
    return {
        "means": means,
        "quats": torch.randn(count, 4, generator=generator),
        "sizes": 0.12 * torch.exp(0.6 * torch.randn(count, 3, generator=generator)),
        "alphas": torch.rand(count, generator=generator) * 0.98 + 0.01,
        "colors": torch.rand(count, channels, generator=generator),
        "viewmat": viewmat,
        "background": torch.rand(channels, generator=generator),
    }


def draw(scene: dict[str, Tensor], device: Any, **options: Any) -> tuple[Rasterization, dict[str, Tensor]]:
    """Draws on a device; returns the picture and the leaves of the graph, of which the pose is one."""
    leaves = {name: value.to(device).detach().requires_grad_() for name, value in scene.items()}
    K = torch.tensor([[44.0, 0.0, 18.8], [0.0, 38.0, 14.3], [0.0, 0.0, 1.0]]).to(device)
    found = rasterize(**leaves, K=K, width=37, height=29, absgrad=True, **options)  # type: ignore[arg-type]
    found.means2d.retain_grad()
    return found, leaves


def differentiate(found: Rasterization, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values and gradients of a picture, on the CPU."""
    shape = found.colors.shape
    weights = torch.linspace(-1, 1, shape.numel()).reshape(shape).to(leaves["means"].device)
    ((found.colors * weights).sum() + found.depth.sum() + found.alpha.square().sum()).backward()
    values = {name: getattr(found, name) for name in ("colors", "depth", "alpha", "means2d")}
    values |= {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}  # type: ignore[misc]
    values |= {"gradient of means2d": found.means2d.grad, "absgrad": found.means2d.absgrad}  # type: ignore[attr-defined]
    return {name: value.detach().cpu() for name, value in values.items()}


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("channels", [1, 3, 40])
def test_pictures_and_gradients_are_those_of_the_cpu(channels: int, antialiased: bool, kernels: Kernels) -> None:
    scene = make_scene(channels)
    ours, leaves = draw(scene, "cuda", antialiased=antialiased)
    assert isinstance(ours.colors, PretendCuda) and ours.radii.dtype == torch.int32
    found = differentiate(ours, leaves)
    with on_the_cpu():
        theirs, leaves = draw(scene, "cpu", antialiased=antialiased, backend="torch")
        expected = differentiate(theirs, leaves)
    # Versions differ in how far a Gaussian reaches, by what is too faint to matter in these pictures.
    drawn = (ours.radii.cpu() > 0) & (theirs.radii > 0)
    assert int(drawn.sum()) > 15
    for values in (found, expected):
        values["means2d"] = values["means2d"][drawn]
    if channels > CHANNEL_CHUNK:
        found.pop("absgrad")  # |a| + |b| where one pass has |a + b|
    for name, value in found.items():
        assert (value - expected[name]).norm() <= 1e-3 * expected[name].norm() + 1e-6, name
    composites = -(-(channels + 1) // CHANNEL_CHUNK)
    assert kernels.calls.count("project") == kernels.calls.count("project backward") == 1
    assert kernels.calls.count("composite") == kernels.calls.count("composite backward") == composites


@pytest.mark.parametrize("antialiased", [False, True])
def test_a_projection_serves_many_pictures(antialiased: bool, kernels: Kernels) -> None:
    """Strips of two sets of values, 70 channels and 3, are those of whole pictures."""
    scene = make_scene(70)
    scene["background"].zero_()
    K = torch.tensor([[44.0, 0.0, 18.8], [0.0, 38.0, 14.3], [0.0, 0.0, 1.0]]).cuda()
    on_gpu: dict[str, Any] = {
        name: value.cuda() for name, value in scene.items() if name not in ("colors", "background")
    }
    strips = prepare(**on_gpu, K=K, width=37, height=29, antialiased=antialiased)
    many, few = scene["colors"].cuda(), scene["colors"][:, :3].cuda()
    found = {rows: (strip(many), strip(few)) for rows in ((0, 16), (16, 29)) for strip in [strips(rows)]}
    assert kernels.calls == ["project", *["cross tiles", "offsets", *["composite"] * 3] * 2]
    whole, _ = draw(scene, "cuda", antialiased=antialiased)
    for (top, bottom), (picture, part) in found.items():
        assert not picture.requires_grad
        torch.testing.assert_close(picture.cpu(), whole.colors.detach().cpu()[top:bottom])
        torch.testing.assert_close(part, picture[..., :3])


def test_depth_of_planes_is_that_of_the_cpu(kernels: Kernels) -> None:
    """It takes four more channels and no more kernels of gsplat."""

    def draw_planes(device: Any) -> tuple[Tensor, dict[str, Tensor]]:
        made = make_scene()
        made["means"][:, 2] += 3.0
        leaves = {name: made[name].to(device).requires_grad_() for name in ("means", "quats")}
        scales, opacities = made["sizes"].log().to(device), made["alphas"].logit()[:, None].to(device)
        dc, rest = made["colors"].to(device), torch.zeros(40, 0, 3, device=device)
        gaussians = Gaussians(leaves["means"], scales, leaves["quats"], opacities, dc, rest)
        K = torch.tensor([[44.0, 0.0, 18.8], [0.0, 38.0, 14.3], [0.0, 0.0, 1.0]]).to(device)
        view = PinholeCameras(torch.eye(4, device=device)[None], K[None], torch.tensor([37]), torch.tensor([29]))
        scene = SplatScene(gaussians, torch.zeros(40, device=device), MipOptions())
        black, settings = torch.zeros(3, device=device), RenderSettings(backend="torch" if device == "cpu" else "auto")
        found = render(scene, view, 0, black, settings, planes=True)
        assert found.plane_depth is not None
        sure = found.rasterization.alpha.detach() > 0.3
        torch.where(sure, found.plane_depth, 0).sin().sum().backward()
        return torch.where(sure, found.plane_depth.detach(), 0).cpu(), leaves

    ours, leaves = draw_planes("cuda")
    with on_the_cpu():
        expected, theirs = draw_planes("cpu")
    assert int((expected > 0).sum()) > 50
    assert (ours - expected).norm() <= 1e-3 * expected.norm()
    for name, leaf in leaves.items():
        grad, other = leaf.grad, theirs[name].grad
        assert grad is not None and other is not None and (grad.cpu() - other).norm() <= 1e-2 * other.norm(), name
    assert kernels.calls.count("project") == kernels.calls.count("composite") == 1


def test_nothing_in_view_leaves_the_background(kernels: Kernels) -> None:
    scene = make_scene()
    scene["means"][:, 2] -= 9.0
    found, leaves = draw(scene, "cuda")
    torch.testing.assert_close(found.colors.cpu(), leaves["background"].cpu().expand(29, 37, 3))
    assert not bool(found.radii.cpu().any())
    assert all(bool(torch.isfinite(value).all()) for value in differentiate(found, leaves).values())


def test_the_centres_of_a_step_do_not_outlive_it(kernels: Kernels) -> None:
    gc.collect()
    gc.disable()
    try:
        found, leaves = draw(make_scene(), "cuda")
        differentiate(found, leaves)
        watched = weakref.ref(found.means2d)
        del found, leaves
        assert watched() is None
    finally:
        gc.enable()


def test_harmonics_are_ours(kernels: Kernels) -> None:
    import gsplat

    from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors

    generator = torch.Generator().manual_seed(0)
    coefficients, directions = torch.randn(9, 16, 3, generator=generator), torch.randn(9, 3, generator=generator)
    found = gsplat.spherical_harmonics(3, directions.cuda(), coefficients.cuda()).cpu()
    ours = sh_colors(3, directions, coefficients[:, 0], coefficients[:, 1:])
    torch.testing.assert_close((found + 0.5).clamp_min(0), ours, atol=1e-5, rtol=1e-5)


# --- densification ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trained:
    """Gaussians with optimisers, as training has them."""

    params: torch.nn.ParameterDict
    optimizers: dict[str, torch.optim.Optimizer]
    rasterization: Rasterization

    @classmethod
    def make(cls, device: str, seen: int = 20) -> "Trained":
        """Of 40 Gaussians, ``seen`` are in view and have large gradients."""
        generator = torch.Generator().manual_seed(1)
        shapes = {"means": 3, "scales": 3, "quats": 4, "opacities": 1}
        values = {name: torch.randn(40, width, generator=generator) for name, width in shapes.items()}
        values["scales"] -= 4.0
        values["opacities"][:] = 2.0
        params = torch.nn.ParameterDict({name: torch.nn.Parameter(value.to(device)) for name, value in values.items()})
        optimizers = {name: torch.optim.Adam([parameter], lr=1e-3) for name, parameter in params.items()}
        for parameter in params.values():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers.values():
            optimizer.step()
        means2d = torch.zeros(40, 2).to(device).requires_grad_()
        means2d.grad = torch.ones(40, 2).to(device)
        radii = torch.where(torch.arange(40) < seen, 5, 0).int().to(device)
        picture = torch.zeros(29, 37).to(device)
        return cls(params, optimizers, Rasterization(picture[..., None], picture, picture, means2d, radii))


def densify(device: str, **options: Any) -> tuple[Any, Trained]:
    """Runs four steps of the default strategy; in the fifth Gaussians grow, or opacities are reset."""
    densify = importlib.import_module("f3rm_ext.splat.densify")
    trained = Trained.make(device)
    densifier = densify.make_densifier(
        densify.DensifyOptions(start=1, every=5, pause_after_reset=0, stop_scale2d=4, **options), 1.0
    )
    changes = [
        densifier.step_post_backward(step, trained.rasterization, trained.params, trained.optimizers)
        for step in range(1, 5)
    ]
    assert not any(change.rows_changed for change in changes)
    counts = densifier.statistics["count"]
    assert torch.equal(counts.cpu(), torch.where(torch.arange(40) < 20, 4.0, 0.0)), "who is in view is wrong"
    torch.testing.assert_close(densifier.statistics["radii"].cpu()[:20], torch.full((20,), 5 / 37))
    return densifier, trained


def test_what_is_in_view_grows(kernels: Kernels) -> None:
    densifier, trained = densify("cuda", reset_every=3000)
    change = densifier.step_post_backward(5, trained.rasterization, trained.params, trained.optimizers)
    assert change.duplicated + change.split == 20 and not change.opacities_reset
    for name, parameter in trained.params.items():
        assert isinstance(parameter, PretendCuda) and len(parameter) == change.new_count, name
        assert trained.optimizers[name].param_groups[0]["params"][0] is parameter
        assert len(trained.optimizers[name].state[parameter]["exp_avg"]) == change.new_count


def test_opacities_are_reset(kernels: Kernels) -> None:
    """By gsplat 1.4 itself; 1.5.3 never does it, since its condition is always false."""
    densifier, trained = densify("cuda", reset_every=5, prune_opacity=0.05)
    before = trained.params["opacities"].detach().cpu().sigmoid()
    assert bool((before > 0.8).all())
    change = densifier.step_post_backward(5, trained.rasterization, trained.params, trained.optimizers)
    assert change.opacities_reset
    opacities = trained.params["opacities"]
    assert bool((opacities.detach().cpu().sigmoid() <= 0.1 + 1e-6).all())
    assert not bool(trained.optimizers["opacities"].state[opacities]["exp_avg"].cpu().any())


# --- other versions --------------------------------------------------------------------------------------------------


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import gsplat

    from f3rm_ext import compat

    monkeypatch.setattr(gsplat, "__version__", "1.3.0")
    with pytest.raises(ConfigError, match=r"Splats need gsplat 1\.4 or 1\.5, not 1\.3\.0: `pip install"):
        compat.check_gsplat_kernels()
    monkeypatch.setattr(compat, "has_cuda", lambda: True)
    works, found, advice = compat.describe_gsplat()
    assert not works and "cannot be used" in found and "1.4 or 1.5" in advice


def test_doctor_accepts_both(gsplat_version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from f3rm_ext import compat

    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(compat, "has_cuda", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / "bin" / "nvcc"))
    works, found, _ = compat.describe_gsplat()
    assert works and "compiled at first use" in found

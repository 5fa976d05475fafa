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
from pretend.tensors import PretendCuda
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Ellipsoids, Gaussians, sh_rest_count
from f3rm_ext.splat.memory import packed
from f3rm_ext.splat.memory.packed import packed_sh_colors
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rasterize import Rasterization, prepare, rasterize
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.gsplat_backend import CHANNEL_CHUNK
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors
from f3rm_ext.splat.rendering import SplatScene, render

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


def shapes_and_camera(leaves: dict[str, Tensor], **options: Any) -> tuple[Ellipsoids, Camera]:
    """The Gaussians without colours, and the camera, 37 × 29 pixels."""
    viewmat = leaves["viewmat"]
    K = torch.tensor([[44.0, 0.0, 18.8], [0.0, 38.0, 14.3], [0.0, 0.0, 1.0]]).to(viewmat.device)
    return Ellipsoids(*(leaves[name] for name in Ellipsoids._fields)), Camera(viewmat, K, 37, 29, **options)


def draw(scene: dict[str, Tensor], device: Any, **options: Any) -> tuple[Rasterization, dict[str, Tensor]]:
    """Draws on a device; returns the picture and the leaves of the graph, of which the pose is one."""
    leaves = {name: value.to(device).detach().requires_grad_() for name, value in scene.items()}
    shapes, camera = shapes_and_camera(leaves, **options)
    found = rasterize(shapes, leaves["colors"], camera, leaves["background"], absgrad=True)
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
def test_pictures_and_gradients(channels: int, antialiased: bool, kernels: Kernels) -> None:
    """Kernels get what they need, however many channels there are, and every argument gets its gradient back."""
    scene = make_scene(channels)
    scene["colors"][:] = scene["colors"][0]
    found, leaves = draw(scene, "cuda", antialiased=antialiased)
    assert isinstance(found.colors, PretendCuda) and found.radii.dtype == torch.int32
    assert 15 < int((found.radii > 0).sum()) < 40
    expected = found.alpha.detach().cpu()[..., None] * scene["colors"][0] + scene["background"]
    torch.testing.assert_close(found.colors.detach().cpu(), expected)
    composites = -(-(channels + 1) // CHANNEL_CHUNK)
    assert kernels.calls == ["project", "cross tiles", "offsets", *["composite"] * composites]
    values = differentiate(found, leaves)
    for name, value in values.items():
        assert bool(value.isfinite().all()), name
        assert bool(value.any()) or name == "gradient of alphas", name
    assert kernels.calls.count("project backward") == 1
    assert kernels.calls.count("composite backward") == composites


@pytest.mark.parametrize("antialiased", [False, True])
def test_a_projection_serves_many_pictures(antialiased: bool, kernels: Kernels) -> None:
    """Strips of two sets of values, 70 channels and 3, are those of whole pictures."""
    scene = {name: value.cuda() for name, value in make_scene(70).items()}
    strips = prepare(*shapes_and_camera(scene, antialiased=antialiased))
    many, few = scene["colors"], scene["colors"][:, :3]
    found = {rows: (strip(many), strip(few)) for rows in ((0, 16), (16, 29)) for strip in [strips(rows)]}
    assert kernels.calls == ["project", *["cross tiles", "offsets", *["composite"] * 3] * 2]
    for (top, bottom), (picture, part) in found.items():
        assert picture.shape == (bottom - top, 37, 70) and not picture.requires_grad
        torch.testing.assert_close(part, picture[..., :3])


def test_depth_of_planes_takes_no_more_kernels(kernels: Kernels) -> None:
    made = make_scene()
    means, quats = (made[name].cuda().requires_grad_() for name in ("means", "quats"))
    scales, opacities = made["sizes"].log().cuda(), made["alphas"].logit()[:, None].cuda()
    gaussians = Gaussians(means, scales, quats, opacities, made["colors"].cuda(), torch.zeros(40, 0, 3).cuda())
    K = torch.tensor([[44.0, 0.0, 18.8], [0.0, 38.0, 14.3], [0.0, 0.0, 1.0]]).cuda()
    view = PinholeCameras(made["viewmat"].cuda()[None], K[None], torch.tensor([37]), torch.tensor([29]))
    found = render(SplatScene(gaussians, MipOptions(), torch.zeros(40).cuda()), view, planes=True)
    assert found.plane_depth is not None
    found.plane_depth.sum().backward()
    assert means.grad is not None and quats.grad is not None and bool(quats.grad.cpu().any())
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


@pytest.mark.parametrize(("degree", "dtype"), [(0, torch.float32), (2, torch.float32), (3, torch.float16)])
def test_harmonics(degree: int, dtype: torch.dtype, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored coefficients are evaluated by gsplat's kernel, in chunks, and are ours; degree 0 needs no kernel."""
    monkeypatch.setattr(packed, "CHUNK_KERNEL", 16)
    generator = torch.Generator().manual_seed(0)
    directions, dc = torch.randn(40, 3, generator=generator), torch.randn(40, 3, generator=generator)
    rest = (torch.randn(40, sh_rest_count(3), 3, generator=generator) * 0.3).to(dtype)
    found = packed_sh_colors(degree, directions.cuda(), dc.cuda(), torch.nn.Parameter(rest.cuda()))
    assert isinstance(found, PretendCuda) and found.dtype == torch.float32
    assert kernels.calls == (["harmonics"] * 3 if degree else [])
    expected = sh_colors(degree, directions, dc, rest.float())
    torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-5, atol=1e-6)


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
    assert changes == [None] * 4
    counts = densifier.statistics["count"]
    assert torch.equal(counts.cpu(), torch.where(torch.arange(40) < 20, 4.0, 0.0)), "who is in view is wrong"
    torch.testing.assert_close(densifier.statistics["radii"].cpu()[:20], torch.full((20,), 5 / 37))
    return densifier, trained


def test_what_is_in_view_grows(kernels: Kernels) -> None:
    densifier, trained = densify("cuda", reset_every=3000)
    change = densifier.step_post_backward(5, trained.rasterization, trained.params, trained.optimizers)
    assert change.new_count == 40 + 20 and bool((trained.params["opacities"].detach().cpu().sigmoid() > 0.8).all())
    for name, parameter in trained.params.items():
        assert isinstance(parameter, PretendCuda) and len(parameter) == change.new_count, name
        assert trained.optimizers[name].param_groups[0]["params"][0] is parameter
        assert len(trained.optimizers[name].state[parameter]["exp_avg"]) == change.new_count


def test_opacities_are_reset(kernels: Kernels) -> None:
    """By gsplat 1.4 itself; 1.5.3 never does it, since its condition is always false."""
    densifier, trained = densify("cuda", reset_every=5, prune_opacity=0.05)
    before = trained.params["opacities"].detach().cpu().sigmoid()
    assert bool((before > 0.8).all())
    densifier.step_post_backward(5, trained.rasterization, trained.params, trained.optimizers)
    opacities = trained.params["opacities"]
    assert bool((opacities.detach().cpu().sigmoid() <= 0.1 + 1e-6).all())
    assert not bool(trained.optimizers["opacities"].state[opacities]["exp_avg"].cpu().any())


# --- other versions --------------------------------------------------------------------------------------------------


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import gsplat

    from f3rm_ext import compat

    monkeypatch.setattr(gsplat, "__version__", "1.3.0")
    with pytest.raises(ConfigError, match=r"1\.5.*1\.3\.0.*pip install"):
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


def test_without_kernels_torch_evaluates_harmonics(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("nvcc fatal: Unsupported gpu architecture")

    generator = torch.Generator().manual_seed(0)
    directions, dc, rest = (torch.randn(40, *shape, generator=generator) for shape in ((3,), (3,), (15, 3)))
    for load in (lambda: None, broken):
        monkeypatch.setattr("f3rm_ext.compat.gsplat._gsplat_kernels", load)
        found = packed_sh_colors(3, directions.to(cuda), dc.to(cuda), torch.nn.Parameter(rest.to(cuda)))
        torch.testing.assert_close(found.cpu(), sh_colors(3, directions, dc, rest), rtol=1e-5, atol=1e-6)

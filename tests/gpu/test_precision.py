"""Mixed precision and fused Adam: a training step on CUDA as nerfstudio's trainer does it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nerfstudio.cameras.rays import RayBundle

from f3rm_ext.engine.optimizers import FusedAdamOptimizerConfig
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.nerf.model import F3rmModel

MakeModel = Callable[..., F3rmModel]
MakeRays = Callable[[int], RayBundle]
MakeSpec = Callable[..., FeatureSpec]
RAYS = 512


def _batch(dim: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    features = torch.nn.functional.normalize(torch.randn(RAYS // 2, dim, generator=generator), dim=-1)
    image = torch.rand(RAYS, 3, generator=generator)
    return {"image": image.to(device), "features": {"a": features.to(device)}}


def _losses(model: F3rmModel, rays: RayBundle, batch: dict[str, Any], half: bool) -> dict[str, torch.Tensor]:
    with torch.autocast("cuda", dtype=torch.float16, enabled=half):
        outputs = model(rays)
        return model.get_loss_dict(outputs, batch, model.get_metrics_dict(outputs, batch))


@pytest.mark.parametrize("loss", ["mse", "cosine"])
def test_a_mixed_precision_step_is_finite_and_learns(
    make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec, cuda: torch.device, loss: str
) -> None:
    model = make_model((make_spec("a", 64),), feature_loss=loss, feature_loss_mult=1.0).to(cuda).train()
    batch = _batch(64, cuda)
    optimizer = FusedAdamOptimizerConfig(lr=1e-2).setup([p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cuda")
    history: list[dict[str, float]] = []
    for _ in range(30):
        optimizer.zero_grad()
        losses = _losses(model, make_rays(RAYS).to(cuda), batch, half=True)
        assert all(torch.isfinite(value) for value in losses.values()), losses
        assert losses["feature_loss_a"].dtype == torch.float32
        scaler.scale(torch.stack([value.float() for value in losses.values()]).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append({name: float(value) for name, value in losses.items()})
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert scaler.get_scale() >= 1.0
    assert history[-1]["rgb_loss"] < 0.9 * history[0]["rgb_loss"]
    assert history[-1]["feature_loss_a"] < history[0]["feature_loss_a"]


def test_rendered_features_are_float32_under_autocast(
    make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec, cuda: torch.device
) -> None:
    model = make_model((make_spec("a", 64),)).to(cuda).train()
    with torch.autocast("cuda", dtype=torch.float16):
        features = model(make_rays(64).to(cuda))["features"]["a"]
        hidden = model.feature_field.render_hidden(
            torch.rand(8, 4, 3, device=cuda) - 0.5, torch.full((8, 4, 1), 0.25, device=cuda)
        )["a"]
    assert features.dtype == torch.float32
    assert hidden.dtype == torch.float32, "accumulated along the ray in half precision"


def test_half_precision_losses_are_close_to_single(
    make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec, cuda: torch.device
) -> None:
    model = make_model((make_spec("a", 64),)).to(cuda).train()
    batch = _batch(64, cuda)
    results = []
    for half in (False, True):
        torch.manual_seed(7)  # the samplers' jitter
        losses = _losses(model, make_rays(RAYS).to(cuda), batch, half)
        results.append({name: float(value) for name, value in losses.items()})
    single, mixed = results
    for name in ("rgb_loss", "feature_loss_a", "distortion_loss"):
        assert mixed[name] == pytest.approx(single[name], rel=0.05, abs=1e-6), name


def test_gradients_on_cuda_are_those_of_the_cpu(
    make_model: MakeModel, make_rays: MakeRays, make_spec: MakeSpec, cuda: torch.device
) -> None:
    gradients = []
    for device in (torch.device("cpu"), cuda):
        # Deterministic samples: no jitter, so that both devices see the same points.
        model = make_model((make_spec("a", 64),), backend="torch").to(device).train()
        for sampler in (model.proposal_sampler.initial_sampler, model.proposal_sampler.pdf_sampler):
            sampler.train_stratified = False  # type: ignore[assignment]
        losses = _losses(model, make_rays(RAYS).to(device), _batch(64, device), half=False)
        torch.stack(list(losses.values())).sum().backward()
        gradients.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
    on_cpu, on_cuda = gradients
    assert set(on_cpu) == set(on_cuda) and len(on_cpu) > 8
    for name, gradient in on_cpu.items():
        similarity = torch.nn.functional.cosine_similarity(gradient.flatten(), on_cuda[name].flatten(), dim=0)
        assert similarity > 0.99 or gradient.norm() < 1e-7, f"{name}: {float(similarity):.4f}"


def test_adam_is_fused_and_steps_as_the_plain_one(cuda: torch.device) -> None:
    start = torch.randn(1000, generator=torch.Generator().manual_seed(8))
    gradients = torch.randn(5, 1000, generator=torch.Generator().manual_seed(9))
    gradients[:, :500] = 0.0  # most of a hash table is not touched in a step
    results = []
    for fused in (True, False):
        parameter = torch.nn.Parameter(start.clone().to(cuda))
        config = FusedAdamOptimizerConfig(lr=1e-2)
        optimizer = config.setup([parameter]) if fused else torch.optim.Adam([parameter], lr=1e-2, eps=config.eps)
        assert bool(optimizer.param_groups[0].get("fused")) is fused
        for gradient in gradients:
            parameter.grad = gradient.to(cuda)
            optimizer.step()
        results.append(parameter.detach().cpu())
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[0][:500], start[:500])

"""Every method, regularisation and mode on the pretended GPU: devices, dtypes and shapes."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from pretend.gsplat_kernels import gsplat_kernels
from pretend.small import CASES, STEPS, build, on_cuda
from pretend.steps import Run, lift_made_up_features, look_at
from pretend.tensors import autocast, pretended
from torch import Tensor

WIDTH, HEIGHT = 40, 24


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def untrained(
    request: pytest.FixtureRequest, noise_capture: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """A run before its first step, without gradients, on a GPU with autocast."""
    method, mode = request.param
    with pretended("autocast"), gsplat_kernels():
        yield build(method, mode, noise_capture, tmp_path_factory.getbasetemp() / "features")


@pytest.mark.parametrize("mixed", [False, True], ids=["single", "mixed"])
def test_losses(untrained: Run, mixed: bool) -> None:
    model, mode = untrained.model, untrained.config.pipeline.model
    for step in STEPS.get(getattr(mode, "regularization", "none"), (0,)):
        untrained.before(step)
        with autocast() if mixed else nullcontext():
            inputs, batch = untrained.pipeline.datamanager.next_train(step)
            outputs, losses, metrics = untrained.losses(inputs, batch)
        on_cuda({name: value for name, value in outputs.items() if isinstance(value, Tensor)})
        on_cuda(losses)
        assert all(loss.shape == () and loss.dtype == torch.float32 for loss in losses.values()), losses
        assert set(metrics) >= {"psnr"}
        if step == 9601:
            assert "surface_normal" in losses
    assert model.device.type == "cuda"


@pytest.mark.parametrize("mixed", [False, True], ids=["single", "mixed"])
def test_pictures(untrained: Run, mixed: bool) -> None:
    """In evaluation, also under autocast, and for a query, which nothing asks for under autocast."""
    model = untrained.model
    splats = hasattr(model, "num_gaussians")
    if splats:
        lift_made_up_features(untrained, 8)
    with autocast() if mixed else nullcontext():
        model.eval()
        outputs = model.get_outputs_for_camera(look_at(WIDTH, HEIGHT).to("cuda"))
    scores, drawn = untrained.score(WIDTH, HEIGHT)
    on_cuda(outputs)
    on_cuda(drawn)
    shapes = {"rgb": 3, "accumulation": 1, "depth": 1, "feature_pca": 3}
    for name, channels in shapes.items():
        assert outputs[name].shape == (HEIGHT, WIDTH, channels) and outputs[name].dtype == torch.float32, name
        assert drawn[name].shape == outputs[name].shape
    assert scores.shape == (HEIGHT, WIDTH, 1) and scores.dtype == torch.float32

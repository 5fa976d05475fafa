"""Cameras around a ball, models of splats that were not trained, and runs that could have been."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import SceneBox

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import smoothing_filter
from f3rm_ext.splat.model import SplatModel, SplatModelConfig


@pytest.fixture
def use_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """In Triton's interpreter, where tests/cuda_contract/test_splat_triton.py runs some files again, has modules choose
    kernels of Triton for float32, with programs of given sizes; else they have those of numba."""

    def use(*users: Any, **sizes: int) -> None:
        def choose(modules: tuple[str, str], *tensors: torch.Tensor) -> Any:
            if tensors[0].dtype != torch.float32:
                return None
            chosen = importlib.import_module(modules[1])
            for name, size in sizes.items():
                monkeypatch.setattr(chosen, name, size, raising=False)
            return chosen

        if os.environ.get("TRITON_INTERPRET") == "1":
            for user in users:
                monkeypatch.setattr(user, "choose_kernels", choose)

    return use


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Linux without settings of CUDA's allocator, where CUDA has not started."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return monkeypatch


@pytest.fixture(scope="session")
def ring_cameras() -> Callable[..., Cameras]:
    """Makes cameras on a circle that look at the origin, z up, 32 × 24 pixels."""

    def make(count: int = 6, radius: float = 2.0) -> Cameras:
        poses = []
        for index in range(count):
            angle = 2 * math.pi * index / count
            back = torch.nn.functional.normalize(torch.tensor([math.cos(angle), math.sin(angle), 0.2]), dim=0)
            right = torch.nn.functional.normalize(torch.linalg.cross(torch.tensor([0.0, 0.0, 1.0]), back), dim=0)
            poses.append(torch.stack([right, torch.linalg.cross(back, right), back, radius * back], dim=1))
        return Cameras(torch.stack(poses), fx=30.0, fy=30.0, cx=16.0, cy=12.0, width=32, height=24)

    return make


@pytest.fixture(scope="session")
def colorful() -> Callable[..., Gaussians]:
    """Makes Gaussians of all colours, sizes and opacities in a ball around the origin."""

    def make(count: int = 60, sh_degree: int = 1, radius: float = 0.5) -> Gaussians:
        generator = torch.Generator().manual_seed(count)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(count, *shape, generator=generator)

        return Gaussians(
            means=radius * torch.nn.functional.normalize(normal(3), dim=1) * torch.rand(count, 1, generator=generator),
            scales=-2.5 + 0.5 * normal(3),
            quats=normal(4),
            opacities=normal(1),
            features_dc=normal(3),
            features_rest=0.2 * normal((sh_degree + 1) ** 2 - 1, 3),
        )

    return make


@pytest.fixture(scope="session")
def make_splat_model(
    ring_cameras: Callable[..., Cameras], colorful: Callable[..., Gaussians]
) -> Callable[..., SplatModel]:
    """Makes a model of colourful Gaussians, in evaluation mode, with a 3D filter."""

    def make(count: int = 60, metadata: Mapping[str, Any] | None = None, **options: Any) -> SplatModel:
        config = SplatModelConfig(**{"num_random": 20, "sh_degree": 1, **options})
        cameras = ring_cameras()
        box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        model: SplatModel = config.setup(
            scene_box=box, num_train_data=6, metadata={"cameras": cameras, **(metadata or {})}
        )
        gaussians = colorful(count, config.sh_degree)
        model.set_gaussians(
            gaussians, smoothing_filter(gaussians.means, PinholeCameras.of(cameras), options=config.mip)
        )
        return model.eval()

    return make


@pytest.fixture(scope="session")
def begin_training(ring_cameras: Callable[..., Cameras]) -> Callable[..., Any]:
    """Gives a model what the trainer gives it in 100 steps: ``before(step)``, ``after(step)`` and optimisers."""
    from nerfstudio.engine.callbacks import TrainingCallbackAttributes, TrainingCallbackLocation

    def begin(model: SplatModel) -> SimpleNamespace:
        photos = SimpleNamespace(cameras=ring_cameras(), metadata={})
        optimizers = {name: torch.optim.Adam(params, 1e-3) for name, params in model.get_param_groups().items()}
        attributes: Any = TrainingCallbackAttributes(
            optimizers=optimizers,  # type: ignore[arg-type]
            grad_scaler=None,  # type: ignore[arg-type]
            pipeline=SimpleNamespace(datamanager=SimpleNamespace(train_dataset=photos)),  # type: ignore[arg-type]
            trainer=SimpleNamespace(config=SimpleNamespace(max_num_iterations=100)),  # type: ignore[arg-type]
        )
        callbacks = model.train().get_training_callbacks(attributes)

        def run(location: TrainingCallbackLocation, step: int) -> None:
            for callback in callbacks:
                callback.run_callback_at_location(step, location)

        return SimpleNamespace(
            optimizers=optimizers,
            before=lambda step: run(TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, step),
            after=lambda step: run(TrainingCallbackLocation.AFTER_TRAIN_ITERATION, step),
        )

    return begin


@pytest.fixture(scope="session")
def make_splat_run(tiny_capture: Path, colorful: Callable[..., Gaussians]) -> Callable[..., Path]:
    """Writes a run of sugar-ext-lite on the tiny capture, not trained, of some options; gives its config.yml."""

    def make(root: Path, *, sh_degree_in_use: int | None = None, **options: Any) -> Path:
        from f3rm_ext.method_configs.splat_presets import make_splat_config

        config = make_splat_config("sugar-ext-lite")
        config.data, config.output_dir = tiny_capture, root
        config.experiment_name, config.timestamp = "e", "t"
        config.pipeline.datamanager.data = tiny_capture
        config.pipeline.datamanager.camera_res_scale_factor = 0.5
        config.pipeline.model.num_random = 20
        for name, value in options.items():
            setattr(config.pipeline.model.mip, name, value)
        pipeline = config.pipeline.setup(device="cpu", test_mode="val")
        model = pipeline.model
        gaussians = colorful(300, 2, radius=0.8)
        views = PinholeCameras.of(pipeline.datamanager.train_dataset.cameras)
        filter_3d = smoothing_filter(gaussians.means, views, options=model.config.mip)
        model.set_gaussians(gaussians, filter_3d if model.config.mip.filter_3d else None)
        if sh_degree_in_use is not None:
            model.current_sh_degree = sh_degree_in_use
        checkpoints = config.get_base_dir() / "nerfstudio_models"
        checkpoints.mkdir(parents=True)
        torch.save({"step": 7, "pipeline": pipeline.state_dict()}, checkpoints / "step-000000007.ckpt")
        config.save_config()
        return config.get_base_dir() / "config.yml"

    return make


@pytest.fixture(scope="session")
def splat_config(make_splat_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.yml of a run at half the size of the files, with both filters; not to be changed."""
    return make_splat_run(tmp_path_factory.mktemp("splat-run"))

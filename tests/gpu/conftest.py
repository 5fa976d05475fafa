"""A device and a model for the tests that need CUDA.

Tests that ask for ``device`` instead of ``cuda`` can be rehearsed on the CPU: with the variable
F3RM_EXT_REHEARSE_GPU_TESTS set they run there, with smaller sizes, and the others are skipped as ever.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.data.scene_box import SceneBox

from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig, ProposalOptions

REHEARSED = bool(os.environ.get("F3RM_EXT_REHEARSE_GPU_TESTS")) and not torch.cuda.is_available()


@pytest.hookimpl(trylast=True)  # after the hook that skips whatever is in this folder
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a rehearsal, takes the skip mark from tests that do not insist on CUDA."""
    for item in items if REHEARSED else []:
        names = getattr(item, "fixturenames", ())
        if item.path.is_relative_to(Path(__file__).parent) and "device" in names and "cuda" not in names:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The CUDA device under test, or the CPU in a rehearsal."""
    return torch.device("cpu") if REHEARSED else torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def type_command(run_command: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Types a command for that device; returns what it said, having checked its exit code (``code``, 0)."""
    # Commands of other tests see no GPU. A fork of a process that saw none could not start CUDA.
    environment = {} if REHEARSED else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}

    def run(*arguments: object, code: int = 0, **more: str) -> str:
        done = run_command(*arguments, fresh=not REHEARSED, **environment, **more)
        assert done.code == code, done.text[-4000:]
        return done.text

    return run


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The CUDA device under test."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def exact_matmuls() -> Iterator[None]:
    """Float32 means float32: TF32, if somebody turns it on, would hide errors of the size looked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def empty_pool() -> None:
    """No test pays for what an earlier one left in torch's memory pool."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def make_model() -> Callable[..., F3rmModel]:
    """A model on the CPU, with parameters that make the picture anything but empty."""

    def make(specs: tuple[FeatureSpec, ...] = (), **options: Any) -> F3rmModel:
        small = GridOptions(num_levels=4, features_per_level=2, base_res=4, max_res=32, log2_hashmap_size=10)
        defaults: dict[str, Any] = {
            "grid": small,
            "feature_grid": small,
            "proposals": (ProposalOptions(num_samples=16, hidden_dim=16, grid=small),),
            "num_samples": 12,
            "init_density": 1.0,
            "backend": "auto",
        }
        torch.manual_seed(0)
        model: F3rmModel = F3rmModelConfig(**{**defaults, **options}).setup(
            scene_box=SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])),
            num_train_data=5,
            metadata={"feature_specs": specs, "feature_ray_fraction": 0.5},
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("table"):
                    parameter.normal_(generator=generator)
        return model

    return make

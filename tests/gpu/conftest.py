"""A device, a tiny model and tiny rays for the tests that need CUDA."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox
from torch.nn import functional

from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig, ProposalOptions


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The CUDA device under test."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def exact_matmuls() -> Iterator[None]:
    """Float32 means float32: TF32, which nerfstudio's commands turn on, would hide errors of the size looked for."""
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
def make_spec() -> Callable[..., FeatureSpec]:
    def make(name: str = "dense", dim: int = 12) -> FeatureSpec:
        generator = torch.Generator().manual_seed(dim)
        components, _ = torch.linalg.qr(torch.randn(dim, 3, generator=generator))
        display = DisplayBasis(torch.zeros(dim), components.T.contiguous(), -torch.ones(3), torch.ones(3))
        return FeatureSpec(name=name, dim=dim, extractor=name, identity={"extractor": name}, display=display)

    return make


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


@pytest.fixture
def make_rays() -> Callable[[int], RayBundle]:
    """Rays on the CPU; new ones for every step, since training moves them by the poses' corrections."""

    def make(count: int) -> RayBundle:
        generator = torch.Generator().manual_seed(count)
        return RayBundle(
            origins=torch.rand(count, 3, generator=generator) - 0.5,
            directions=functional.normalize(torch.randn(count, 3, generator=generator), dim=-1),
            pixel_area=torch.full((count, 1), 1e-6),
            camera_indices=torch.arange(count)[:, None] % 5,
        )

    return make


@pytest.fixture
def make_camera() -> Callable[[int], Cameras]:
    """A square camera that looks at the middle of the scene, on the CPU."""

    def make(size_px: int) -> Cameras:
        pose = torch.eye(4)[None, :3]
        pose[0, 2, 3] = 0.8
        half = size_px / 2
        return Cameras(pose, fx=float(size_px), fy=float(size_px), cx=half, cy=half, width=size_px, height=size_px)

    return make

"""A tiny model and tiny rays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox
from torch.nn import functional

from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig, ProposalOptions


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
    def make(specs: tuple[FeatureSpec, ...] = (), fraction: float = 0.5, **options: Any) -> F3rmModel:
        small = GridOptions(num_levels=3, features_per_level=2, base_res=4, max_res=16, log2_hashmap_size=10)
        defaults: dict[str, Any] = {
            "grid": small,
            "feature_grid": small,
            "proposals": (ProposalOptions(num_samples=8, hidden_dim=8, grid=small),),
            "num_samples": 6,
            "hidden_dim": 8,
            "color_hidden_dim": 8,
            "appearance_dim": 4,
            "feature_hidden_dim": 8,
            "feature_pe_frequencies": 2,
            "camera_optimizer": CameraOptimizerConfig(mode="SO3xR3"),
        }
        torch.manual_seed(0)
        config = F3rmModelConfig(**{**defaults, **options})
        return config.setup(
            scene_box=SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])),
            num_train_data=5,
            metadata={"feature_specs": specs, "feature_ray_fraction": fraction},
        )

    return make


@pytest.fixture
def make_rays() -> Callable[[int], RayBundle]:
    def make(count: int) -> RayBundle:
        generator = torch.Generator().manual_seed(count)
        directions = functional.normalize(torch.randn(count, 3, generator=generator), dim=-1)
        return RayBundle(
            origins=torch.rand(count, 3, generator=generator) - 0.5,
            directions=directions,
            pixel_area=torch.full((count, 1), 1e-6),
            camera_indices=torch.arange(count)[:, None] % 5,
        )

    return make

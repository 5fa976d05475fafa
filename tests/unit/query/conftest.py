"""A field that can be queried without having been trained, and a run whose features are labels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from f3rm_ext.features.space import ExtraOutput, FeatureSpace
from f3rm_ext.model_components.chunked_rendering import ChunkedRenderer
from f3rm_ext.query.run import Run, load_run


@pytest.fixture(scope="module")
def run(untrained: Any) -> Run:
    return load_run(untrained.config)


@dataclass
class ToyHead:
    """Features W h of values h."""

    name: str
    weight: Tensor
    extractor: str = "toy"
    identity: dict[str, str] = field(default_factory=dict)
    basis: Tensor | None = None
    clusters: Tensor | None = None
    energy: float = 1.0

    @property
    def dim(self) -> int:
        return len(self.weight)

    @property
    def display_mean(self) -> Tensor:
        return self.weight.mean(dim=1)

    def space(self) -> FeatureSpace:
        return FeatureSpace.from_linear_map(self.weight, self.energy)

    def colors(self, features: Tensor) -> Tensor:
        return features[..., :3].abs().clamp(0, 1)


class ToyField:
    """Values are fixed functions of a ray's direction, or of a point."""

    def __init__(self, *heads: ToyHead, chunk: int = 10) -> None:
        self.device, self.training = torch.device("cpu"), False
        self.heads = {head.name: head for head in heads}
        self.chunked = ChunkedRenderer(chunk)

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def query_heads(self) -> dict[str, ToyHead]:
        return self.heads

    def values(self, head: ToyHead, at: Tensor) -> Tensor:
        mix = torch.randn(3, head.weight.shape[1], generator=torch.Generator().manual_seed(7))
        return (3 * at @ mix).sin()

    def features(self, name: str, at: Tensor) -> Tensor:
        """Full features in float64, (..., D)."""
        head = self.heads[name]
        return self.values(head, at).double() @ head.weight.double().T

    def render_camera(self, camera: Cameras, extra: Mapping[str, ExtraOutput]) -> dict[str, Tensor]:
        def forward(rays: RayBundle) -> dict[str, Tensor | list]:
            outputs: dict[str, Tensor | list] = {"rgb": rays.directions.abs()}
            for name, compute in extra.items():
                plain = {key: value for key, value in outputs.items() if isinstance(value, Tensor)}
                outputs[name] = compute(plain, lambda head: self.values(self.heads[head], rays.directions))
            return outputs

        return self.chunked.render(camera.generate_rays(camera_indices=0, keep_shape=True), forward, self.device)

    def render_points(self, points: Tensor) -> dict[str, Tensor]:
        return {name: self.values(head, points) for name, head in self.heads.items()}


@pytest.fixture
def make_head() -> Callable[..., ToyHead]:
    """Makes a head of a dimension, with that many hidden values."""

    def make(name: str = "toy", dim: int = 40, hidden: int = 6, **options) -> ToyHead:
        return ToyHead(name, torch.randn(dim, hidden, generator=torch.Generator().manual_seed(dim)), **options)

    return make


@pytest.fixture
def make_field(make_head: Callable[..., ToyHead]) -> Callable[..., ToyField]:
    """Makes a field with these heads, or with one of 40 dimensions."""

    def make(*heads: ToyHead, **options) -> ToyField:
        return ToyField(*(heads or (make_head(),)), **options)

    return make


@pytest.fixture
def camera() -> Cameras:
    """9 x 7 pixels."""
    return Cameras(torch.eye(4)[None, :3], fx=8.0, fy=8.0, cx=4.5, cy=3.5, width=9, height=7)

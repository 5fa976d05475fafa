"""A scene that is known exactly: a ball whose upper and lower halves have features of their own; a report's content."""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.utils.rich_utils import CONSOLE
from PIL import Image
from torch import Tensor

from f3rm_ext.features.space import ExtraOutput, FeatureSpace
from f3rm_ext.html.content import ReportContent, Stage
from f3rm_ext.model_components.chunked_rendering import ChunkedRenderer

RADIUS = 0.5


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what tests cache away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("F3RM_EXT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said on nerfstudio's console."""
    lines: list[str] = []
    monkeypatch.setattr(CONSOLE, "log", lambda *parts, **options: lines.append(" ".join(map(str, parts))))
    return lines


@pytest.fixture(scope="module")
def quick_collection() -> Iterator[None]:
    """Lets ``gc.collect()`` see only what is made from here on: everything older would take it half a second a time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass
class HalvesHead:
    """Two features of D dimensions: one for z ≥ 0, one for z < 0."""

    name: str = "halves"
    dim: int = 5
    extractor: str = "halves"
    identity: dict[str, str] = field(default_factory=dict)
    basis: Tensor | None = None
    clusters: Tensor | None = None
    largest: int = 0

    @property
    def weight(self) -> Tensor:
        """(D, 2): the features of the halves."""
        return torch.randn(self.dim, 2, generator=torch.Generator().manual_seed(3))

    @property
    def display_mean(self) -> Tensor:
        return self.weight.mean(dim=1)

    def space(self) -> FeatureSpace:
        return FeatureSpace.from_linear_map(self.weight)

    def colors(self, features: Tensor) -> Tensor:
        self.largest = max(self.largest, len(features))
        return features[..., :3].abs().clamp(0, 1)


class Ball:
    """A model by protocol: rays are met by a ball of radius ½ about the origin, coloured by position."""

    def __init__(self, dim: int = 5, chunk: int = 100) -> None:
        self.device, self.training = torch.device("cpu"), False
        self.heads = {"halves": HalvesHead(dim=dim)}
        self.chunked = ChunkedRenderer(chunk)
        self.pixels = 0

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def query_heads(self) -> dict[str, HalvesHead]:
        return self.heads

    def render_camera(
        self, camera: Cameras, extra: Mapping[str, ExtraOutput], obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        rays = camera.generate_rays(camera_indices=0, keep_shape=True)
        self.pixels += rays.origins[..., 0].numel()
        return self.chunked.render(rays, lambda part: self._forward(part, extra), self.device)

    def _forward(self, rays: RayBundle, extra: Mapping[str, ExtraOutput]) -> dict[str, Tensor | list]:
        middle = (rays.origins * rays.directions).sum(-1, keepdim=True)
        under = middle**2 - (rays.origins**2).sum(-1, keepdim=True) + RADIUS**2
        hit = (under >= 0).float()
        depth = torch.where(under >= 0, -middle - under.clamp_min(0).sqrt(), 50.0)
        at = rays.origins + rays.directions * depth
        outputs: dict[str, Tensor | list] = {
            "rgb": hit * (at + 0.5).clamp(0, 1),
            "accumulation": hit,
            "depth": depth,
            "expected_depth": depth + 0.01,
        }
        for name, compute in extra.items():
            plain = {key: value for key, value in outputs.items() if isinstance(value, Tensor)}
            outputs[name] = compute(plain, lambda head: hit * self.render_points(at)[head])
        return outputs

    def render_points(self, points: Tensor) -> dict[str, Tensor]:
        upper = (points[:, 2:] >= 0).float()
        return {name: torch.cat([upper, 1 - upper], dim=1) for name in self.heads}


class DenseBall(Ball):
    """The same, of a density that is known: 100 where x ≥ 0, 1 elsewhere."""

    def density_at(self, points: Tensor) -> Tensor:
        return torch.where(points[:, 0] >= 0, 100.0, 1.0)


@pytest.fixture
def make_ball() -> Callable[..., Ball]:
    """Makes a ball, with or without a density."""

    def make(dense: bool = False, **options: int) -> Ball:
        return (DenseBall if dense else Ball)(**options)

    return make


@pytest.fixture
def around() -> Cameras:
    """Six cameras at distance 2 that look at the origin from all sides, 24 x 20 pixels."""
    poses = []
    for axis in range(3):
        for side in (-1.0, 1.0):
            back = torch.zeros(3)
            back[axis] = side
            up = torch.roll(back.abs(), 1)
            right = torch.linalg.cross(up, back)
            poses.append(torch.stack([right, torch.linalg.cross(back, right), back, 2.0 * back], dim=1))
    return Cameras(torch.stack(poses), fx=30.0, fy=30.0, cx=12.0, cy=10.0, width=24, height=20)


@pytest.fixture
def make_content(tmp_path: Path) -> Callable[..., ReportContent]:
    """Content as the demo gives it for a room with two held-out views; keyword arguments replace fields."""
    rng = np.random.default_rng(0)

    def save(name: str) -> str:
        Image.fromarray(rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
        return f"{name}.png"

    def view(number: int) -> dict[str, Any]:
        names = ("true", "rendered", "depth", "features", "true_depth", "true_features")
        return {
            "image": f"frame_{number}.png",
            "width": 16,
            "height": 12,
            "depth_error_m": {"median": 0.02, "within_5cm": 0.75},
            "files": {name: save(f"view_{number}_{name}") for name in names},
        }

    def make(**fields: Any) -> ReportContent:
        save("exemplar_photo"), save("exemplar_crop")
        found = [{"view": 0, "row": 1, "col": 2, "score": 0.97, "visible": True, "inside": True, "file": save("h0")}]
        found.append({**found[0], "view": 1, "inside": False, "file": save("h1")})
        objects = [
            {"name": "duck", "image": "a.png", "x": 3.0, "y": 4.0, "views": 2, "hits": 1, "iou": 0.25},
            {"name": "vase", "image": "b.png", "x": 5.0, "y": 6.0, "views": 2, "hits": 2, "iou": 0.75},
            {"name": "hidden", "image": "b.png", "x": 5.0, "y": 6.0, "views": 0, "hits": 0, "iou": None},
        ]
        measured = {
            "steps": 100,
            "device": "cpu",
            "heads": {"dense-daisy": "dense-daisy"},
            "train_images": 9,
            "eval_images": 2,
            "views": [view(0), view(1)],
            "depth": {"median_m": 0.0213, "within_5cm": 0.75, "views": 2},
            "query": {
                "head": "dense-daisy",
                "image": "a.png",
                "x": 3.0,
                "y": 4.0,
                "object": "duck",
                "low": 0.5,
                "high": 0.97,
                "views": found,
                "threshold": 0.5,
                "objects": objects,
            },
        }
        images = [
            {"image": f"i{k}.png", "pixels": 100, "appearances": 1, "steps": 50, "rays": 50 + k} for k in range(9)
        ]
        defaults: dict[str, Any] = {
            "title": "A room",
            "data_name": "room",
            "synthetic": True,
            "measured": measured,
            "pictures": tmp_path,
            "metrics": {
                "psnr": 24.5,
                "psnr_std": 0.5,
                "ssim": 0.8,
                "l1": 0.03,
                "feature_cosine_dense-daisy": 0.95,
                "feature_mse_dense-daisy": 1e-3,
                "num_rays_per_sec": 12345.0,
            },
            "lpips_note": "LPIPS is left out: its weights are not there.",
            "coverage": {
                "images": 9.0,
                "images_seen": 9.0,
                "appearances_min": 1.0,
                "appearances_max": 1.0,
                "rays": 486.0,
                "effective_epochs": 0.54,
                "per_image": images,
            },
            "curves": {
                "Train Metrics Dict/psnr": [(0.0, 10.0), (50.0, 18.0), (99.0, 22.0)],
                "Train Rays / Sec": [(0.0, 1.0), (1.0, 8000.0), (2.0, 9000.0)],
            },
            "stages": [Stage("Making the room", 20.0, "f3rm-ext scene synth capture"), Stage("Training", 100.0)],
            "next_commands": [("Look", "ns-viewer --load-config config.yml")],
            "facts": [("device", "cpu")],
        }
        return ReportContent(**{**defaults, **fields})

    return make

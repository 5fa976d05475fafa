"""Cameras around an object, with a depth that varies over the image."""

import pytest
import torch
from torch import Tensor

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.cameras import CameraSet


def random_rotations(count: int, generator: torch.Generator) -> Tensor:
    matrices = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(matrices)
    Q = Q * R.diagonal(dim1=1, dim2=2).sign()[:, None]
    return Q * torch.linalg.det(Q).sign()[:, None, None]


@pytest.fixture
def cameras() -> CameraSet:
    """Five cameras of any pose, landscape and portrait, none with its principal point in the middle."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[640.0, 480], [480, 640], [500, 500], [640, 480], [300, 200]], dtype=torch.float64)
    return CameraSet(
        rotations=random_rotations(5, generator),
        centers=torch.randn(5, 3, generator=generator, dtype=torch.float64),
        focals_px=sizes.amin(1, keepdim=True) * torch.tensor([[0.8, 0.9]], dtype=torch.float64),
        principals_px=sizes * torch.tensor([0.55, 0.46], dtype=torch.float64),
        sizes_px=sizes,
    )


@pytest.fixture
def depth() -> Tensor:
    """Depth of 16 × 16 cells of five cameras, 1 to 3."""
    return 1 + 2 * torch.rand(5, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def small_vit() -> VisionTransformer:
    """A ViT of two blocks with random weights, trained on images of 3 × 3 patches, as it were."""
    torch.manual_seed(0)
    return VisionTransformer.sized(64, 2, 3, 14)

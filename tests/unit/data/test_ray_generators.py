"""The table of rays gives nerfstudio's own rays."""

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.model_components.ray_generators import RayGenerator

from f3rm_ext.data.ray_generators import (
    LensRayGenerator,
    TableRayGenerator,
    is_plain,
    make_ray_generator,
    shares_intrinsics,
)

DISTORTION = [0.06, -0.08, 0.01, 0.0, -0.001, 0.0002]


def cameras(count: int = 3, *, distortion: list[float] | None = None, **changes) -> Cameras:
    turns = torch.linalg.qr(torch.randn(count, 3, 3, generator=torch.Generator().manual_seed(0)))[0]
    turns = turns * torch.linalg.det(turns)[:, None, None]
    values = {
        "camera_to_worlds": torch.cat([turns, torch.arange(3.0 * count).reshape(count, 3, 1)], dim=-1),
        "fx": 17.0,
        "fy": 19.0,
        "cx": 10.3,
        "cy": 6.9,
        "width": 21,
        "height": 14,
        "distortion_params": None if distortion is None else torch.tensor(distortion).expand(count, -1),
        **changes,
    }
    return Cameras(**values)


def assert_same_rays(make, cams: Cameras, indices: torch.Tensor) -> None:
    ours, theirs = make(indices), RayGenerator(cams)(indices)
    for name in ("origins", "directions", "camera_indices"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    torch.testing.assert_close(ours.pixel_area, theirs.pixel_area, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(ours.metadata["directions_norm"], theirs.metadata["directions_norm"])
    assert ours.shape == theirs.shape


@pytest.mark.parametrize("distortion", [None, [0.0] * 6, DISTORTION])
def test_same_rays_as_nerfstudio(distortion: list[float] | None):
    cams = cameras(distortion=distortion)
    indices = torch.cartesian_prod(torch.arange(3), torch.arange(14), torch.arange(21))
    make = make_ray_generator(cams, "cpu")
    assert isinstance(make, TableRayGenerator)
    assert_same_rays(make, cams, indices)


@pytest.mark.parametrize(
    "changes",
    [
        {"fx": torch.tensor([17.0, 17.0, 18.0])},
        {"width": torch.tensor([21, 21, 20])},
        {"camera_type": CameraType.FISHEYE},
        {"times": torch.tensor([0.0, 0.5, 1.0])},
        {"distortion_params": torch.tensor([DISTORTION, DISTORTION, [0.0] * 6])},
    ],
)
def test_other_cameras_use_nerfstudios_generator(changes: dict):
    cams = cameras(**changes)
    assert not shares_intrinsics(cams)
    indices = torch.tensor([[0, 3, 4], [2, 13, 19]])
    torch.testing.assert_close(
        make_ray_generator(cams, "cpu")(indices).directions, RayGenerator(cams)(indices).directions
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"fx": torch.tensor([17.0, 17.0, 18.0]), "cy": torch.tensor([6.9, 7.0, 6.8])},
        {"width": torch.tensor([21, 21, 20]), "height": torch.tensor([14, 9, 14]), "distortion": [0.0] * 6},
        {"distortion_params": torch.tensor([DISTORTION, DISTORTION, [0.0] * 6])},
    ],
)
def test_lenses_without_a_table_give_nerfstudios_rays(changes: dict):
    cams = cameras(**changes)
    assert is_plain(cams) and not shares_intrinsics(cams)
    indices = torch.cartesian_prod(torch.arange(3), torch.arange(9), torch.arange(20))
    assert_same_rays(LensRayGenerator(cams), cams, indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{}, {"fx": torch.tensor([17.0, 17.0, 18.0])}], ids=["table", "nerfstudio's"])
def test_autocast_does_not_round_rays(changes: dict, dtype: torch.dtype):
    make = make_ray_generator(cameras(**changes), "cpu")
    indices = torch.cartesian_prod(torch.arange(3), torch.arange(14), torch.arange(21))
    expected = make(indices)
    with torch.autocast("cpu", dtype=dtype):
        found = make(indices)
    for name in ("origins", "directions", "pixel_area"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0)

"""Cameras in three conventions project the same points to the same pixels."""

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from f3rm_ext.sfm.cameras import OPENGL_SIGNS, CameraSet, PyTorch3DCameras


def visible_features(cameras: CameraSet) -> Tensor:
    """Twenty points in front of each camera."""
    generator = torch.Generator().manual_seed(2)
    pixels = torch.rand(len(cameras), 20, 2, generator=generator, dtype=torch.float64) * cameras.sizes_px[:, None]
    away = 1 + torch.rand(len(cameras), 20, 1, generator=generator, dtype=torch.float64)
    return cameras.centers[:, None] + cameras.directions(pixels) * away


def project_pytorch3d(cameras: PyTorch3DCameras, points: Tensor, sizes: Tensor) -> Tensor:
    """PyTorch3D's documented projection, for rows of points: view, perspective, NDC, then its screen."""
    view = points @ cameras.R + cameras.T[:, None]
    ndc = view[..., :2] / view[..., 2:] * cameras.focal_length[:, None] + cameras.principal_point[:, None]
    return sizes[:, None] / 2 - ndc * sizes.amin(dim=1)[:, None, None] / 2


def test_a_projection_undoes_directions(cameras: CameraSet) -> None:
    pixels = torch.rand(5, 20, 2, dtype=torch.float64) * cameras.sizes_px[:, None]
    points = cameras.centers[:, None] + 3 * cameras.directions(pixels)
    found, depth = cameras.project(points)
    torch.testing.assert_close(found, pixels, atol=1e-9, rtol=0)
    torch.testing.assert_close(depth, torch.full_like(depth, 3.0))


def test_pytorch3d_projects_to_the_same_pixels(cameras: CameraSet) -> None:
    points = visible_features(cameras)
    made = cameras.to_pytorch3d()
    pixels, depth = cameras.project(points)
    assert (depth > 0).all()
    torch.testing.assert_close(project_pytorch3d(made, points, cameras.sizes_px), pixels, atol=1e-5, rtol=0)
    back = CameraSet.from_pytorch3d(made, cameras.sizes_px)
    torch.testing.assert_close(back.project(points)[0], pixels, atol=1e-9, rtol=0)
    torch.testing.assert_close(back.centers, cameras.centers)


def to_opengl(cameras: CameraSet) -> Tensor:
    axes = cameras.rotations * torch.tensor(OPENGL_SIGNS, dtype=torch.float64)
    return torch.cat([axes, cameras.centers[..., None]], dim=-1)


def test_nerfstudio_sees_the_same_rays(cameras: CameraSet) -> None:
    points = visible_features(cameras)
    pixels, _ = cameras.project(points)
    for index in range(len(cameras)):
        fx, fy = cameras.focals_px[index].tolist()
        cx, cy = cameras.principals_px[index].tolist()
        width, height = (int(side) for side in cameras.sizes_px[index])
        theirs = Cameras(to_opengl(cameras)[index : index + 1].float(), fx, fy, cx, cy, width, height)
        rays = theirs.generate_rays(0, coords=pixels[index].flip(-1).float())
        toward = torch.nn.functional.normalize(points[index] - cameras.centers[index], dim=-1)
        torch.testing.assert_close(rays.directions.double(), toward, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [3, 4])
def test_opengl_and_back(cameras: CameraSet, rows: int) -> None:
    c2w = to_opengl(cameras)
    if rows == 4:
        c2w = torch.cat([c2w, torch.eye(4, dtype=torch.float64)[3:].expand(5, 1, 4)], dim=1)
    back = CameraSet.from_opengl(c2w, cameras.focals_px, cameras.principals_px, cameras.sizes_px)
    points = visible_features(cameras)
    torch.testing.assert_close(back.project(points)[0], cameras.project(points)[0], atol=1e-5, rtol=0)


def test_a_moved_world_looks_the_same(cameras: CameraSet) -> None:
    first = cameras.relative_to_first(scale=2.5)
    torch.testing.assert_close(first.rotations[0], torch.eye(3, dtype=torch.float64))
    assert first.centers[0].norm() < 1e-12
    points = visible_features(cameras)
    local = 2.5 * (points - cameras.centers[0]) @ cameras.rotations[0]
    torch.testing.assert_close(first.project(local)[0], cameras.project(points)[0])


def test_a_crop_sees_its_part_larger(cameras: CameraSet) -> None:
    corners = torch.tensor([[10.0, 20.0]], dtype=torch.float64).expand(5, 2)
    sides = torch.full((5,), 150.0, dtype=torch.float64)
    points = visible_features(cameras)
    pixels = cameras.project(points)[0]
    cropped = cameras.crop(corners, sides, 300)
    torch.testing.assert_close(cropped.project(points)[0], (pixels - corners[:, None]) * 2)
    assert cropped.sizes_px.unique().tolist() == [300]

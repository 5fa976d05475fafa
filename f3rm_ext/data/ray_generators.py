"""Rays through pixels; fast where all cameras share one set of intrinsics."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from nerfstudio.cameras.camera_utils import radial_and_tangential_undistort
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.model_components.ray_generators import RayGenerator
from torch import Tensor

from f3rm_ext.data.uploads import upload

RayMaker = Callable[[Int[Tensor, "rays 3"]], RayBundle]
_ROWS_AT_A_TIME = 64


def make_ray_generator(cameras: Cameras, device: torch.device | str) -> RayMaker:
    """Makes the function that turns (image, row, column) into rays on a device.

    Cameras that share size, focal length and distortion get a table. All others get nerfstudio's generator, which
    undoes the lens distortion of every ray anew: on a CPU that is most of the time of a small batch. On a GPU it would
    make the host wait for the device several times per batch, so perspective cameras get one that does not. Rays stay
    float32 under the autocast of nerfstudio's trainer, because half precision would shift them by half a pixel.
    """
    cameras = cameras.to(device)
    if shares_intrinsics(cameras):
        return TableRayGenerator(cameras)
    if torch.device(device).type == "cuda" and is_plain(cameras):
        return LensRayGenerator(cameras)
    generator = RayGenerator(cameras).to(device)

    def make(ray_indices: Int[Tensor, "rays 3"]) -> RayBundle:
        with torch.autocast(torch.device(device).type, enabled=False):
            return generator(ray_indices)

    return make


@torch.no_grad()
def picture_rays(camera: Cameras, device: torch.device | str, obb_box: OrientedBox | None = None) -> RayBundle:
    """Returns the rays of a picture, (h, w), within a box if any, as nerfstudio's ``generate_rays`` does.

    On a GPU that makes the host wait some twenty times. The rays of a perspective camera are made without.
    """
    if torch.device(device).type != "cuda" or obb_box is not None or not is_plain(camera):
        return camera.to(device).generate_rays(camera_indices=0, keep_shape=True, obb_box=obb_box)
    height, width = int(camera.height[0]), int(camera.width[0])
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2)
    rays = LensRayGenerator(camera, device)(torch.nn.functional.pad(places, (1, 0)))
    return rays.reshape((height, width))


def is_plain(cameras: Cameras) -> bool:
    """Whether all cameras are perspective cameras (with or without distortion), and nothing else is known of them."""
    if cameras.times is not None or len(cameras.shape) != 1 or not len(cameras):
        return False
    if any(isinstance(value, Tensor) for value in (cameras.metadata or {}).values()):
        return False
    return bool((cameras.camera_type == CameraType.PERSPECTIVE.value).all())


def shares_intrinsics(cameras: Cameras) -> bool:
    """Whether all cameras are perspective cameras (with or without distortion) that differ only in their poses."""
    if not is_plain(cameras):
        return False
    tensors = [cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.width, cameras.height]
    if cameras.distortion_params is not None:
        tensors.append(cameras.distortion_params)
    return all(bool((tensor == tensor[:1]).all()) for tensor in tensors)


class TableRayGenerator:
    """nerfstudio's rays, with the lens distortion of every pixel undone once, for cameras that share their intrinsics.

    The table takes 8 bytes per pixel on the device of the cameras. Not a torch module, because the datamanager must
    have no buffers.
    """

    def __init__(self, cameras: Cameras) -> None:
        self.cameras = cameras
        # One row and column more, because a pixel's area is measured to its neighbours below and to the right.
        height, width = int(cameras.height[0]) + 1, int(cameras.width[0]) + 1
        self.columns = width
        columns = torch.arange(width, device=cameras.device) + 0.5
        x = (columns - cameras.cx[0]) / cameras.fx[0]
        distortion = cameras.distortion_params
        self.table: Float[Tensor, "points 2"] = torch.empty((height * width, 2), device=cameras.device)
        for first in range(0, height, _ROWS_AT_A_TIME):
            rows = torch.arange(first, min(first + _ROWS_AT_A_TIME, height), device=cameras.device) + 0.5
            y = (rows - cameras.cy[0]) / cameras.fy[0]
            grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], dim=-1).reshape(-1, 2)
            if distortion is not None and bool((distortion[0] != 0).any()):
                grid = radial_and_tangential_undistort(grid, distortion[0].expand(len(grid), -1))
            self.table[first * width : first * width + len(grid)] = grid

    def __call__(self, ray_indices: Int[Tensor, "rays 3"]) -> RayBundle:
        """Returns the rays of pixels, as nerfstudio's ``RayGenerator`` does."""
        ray_indices = ray_indices.to(self.table.device)
        place = ray_indices[:, 1] * self.columns + ray_indices[:, 2]
        seen = self.table[torch.stack([place, place + 1, place + self.columns])]
        return _rays(self.cameras.camera_to_worlds, ray_indices[:, 0], seen)


class LensRayGenerator:
    """nerfstudio's rays of perspective cameras with several sets of intrinsics, without a wait for the device.

    Not a torch module, because the datamanager must have no buffers.

    Args:
        cameras: cameras for which :func:`is_plain` is true.
        device: where rays are wanted; the cameras' own by default.
    """

    def __init__(self, cameras: Cameras, device: torch.device | str | None = None) -> None:
        device = cameras.device if device is None else device
        distortion = cameras.distortion_params
        if distortion is not None and not bool((distortion != 0).any()):
            distortion = None
        parts = [cameras.camera_to_worlds.flatten(1), cameras.cx, cameras.cy, cameras.fx, cameras.fy]
        numbers = upload(torch.cat(parts if distortion is None else [*parts, distortion], dim=-1), device)
        self.poses = numbers[:, :12].reshape(-1, 3, 4)
        self.centre, self.focal = numbers[:, 12:14], numbers[:, 14:16]
        self.distortion = None if distortion is None else numbers[:, 16:]
        self.offset = upload(torch.tensor([[[0.5, 0.5]], [[1.5, 0.5]], [[0.5, 1.5]]]), device)
        """To the centres of a pixel and of its neighbours to the right and below, (x, y) px."""

    def __call__(self, ray_indices: Int[Tensor, "rays 3"]) -> RayBundle:
        """Returns the rays of pixels, see :class:`TableRayGenerator`."""
        ray_indices = ray_indices.to(self.offset.device)
        image = ray_indices[:, 0]
        seen = (ray_indices[:, 1:].flip(-1) + self.offset - self.centre[image]) / self.focal[image]
        if self.distortion is not None:
            seen = radial_and_tangential_undistort(seen, self.distortion[image])
        return _rays(self.poses, image, seen)


def _rays(poses: Float[Tensor, "cams 3 4"], image: Int[Tensor, "rays"], seen: Float[Tensor, "3 rays 2"]) -> RayBundle:
    """Rays, given where they and those one pixel to the right and one below meet the plane at distance 1 (OpenCV)."""
    # OpenCV to OpenGL: y up, looking along -z.
    local = torch.cat([seen[..., :1], -seen[..., 1:], torch.full_like(seen[..., :1], -1.0)], dim=-1)
    pose = poses[image]
    # A product of matrices would be rounded to half precision under autocast.
    directions = (pose[:, :, :3] * local[:, :, None, :]).sum(dim=-1)
    norm = directions.norm(dim=-1, keepdim=True)
    directions = directions / norm
    sides = (directions[1:] - directions[:1]).norm(dim=-1)
    return RayBundle(
        origins=pose[:, :, 3],
        directions=directions[0],
        pixel_area=(sides[0] * sides[1])[:, None],
        camera_indices=image[:, None],
        metadata={"directions_norm": norm[0]},
    )

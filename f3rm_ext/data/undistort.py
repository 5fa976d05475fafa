"""Undistorts photos to images of a pinhole camera, and downscales images together with their cameras.

Positions are in pixels; the centre of the first pixel is (0.5, 0.5), as in nerfstudio. A downscaled image is the exact
average over the area of each new pixel. Its camera is scaled by the same ratio on each axis, so that a point of the
scene falls on the same place of the image at every size.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Float64
from nerfstudio.cameras.camera_utils import radial_and_tangential_undistort
from nerfstudio.cameras.cameras import Cameras, CameraType

from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.errors import CaptureError

MAX_HALF_ANGLE_RAD = math.radians(60)
"""A fisheye photo is kept up to this angle from the axis; beyond it a flat image would be mostly rim."""
_MAX_RESIDUAL_PX = 0.25
_ALL_VALID = 1 - 1e-3
_ROWS_AT_A_TIME = 256
_RIM_SAMPLES = 256


@dataclass(frozen=True)
class PinholeIntrinsics:
    """Size and intrinsics of an image without distortion, px."""

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float

    def resized(self, height_px: int, width_px: int) -> "PinholeIntrinsics":
        """Returns the same view with another number of pixels."""
        x, y = width_px / self.width, height_px / self.height
        return PinholeIntrinsics(width_px, height_px, self.fx * x, self.fy * y, self.cx * x, self.cy * y)


@dataclass(frozen=True)
class DistortedCamera:
    """Size, intrinsics and distortion of a photo."""

    frame: PinholeIntrinsics
    distortion: tuple[float, ...] = (0.0,) * 6
    """k1 k2 k3 k4 p1 p2, as nerfstudio orders them."""
    fisheye: bool = False
    """Whether distances from the centre are angles."""

    @classmethod
    def of(cls, cameras: Cameras, image_idx: int, name: object) -> "DistortedCamera":
        """Reads one of several cameras. Raises CaptureError if its images cannot be undistorted to a pinhole camera."""
        kind = CameraType(int(cameras.camera_type[image_idx]))
        if kind not in (CameraType.PERSPECTIVE, CameraType.FISHEYE):
            raise CaptureError(
                f"The image {name} is of a camera of type {kind.name}, but splats need perspective or fisheye "
                "(OPENCV_FISHEYE) cameras: cut it into perspective images first, or train f3rm-ext on it."
            )
        values = [float(getattr(cameras, key)[image_idx]) for key in ("fx", "fy", "cx", "cy")]
        frame = PinholeIntrinsics(int(cameras.width[image_idx]), int(cameras.height[image_idx]), *values)
        distortion = cls.distortion
        if cameras.distortion_params is not None:
            distortion = tuple(float(value) for value in cameras.distortion_params[image_idx])
        return cls(frame, distortion, kind is CameraType.FISHEYE)

    @property
    def is_pinhole(self) -> bool:
        """Whether the photo has no distortion."""
        return not self.fisheye and not any(self.distortion)

    def project(
        self, x: Float64[np.ndarray, "*points"], y: Float64[np.ndarray, "*points"]
    ) -> tuple[Float64[np.ndarray, "*points"], Float64[np.ndarray, "*points"]]:
        """Projects directions (x, y, 1) into the photo: column and row, px."""
        if self.fisheye:
            tangent = np.hypot(x, y)
            ratio = np.where(tangent > 1e-9, np.arctan(tangent) / np.maximum(tangent, 1e-9), 1.0)
            x, y = x * ratio, y * ratio
        x, y = self._distort(x, y)
        return self.frame.fx * x + self.frame.cx, self.frame.fy * y + self.frame.cy

    def rim(self) -> Float64[np.ndarray, "4 points 2"]:
        """Returns the directions (x, y, 1) along the photo's left, right, upper and lower edges. Raises ValueError if
        the distortion has no inverse there."""
        width, height = self.frame.width, self.frame.height
        along = np.linspace(0.0, 1.0, min(max(width, height), _RIM_SAMPLES) + 1)
        x, y = along * width, along * height
        edges = [np.stack(np.broadcast_arrays(u, v), -1) for u, v in ((0.0, y), (width, y), (x, 0.0), (x, height))]
        focal = np.array([self.frame.fx, self.frame.fy])
        seen = (np.stack(edges) - np.array([self.frame.cx, self.frame.cy])) / focal
        undistorted_xy = radial_and_tangential_undistort(
            torch.from_numpy(seen), torch.tensor(self.distortion, dtype=torch.float64), eps=1e-9
        ).numpy()
        back = np.stack(self._distort(undistorted_xy[..., 0], undistorted_xy[..., 1]), -1)
        with np.errstate(invalid="ignore"):
            good = (np.abs(back - seen) * focal < _MAX_RESIDUAL_PX).all(-1)
            # A solution beyond the fold of the polynomial points elsewhere.
            good &= (undistorted_xy * seen).sum(-1) >= 0
        if not self.fisheye:
            if not good.all():
                raise ValueError
            return undistorted_xy
        reach = np.linalg.norm(seen, axis=-1)
        angle = np.where(good, np.linalg.norm(undistorted_xy, axis=-1), np.inf)
        tangent = np.tan(np.minimum(angle, MAX_HALF_ANGLE_RAD))
        return seen * (tangent / np.maximum(reach, 1e-9))[..., None]

    def _distort(self, x: Any, y: Any) -> tuple[Any, Any]:
        k1, k2, k3, k4, p1, p2 = self.distortion
        r = x * x + y * y
        radial = 1.0 + r * (k1 + r * (k2 + r * (k3 + r * k4)))
        return (
            x * radial + 2 * p1 * x * y + p2 * (r + 2 * x * x),
            y * radial + 2 * p2 * x * y + p1 * (r + 2 * y * y),
        )


@lru_cache(maxsize=4096)
def largest_pinhole(lens: DistortedCamera) -> PinholeIntrinsics:
    """Returns the pinhole camera of the largest image that the photo fills, with no more pixels than the photo.

    It keeps the focal lengths if the pixels suffice, so that the centre stays as sharp as in the photo.

    Raises:
        ValueError: the distortion folds the photo and cannot be undone.
    """
    if lens.is_pinhole:
        return lens.frame
    left, right, upper, lower = lens.rim()
    x0, x1 = float(left[:, 0].max()), float(right[:, 0].min())
    y0, y1 = float(upper[:, 1].max()), float(lower[:, 1].min())
    width, height = (x1 - x0) * lens.frame.fx, (y1 - y0) * lens.frame.fy
    if not (width >= 1 and height >= 1):
        raise ValueError
    ratio = min(1.0, math.sqrt(lens.frame.width * lens.frame.height / (width * height)))
    fx, fy, width, height = lens.frame.fx * ratio, lens.frame.fy * ratio, width * ratio, height * ratio
    whole_width, whole_height = max(1, int(width + 1e-6)), max(1, int(height + 1e-6))
    return PinholeIntrinsics(
        width=whole_width,
        height=whole_height,
        fx=fx,
        fy=fy,
        cx=-x0 * fx - (width - whole_width) / 2,
        cy=-y0 * fy - (height - whole_height) / 2,
    )


def undistort(picture: ImagePixels, lens: DistortedCamera, view: PinholeIntrinsics) -> ImagePixels:
    """Undistorts a photo to a pinhole camera, bilinearly; colours with alpha are weighted by alpha.

    A pixel is valid if all of its source pixels are.
    """
    if lens.is_pinhole and view == lens.frame:
        return picture
    import cv2

    columns, rows = _source_map(lens, view)

    def remap(values: np.ndarray) -> np.ndarray:
        return cv2.remap(values, columns, rows, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)

    width, height = lens.frame.width, lens.frame.height
    slack = 1e-3
    valid = (columns >= -0.5 - slack) & (columns <= width - 0.5 + slack)
    valid &= (rows >= -0.5 - slack) & (rows <= height - 0.5 + slack)
    if picture.valid is not None:
        valid &= remap(picture.valid.numpy().astype(np.float32)) >= _ALL_VALID
    elif valid.all():
        return ImagePixels(_map_colors(picture, remap))
    return ImagePixels(_map_colors(picture, remap), torch.from_numpy(valid))


def shrunk(picture: ImagePixels, height_px: int, width_px: int) -> ImagePixels:
    """Downscales an image by averaging over areas; colours with alpha are weighted by alpha.

    A pixel is valid if all of its source pixels are.
    """
    if picture.pixels.shape[:2] == (height_px, width_px):
        return picture
    import cv2

    def average(values: np.ndarray) -> np.ndarray:
        return cv2.resize(values, (width_px, height_px), interpolation=cv2.INTER_AREA)

    valid = None
    if picture.valid is not None:
        valid = torch.from_numpy(average(picture.valid.numpy().astype(np.float32)) >= _ALL_VALID)
    return ImagePixels(_map_colors(picture, average), valid)


def shrunk_size(height_px: int, width_px: int, ratio: float) -> tuple[int, int]:
    """Returns height and width times a ratio, rounded, at least 1."""
    return max(1, int(height_px * ratio + 0.5)), max(1, int(width_px * ratio + 0.5))


def shrunk_cameras(cameras: Cameras, height_px: int, width_px: int) -> Cameras:
    """Returns pinhole cameras of images downscaled to a common size."""
    x, y = width_px / cameras.width, height_px / cameras.height
    return Cameras(
        camera_to_worlds=cameras.camera_to_worlds,
        fx=cameras.fx * x,
        fy=cameras.fy * y,
        cx=cameras.cx * x,
        cy=cameras.cy * y,
        width=torch.full_like(cameras.width, width_px),
        height=torch.full_like(cameras.height, height_px),
        camera_type=cameras.camera_type,
        times=cameras.times,
        metadata=cameras.metadata,
    )


def _map_colors(picture: ImagePixels, change: Any) -> torch.Tensor:
    """Applies an averaging function; with alpha, to colour times alpha, which is right over any background."""
    pixels = picture.pixels.numpy()
    if pixels.shape[-1] == 3:
        return torch.from_numpy(np.ascontiguousarray(change(pixels)))
    values = pixels.astype(np.float32)
    values[..., :3] *= values[..., 3:] / 255.0
    values = change(values)
    alpha = values[..., 3:]
    values[..., :3] *= 255.0 / np.maximum(alpha, 1e-6)
    return torch.from_numpy(np.rint(np.clip(values, 0.0, 255.0)).astype(np.uint8))


@lru_cache(maxsize=2)
def _source_map(
    lens: DistortedCamera, view: PinholeIntrinsics
) -> tuple[Float32[np.ndarray, "h w"], Float32[np.ndarray, "h w"]]:
    """Columns and rows of the photo for each pixel of the view, px from the centre of the first pixel.

    Cached for the cameras used last, because the photos of one camera share it.
    """
    columns = np.empty((view.height, view.width), np.float32)
    rows = np.empty_like(columns)
    x = (np.arange(view.width) + 0.5 - view.cx) / view.fx
    for first in range(0, view.height, _ROWS_AT_A_TIME):
        last = min(first + _ROWS_AT_A_TIME, view.height)
        y = (np.arange(first, last) + 0.5 - view.cy) / view.fy
        grid_x, grid_y = np.meshgrid(x, y)
        column, row = lens.project(grid_x, grid_y)
        columns[first:last], rows[first:last] = column - 0.5, row - 0.5
    return columns, rows

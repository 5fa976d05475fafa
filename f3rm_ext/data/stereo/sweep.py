"""Depth of photos by plane-sweep stereo (Collins 1996): points to begin a run at, and depth to fuse to a mesh.

Planes that face the camera are swept, and horizontal ones (Gallup et al. 2007): patches of a floor seen at an angle
match on no plane that faces the camera.

Gaussians that begin far from a surface stay there if the photos say little: the mean absolute error of colours hardly
sees a wall whose texture is 1 % deep. The normalised cross-correlation of patches sees it at any contrast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, UInt8

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.pixel_sampler import ImagePixels

NEAREST, FARTHEST = 0.4, 10.0
"""Range of depths of planes that face the camera, in units of the distance from the scene's centre to the farthest
camera."""
LOWEST, HIGHEST = 0.05, 3.0
"""Range of distances of horizontal planes below and above the camera, in the same unit."""
GRAZING = 0.1
"""Rays with a smaller share of their direction across a horizontal plane are not compared on it."""
LEAST_BASELINE = 0.05
"""Views nearer than this, in the same unit, are not compared."""
MOST_TURN_DEG = 60.0
"""Views whose axes differ by more are not compared either."""
AGREEING = 0.03
"""Largest difference of stereo depths that agree, as a share of the depth."""
NOISE = 1.0
"""Variance of grey levels (0 to 255) below which a patch counts as flat."""
PHOTOS_IN_MEMORY = 512
"""Decoded photos that are kept; each is compared with several others."""


@dataclass(frozen=True)
class StereoOptions:
    """Options of the search for depth by plane sweeps."""

    depths: int = 96
    """Planes of each direction: evenly in the inverse of depth, or of horizontal ones in its logarithm."""
    neighbours: int = 6
    """Photos that each is compared with. The better half counts, as a point may be hidden from the others."""
    window_px: int = 7
    """Side of a patch, odd."""
    least_score: float = 0.3
    """Pixels with a smaller correlation have no depth."""


class Sweep(NamedTuple):
    """Parallel planes n · x = d in the frame of a camera, OpenCV axes."""

    normal: Float64[np.ndarray, "3"]
    """n, of length 1."""
    nearness: Float64[np.ndarray, " planes"]
    """1 / d, rising."""
    across: Float64[np.ndarray, "h w"]
    """n · ray of each pixel, whose ray is 1 long along the camera's axis; planes count where this is above 0."""

    @property
    def rows(self) -> slice:
        """The rows of the picture that see the planes."""
        seen = (self.across > 0).any(axis=1).nonzero()[0]
        return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)


Homographies = tuple[Float32[np.ndarray, "photos 3 3"], Float32[np.ndarray, "photos 3 3"]]
"""Where the pixels of a photo lie in others if they are on a plane, with OpenCV's pixel centres at whole numbers: the
homographies of the plane at infinity, and what is added to them per nearness."""
Fit = tuple[Float32[np.ndarray, "h w"], Float32[np.ndarray, "h w"]]
"""Score of the best plane, −1 where there is none, and its place along the planes, refined between them."""


class PhotoStereo:
    """Photos without distortion, and their depth by stereo.

    Args:
        photo: reads a photo at the size of its camera, by its index.
        cameras: of all photos, on the CPU; z of the scene frame is up.
    """

    def __init__(
        self, photo: Callable[[int], ImagePixels], cameras: PinholeCameras, options: StereoOptions | None = None
    ) -> None:
        self.cameras = cameras
        self._options = options or StereoOptions()
        self._radius = cameras.radius()
        self.photo = lru_cache(PHOTOS_IN_MEMORY)(photo)

    def __len__(self) -> int:
        return len(self.cameras.widths)

    @classmethod
    def from_dataset(cls, dataset: PinholeDataset, options: StereoOptions | None = None) -> "PhotoStereo":
        """Returns the stereo of a data set's photos, at its size; reading one raises CaptureError if it cannot be
        read."""
        return cls(dataset.picture, PinholeCameras.of(dataset.cameras), options)

    def color(self, index: int) -> UInt8[np.ndarray, "h w 3"]:
        """Returns the colours of a photo."""
        return np.ascontiguousarray(self.photo(index).pixels[..., :3].numpy())

    def usable(self, index: int) -> Bool[np.ndarray, "h w"]:
        """Returns the pixels of a photo that are neither masked nor transparent."""
        picture = self.photo(index)
        usable = torch.ones(picture.pixels.shape[:2], dtype=torch.bool) if picture.valid is None else picture.valid
        if picture.pixels.shape[-1] == 4:
            usable = usable & (picture.pixels[..., 3] > 127)
        return usable.numpy()

    def depth(self, index: int) -> Float32[np.ndarray, "h w"]:
        """Returns the depth of a photo along the camera's axis, scene units: 0 where stereo finds none, and where the
        photo is masked or transparent."""
        others = nearby_views(self.cameras, index, self._options.neighbours, self._radius)
        own = self._grey(index)
        depth, best = np.zeros_like(own), np.full_like(own, -1)
        if not others:
            return depth
        photos = [self._grey(other) for other in others]
        for sweep in sweeps(self.cameras, index, self._radius, self._options.depths):
            if sweep.rows.start == sweep.rows.stop:
                continue
            warps = homographies(self.cameras, index, others, sweep.normal)
            score, place = best_plane(own, photos, warps, sweep, self._options.window_px)
            nearness = np.interp(place, np.arange(len(sweep.nearness)), sweep.nearness)
            better = (sweep.across > 0) & (score > best)
            depth[better] = 1 / (nearness * sweep.across)[better]
            best[better] = score[better]
        return np.where((best > self._options.least_score) & self.usable(index), depth, 0).astype(np.float32)

    def _grey(self, index: int) -> Float32[np.ndarray, "h w"]:
        return cv2.cvtColor(self.color(index), cv2.COLOR_RGB2GRAY).astype(np.float32)


def nearby_views(cameras: PinholeCameras, index: int, most: int, radius: float) -> list[int]:
    """Returns the nearest views that look in a similar direction from another place."""
    apart = (cameras.positions - cameras.positions[index]).norm(dim=1)
    turn = (cameras.forward @ cameras.forward[index]).clamp(-1, 1).acos().rad2deg()
    usable = (apart > LEAST_BASELINE * radius) & (turn < MOST_TURN_DEG)
    order = apart.masked_fill(~usable, float("inf")).argsort(stable=True)
    return [int(other) for other in order[:most] if usable[other]]


def sweeps(cameras: PinholeCameras, index: int, radius: float, planes: int) -> list[Sweep]:
    """Returns planes that face a camera, and those below and above it."""
    K, viewmat = cameras.Ks[index].double().numpy(), cameras.viewmats[index].double().numpy()
    columns, rows = (np.arange(int(size[index])) + 0.5 for size in (cameras.widths, cameras.heights))
    rays = np.stack(
        [*np.meshgrid((columns - K[0, 2]) / K[0, 0], (rows - K[1, 2]) / K[1, 1]), np.ones((len(rows), len(columns)))],
        axis=-1,
    )
    ahead, up = np.array([0.0, 0.0, 1.0]), viewmat[:3, 2]
    facing = np.linspace(1 / (FARTHEST * radius), 1 / (NEAREST * radius), planes)
    level = np.geomspace(1 / (HIGHEST * radius), 1 / (LOWEST * radius), planes)
    steep = GRAZING * np.linalg.norm(rays, axis=-1)
    return [
        Sweep(normal, nearness, np.where(rays @ normal > steep, rays @ normal, 0))
        for normal, nearness in ((ahead, facing), (-up, level), (up, level))
    ]


def homographies(
    cameras: PinholeCameras, index: int, others: Sequence[int], normal: Float64[np.ndarray, "3"]
) -> Homographies:
    """Returns the maps from a photo to others by planes of one normal in the frame of its camera (Hartley and
    Zisserman 2004, eq. 13.2)."""
    half = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    viewmats = cameras.viewmats.double().numpy()
    back = np.linalg.inv(half @ cameras.Ks[index].double().numpy())
    still, moving = [], []
    for other in others:
        K = half @ cameras.Ks[other].double().numpy()
        move = viewmats[other] @ np.linalg.inv(viewmats[index])
        still.append(K @ move[:3, :3] @ back)
        moving.append(K @ np.outer(move[:3, 3], normal) @ back)
    return np.array(still, np.float32), np.array(moving, np.float32)


def best_plane(
    own: Float32[np.ndarray, "h w"],
    others: Sequence[Float32[np.ndarray, "_ _"]],
    warps: Homographies,
    sweep: Sweep,
    window_px: int,
) -> Fit:
    """Returns the plane on which the patch around each pixel fits those of the better half of other photos best, by
    normalised cross-correlation. There is none where a patch leaves its photo.
    """
    from f3rm_ext.data.stereo.kernels import sweep_planes

    sizes = np.array([photo.shape for photo in others])
    stacked = np.zeros((len(others), *sizes.max(axis=0)), np.float32)
    for photo, room in zip(others, stacked, strict=True):
        room[: photo.shape[0], : photo.shape[1]] = photo
    score, place = np.full(own.shape, -1, np.float32), np.zeros(own.shape, np.float32)
    rows = np.array([sweep.rows.start, sweep.rows.stop])
    nearness = sweep.nearness.astype(np.float32)
    sweep_planes(own, stacked, sizes, *warps, nearness, rows, (0,) * window_px, NOISE, score, place)
    return score, place


def best_plane_reference(
    own: Float32[np.ndarray, "h w"],
    others: Sequence[Float32[np.ndarray, "_ _"]],
    warps: Homographies,
    sweep: Sweep,
    window_px: int,
) -> Fit:
    """Does the same as :func:`best_plane`, written for readability; it keeps the scores of all planes in memory."""
    from scipy.ndimage import map_coordinates

    def mean(values: Float32[np.ndarray, "h w"]) -> Float32[np.ndarray, "h w"]:
        return cv2.blur(values, (window_px, window_px))

    level = mean(own)
    power = np.maximum(mean(own * own) - level * level, NOISE)
    volume = np.full((len(others), len(sweep.nearness), *own.shape), -1, np.float32)
    pixels = np.stack([*np.meshgrid(*map(np.arange, own.shape[::-1])), np.ones(own.shape)], axis=-1)
    for photo, still, moving, scores in zip(others, *warps, volume, strict=True):
        for plane, nearness in enumerate(sweep.nearness):
            x, y, z = np.moveaxis(pixels @ (still + nearness * moving).astype(float).T, -1, 0)
            inside = (z > 0) & (x >= 0) & (y >= 0) & (x <= (photo.shape[1] - 1) * z) & (y <= (photo.shape[0] - 1) * z)
            places = np.where(inside, np.stack([y, x]) / np.where(inside, z, 1), 0)
            there = map_coordinates(photo, places, order=1)
            spread = np.maximum(mean(there * there) - mean(there) ** 2, NOISE)
            score = (mean(own * there) - level * mean(there)) / np.sqrt(power * spread)
            scores[plane] = np.where(mean(inside.astype(np.float32)) > 1 - 1e-4, score, -1)
    better = (len(others) + 1) // 2
    total = np.sort(volume, axis=0)[-better:].mean(axis=0)
    best = total.argmax(axis=0)

    def score_on(planes: np.ndarray) -> Float32[np.ndarray, "h w"]:
        return np.take_along_axis(total, planes[None].clip(0, len(total) - 1), axis=0)[0]

    low, peak, high = score_on(best - 1), score_on(best), score_on(best + 1)
    shift = np.clip((low - high) / (2 * np.minimum(low - 2 * peak + high, -1e-9)), -0.5, 0.5)
    place = best + np.where((best > 0) & (best < len(total) - 1), shift, 0)
    valid = np.zeros(own.shape, bool)
    edge = window_px // 2
    valid[edge : own.shape[0] - edge, edge : own.shape[1] - edge] = True
    valid[: sweep.rows.start] = valid[sweep.rows.stop :] = False
    return np.where(valid, peak, -1).astype(np.float32), np.where(valid, place, 0).astype(np.float32)

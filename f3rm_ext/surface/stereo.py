"""Depth of photos by plane-sweep stereo (Collins 1996): points to begin a run at, and depth to fuse to a mesh.

Planes that face the camera are swept, and horizontal ones (Gallup et al. 2007): patches of a floor seen at an angle
match on no plane that faces the camera.

Gaussians that begin far from a surface stay there if the photos say little: the mean absolute error of colours hardly
sees a wall whose texture is 1 % deep. The normalised cross-correlation of patches sees it at any contrast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import Float, Float32, Int, UInt8
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.splat.initialization import camera_radius
from f3rm_ext.surface.views import RenderedView, SceneViews

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
"""Nor are views whose axes differ by more."""
AGREEING = 0.03
"""Largest difference of stereo depths that agree, as a share of the depth."""
NOISE = 1.0
"""Variance of grey levels (0 to 255) below which a patch counts as flat."""
OUTSIDE = -1e4
"""Grey level of places outside of a photo."""


@dataclass(frozen=True)
class StereoOptions:
    """How depth is searched."""

    depths: int = 96
    """Planes of each direction: evenly in the inverse of depth, or of horizontal ones in its logarithm."""
    neighbours: int = 6
    """Photos that each is compared with. The better half counts, as a point may be hidden from the others."""
    window_px: int = 7
    """Side of a patch."""
    least_score: float = 0.3
    """Pixels with a smaller correlation have no depth."""


class Sweep(NamedTuple):
    """Parallel planes n · x = d in the frame of a camera, OpenCV axes."""

    normal: Float[np.ndarray, "3"]
    """n, of length 1."""
    nearness: Float[np.ndarray, " planes"]
    """1 / d, rising."""
    across: Float[np.ndarray, "h w"]
    """n · ray of each pixel, whose ray is 1 long along the camera's axis; planes count where this is above 0."""

    @property
    def rows(self) -> slice:
        """The rows of the picture that see the planes."""
        seen = (self.across > 0).any(axis=1).nonzero()[0]
        return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)


def views_of_photos(outputs: DataparserOutputs, width_px: int) -> SceneViews:
    """Returns the photos of a capture without distortion, with the depth that stereo finds.

    Args:
        outputs: cameras and files.
        width_px: width of the widest camera; photos are not enlarged.

    Raises:
        CaptureError: photos cannot be undistorted; rendering a view, that one cannot be read.
    """
    dataset = PinholeDataset(outputs, min(1.0, width_px / int(outputs.cameras.width.max())))
    return stereo_views(dataset.picture, PinholeCameras.of(dataset.cameras), StereoOptions())


def stereo_views(photo: Callable[[int], ImagePixels], cameras: PinholeCameras, options: StereoOptions) -> SceneViews:
    """Returns the views of photos with the depth that stereo finds: 0 where it finds none, and where photos are masked
    or transparent.

    A view takes 4 bytes × pixels × planes × neighbours (44 MiB at 160 × 120).

    Args:
        photo: reads a photo without distortion, at the size of its camera, by its index.
        cameras: of all photos, on the CPU; z of the scene frame is up.
        options: how.
    """
    nearby = [_compared(cameras, index, options.neighbours) for index in range(len(cameras.widths))]
    radius = camera_radius(cameras)
    picture_of = cache(photo)  # Small, and each is compared with several.

    def colors(picture: ImagePixels) -> UInt8[np.ndarray, "h w 3"]:
        return np.ascontiguousarray(picture.pixels[..., :3].numpy())

    @cache
    def shades(index: int) -> Float32[np.ndarray, "h w"]:
        return cv2.cvtColor(colors(picture_of(index)), cv2.COLOR_RGB2GRAY).astype(np.float32)

    def swept(index: int, sweep: Sweep) -> tuple[Float[np.ndarray, "h w"], Float[np.ndarray, "h w"]]:
        """Depth and score."""
        own, rows = shades(index), sweep.rows
        depth, score = np.zeros(own.shape), np.full(own.shape, -1.0)
        if not nearby[index] or rows.start == rows.stop:
            return depth, score
        volume = np.stack(
            [_correlations(own, shades(other), cameras, (index, other), sweep, options) for other in nearby[index]]
        )
        better = (len(volume) + 1) // 2
        found, score[rows] = _peak(np.sort(volume, axis=0)[-better:].mean(axis=0))
        nearness = np.interp(found, np.arange(len(sweep.nearness)), sweep.nearness)
        seen = sweep.across > 0
        depth[rows] = 1 / (nearness * np.where(seen, sweep.across, 1)[rows])
        return depth, np.where(seen, score, -1)

    def render(index: int) -> RenderedView:
        found = [swept(index, sweep) for sweep in _sweeps(cameras, index, radius, options.depths)]
        best = np.argmax([score for _, score in found], axis=0)[None]
        depth, score = (np.take_along_axis(np.array(values), best, axis=0)[0] for values in zip(*found, strict=True))
        picture, usable = picture_of(index), score > options.least_score
        if picture.valid is not None:
            usable &= picture.valid.numpy()
        if picture.pixels.shape[-1] == 4:
            usable &= picture.pixels[..., 3].numpy() > 127
        return RenderedView(colors(picture), np.where(usable, depth, 0).astype(np.float32))

    return SceneViews(cameras, render)


def _compared(cameras: PinholeCameras, index: int, most: int) -> list[int]:
    """The nearest views that look in a similar direction from another place."""
    apart = (cameras.positions - cameras.positions[index]).norm(dim=1)
    turn = (cameras.forward @ cameras.forward[index]).clamp(-1, 1).acos().rad2deg()
    usable = (apart > LEAST_BASELINE * camera_radius(cameras)) & (turn < MOST_TURN_DEG)
    order = apart.masked_fill(~usable, float("inf")).argsort(stable=True)
    return [int(other) for other in order[:most] if usable[other]]


def _sweeps(cameras: PinholeCameras, index: int, radius: float, planes: int) -> list[Sweep]:
    """Planes that face a camera, and those below and above it."""
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


def _correlations(
    own: Float32[np.ndarray, "h w"],
    theirs: Float32[np.ndarray, "h2 w2"],
    cameras: PinholeCameras,
    pair: tuple[int, int],
    sweep: Sweep,
    options: StereoOptions,
) -> Float32[np.ndarray, "planes rows w"]:
    """Normalised cross-correlation of patches with those that each plane shows of another photo; −1 outside of it.
    Only the rows that see the planes."""
    (one, two), rows = pair, sweep.rows
    # OpenCV's pixel centres lie at whole numbers.
    half = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    K, K2 = (half @ cameras.Ks[index].double().numpy() for index in pair)
    move = cameras.viewmats[two].double().numpy() @ np.linalg.inv(cameras.viewmats[one].double().numpy())
    back = np.linalg.inv(K) @ np.array([[1, 0, 0], [0, 1, rows.start], [0, 0, 1]])
    own = own[rows]

    def mean(values: Float32[np.ndarray, "h w"]) -> Float32[np.ndarray, "h w"]:
        return cv2.blur(values, (options.window_px, options.window_px))

    middle = mean(own)
    power = np.maximum(mean(own * own) - middle * middle, NOISE)
    scores = np.empty((len(sweep.nearness), *own.shape), np.float32)
    for plane, nearness in enumerate(sweep.nearness):
        warp = K2 @ (move[:3, :3] + np.outer(move[:3, 3], nearness * sweep.normal)) @ back
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        there = cv2.warpPerspective(theirs, warp, own.shape[::-1], flags=flags, borderValue=[OUTSIDE])
        level = mean(there)
        spread = np.maximum(mean(there * there) - level * level, NOISE)
        score = (mean(own * there) - middle * level) / np.sqrt(power * spread)
        scores[plane] = np.where(level < 0, -1, score)
    return scores


def _peak(
    scores: Float32[np.ndarray, "planes h w"],
) -> tuple[Float[np.ndarray, "h w"], Float32[np.ndarray, "h w"]]:
    """The place of the highest score along the planes, refined by a parabola through three, and the score."""
    best: Int[np.ndarray, "h w"] = scores.argmax(axis=0)
    inner = np.clip(best, 1, len(scores) - 2)

    def at(places: Int[np.ndarray, "h w"]) -> Float32[np.ndarray, "h w"]:
        return np.take_along_axis(scores, places[None], axis=0)[0]

    low, mid, high = at(inner - 1), at(inner), at(inner + 1)
    bend = np.minimum(low - 2 * mid + high, -1e-9)
    shift = np.where(best == inner, np.clip((low - high) / (2 * bend), -0.5, 0.5), 0)
    return best + shift, at(best)

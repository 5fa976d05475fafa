"""Depth of photos by plane-sweep stereo (Collins 1996), for points to begin a run at.

Gaussians that begin far from a surface stay there if the photos say little: the mean absolute error of colours hardly
sees a wall whose texture is 1 % deep. The normalised cross-correlation of patches sees it at any contrast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.splat.initialization import camera_radius
from f3rm_ext.surface.views import RenderedView, SceneViews

NEAREST, FARTHEST = 0.4, 10.0
"""Range of depths, in units of the distance from the scene's centre to the farthest camera."""
LEAST_BASELINE = 0.05
"""Views nearer than this, in the same unit, are not compared."""
MOST_TURN_DEG = 60.0
"""Nor are views whose axes differ by more."""
NOISE = 1.0
"""Variance of grey levels (0 to 255) below which a patch counts as flat."""
OUTSIDE = -1e4
"""Grey level of places outside of a photo."""


@dataclass(frozen=True)
class StereoOptions:
    """How depth is searched."""

    depths: int = 96
    """Planes, evenly in the inverse of depth."""
    neighbours: int = 6
    """Photos that each is compared with. The better half counts, as a point may be hidden from the others."""
    window_px: int = 7
    """Side of a patch."""
    least_score: float = 0.3
    """Pixels with a smaller correlation have no depth."""


def stereo_views(photo: Callable[[int], ImagePixels], cameras: PinholeCameras, options: StereoOptions) -> SceneViews:
    """Returns the views of photos with the depth that stereo finds: 0 where it finds none, and where photos are masked
    or transparent.

    A view takes 4 bytes × pixels × planes × neighbours (44 MiB at 160 × 120).

    Args:
        photo: reads a photo without distortion, at the size of its camera, by its index.
        cameras: of all photos, on the CPU.
        options: how.
    """
    nearby = [_compared(cameras, index, options.neighbours) for index in range(len(cameras.widths))]
    radius = camera_radius(cameras)
    inverse = np.linspace(1 / (FARTHEST * radius), 1 / (NEAREST * radius), options.depths)
    picture_of = cache(photo)  # Small, and each is compared with several.

    def colors(picture: ImagePixels) -> UInt8[np.ndarray, "h w 3"]:
        return np.ascontiguousarray(picture.pixels[..., :3].numpy())

    @cache
    def shades(index: int) -> Float32[np.ndarray, "h w"]:
        return cv2.cvtColor(colors(picture_of(index)), cv2.COLOR_RGB2GRAY).astype(np.float32)

    def render(index: int) -> RenderedView:
        own = shades(index)
        volume = np.stack(
            [_correlations(own, shades(other), cameras, (index, other), inverse, options) for other in nearby[index]]
            or [np.full((options.depths, *own.shape), -1, np.float32)]
        )
        better = (len(volume) + 1) // 2
        scores = np.sort(volume, axis=0)[-better:].mean(axis=0)
        found, score = _peak(scores)
        depth = 1 / (inverse[0] + found * (inverse[1] - inverse[0]))
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


def _correlations(
    own: Float32[np.ndarray, "h w"],
    theirs: Float32[np.ndarray, "h2 w2"],
    cameras: PinholeCameras,
    pair: tuple[int, int],
    inverse: Float[np.ndarray, " planes"],
    options: StereoOptions,
) -> Float32[np.ndarray, "planes h w"]:
    """Normalised cross-correlation of patches with those that planes at each depth show of another photo; −1 outside
    of it."""
    one, two = pair
    # OpenCV's pixel centres lie at whole numbers.
    half = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    K, K2 = (half @ cameras.Ks[index].double().numpy() for index in pair)
    move = cameras.viewmats[two].double().numpy() @ np.linalg.inv(cameras.viewmats[one].double().numpy())
    back = np.linalg.inv(K)

    def mean(values: Float32[np.ndarray, "h w"]) -> Float32[np.ndarray, "h w"]:
        return cv2.blur(values, (options.window_px, options.window_px))

    middle = mean(own)
    power = np.maximum(mean(own * own) - middle * middle, NOISE)
    scores = np.empty((len(inverse), *own.shape), np.float32)
    for plane, nearness in enumerate(inverse):
        warp = K2 @ (move[:3, :3] + np.outer(move[:3, 3], [0, 0, nearness])) @ back
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

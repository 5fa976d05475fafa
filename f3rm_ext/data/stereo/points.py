"""Dense points of a capture by stereo, for splats to begin at: found once per capture, then read from the cache."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, UInt8
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.capture.points import DENSE, RGB, SOURCE, STEREO_POINTS, XYZ, point_columns, read_point_cloud
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.stereo import DenseMode
from f3rm_ext.data.stereo.agreement import DepthMaps, agreeing_depth
from f3rm_ext.data.stereo.cache import capture_key, read_or_make
from f3rm_ext.data.stereo.sweep import AGREEING, FARTHEST, PhotoStereo
from f3rm_ext.utils import threads
from f3rm_ext.utils.console import console, image_progress
from f3rm_ext.utils.pictures import pick_evenly
from f3rm_ext.utils.ply import write_ply

VERSION = 1
"""Version of the method; points of other versions are not used."""
SIDE_PX = 320
"""Longer side of the photos that are compared."""
MOST_VIEWS = 200
"""Views whose depth is computed, evenly among all; each is compared with its neighbours among all."""
MIN_VIEWS = 3
"""Views that must agree on a point, itself included."""
MEMBERS = 20
"""Pixels on average of which each point is the mean, at most."""
BACKDROP_SHARE = 0.3
"""Share of the points that lie behind the surfaces, at most; that of the pixels without depth if it is less."""
BACKDROP_QUANTILE = 0.9
"""Quantile of the depths of a view behind which these points lie."""
COUNT = 20_000
"""Points at most, spread evenly over what the photos show. By default a capture with fewer of its own is filled up to
as many, and gets half as many at least: its own may crowd where there is detail, as vertices of a mesh do."""


class DensePoints(NamedTuple):
    """Points on the surfaces that the photos of a capture show."""

    xyz: Float32[np.ndarray, "points 3"]
    """Scene frame."""
    rgb: UInt8[np.ndarray, "points 3"]
    """Colours."""


def dense_points(
    stereo: PhotoStereo, count: int = COUNT, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> DensePoints:
    """Returns points on which the depth of several photos agrees, and some behind them on rays of pixels without depth,
    such as the sky; none if the photos agree on nothing. Reports how many views are done, of how many.
    """
    chosen = pick_evenly(len(stereo), MOST_VIEWS)
    depths = []
    for index in chosen:
        depths.append(stereo.depth(index))
        on_progress(len(depths), len(chosen))
    cameras = stereo.cameras.take(torch.tensor(chosen))
    sure = [agreeing_depth(DepthMaps(cameras, depths), index, MIN_VIEWS, AGREEING) for index in range(len(chosen))]
    if not any(depth.any() for depth in sure):
        return DensePoints(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.uint8))
    usable = [stereo.usable(index) for index in chosen]
    blank = [mask & (depth == 0) for mask, depth in zip(usable, sure, strict=True)]
    share = sum(mask.sum() for mask in blank) / max(1, sum(mask.sum() for mask in usable))
    behind = round(count * min(share, BACKDROP_SHARE))
    xyz, rgb, spacing = _pixels(stereo, chosen, DepthMaps(cameras, sure))
    surface = thin(xyz, rgb, spacing, count - behind)
    xyz, rgb, _ = _pixels(stereo, chosen, DepthMaps(cameras, _backdrop(sure, blank, FARTHEST * cameras.radius())))
    kept = np.random.default_rng(0).permutation(len(xyz))[:behind]
    return DensePoints(
        np.concatenate([surface.xyz, xyz[kept].astype(np.float32)]), np.concatenate([surface.rgb, rgb[kept]])
    )


def _backdrop(
    sure: Sequence[Float32[np.ndarray, "_ _"]], blank: Sequence[Bool[np.ndarray, "_ _"]], farthest: float
) -> list[Float32[np.ndarray, "_ _"]]:
    """Random depth behind what is known, for pixels without: mostly sky, and walls and floors far away."""
    dice = np.random.default_rng(0)
    typical = np.median([np.median(depth[depth > 0]) for depth in sure if depth.any()])
    depths = []
    for depth, mask in zip(sure, blank, strict=True):
        nearest = np.quantile(depth[depth > 0], BACKDROP_QUANTILE) if depth.any() else typical
        low, high = np.log(nearest), np.log(max(farthest, nearest))
        depths.append(np.where(mask, np.exp(dice.uniform(low, high, depth.shape)), 0).astype(np.float32))
    return depths


def _pixels(
    stereo: PhotoStereo, chosen: Sequence[int], maps: DepthMaps
) -> tuple[Float64[np.ndarray, "points 3"], UInt8[np.ndarray, "points 3"], Float64[np.ndarray, " points"]]:
    """Where the pixels with depth are, their colours, and their widths there."""
    xyz, rgb, spacing = [], [], []
    for position, index in enumerate(chosen):
        points, pixels = maps.points(position)
        xyz.append(points.numpy())
        rgb.append(stereo.color(index).reshape(-1, 3)[pixels.numpy()])
        depth = maps.depth(position).reshape(-1)[pixels.numpy()].astype(np.float64)
        spacing.append(depth / float(maps.cameras.Ks[position, 0, 0]))
    return np.concatenate(xyz), np.concatenate(rgb), np.concatenate(spacing)


def thin(
    xyz: Float64[np.ndarray, "points 3"],
    rgb: UInt8[np.ndarray, "points 3"],
    spacing: Float64[np.ndarray, " points"],
    count: int,
) -> DensePoints:
    """Replaces the points in each cell of a grid by their mean. The cells grow with ``spacing``, the width of a pixel
    at each point, so that near and far surfaces get as many points per area of the photos.
    """
    if len(xyz) <= count:
        return DensePoints(xyz.astype(np.float32), rgb)
    kept = np.random.default_rng(0).permutation(len(xyz))[: MEMBERS * count]
    xyz, rgb, spacing = xyz[kept], rgb[kept], spacing[kept]
    octave = np.floor(np.log2(spacing / spacing.min())).astype(np.int64)
    unit = spacing.min() * np.exp2(octave)
    low, high = 0.0, 20.0  # log2 of the width of a cell in pixels
    for _ in range(12):
        middle = (low + high) / 2
        if len(np.unique(_cells(xyz, unit * 2**middle, octave))) > count:
            low = middle
        else:
            high = middle
    _, cell, members = np.unique(_cells(xyz, unit * 2**high, octave), return_inverse=True, return_counts=True)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(cell, column) for column in values.T.astype(float)], axis=1) / members[:, None]

    return DensePoints(mean(xyz).astype(np.float32), mean(rgb).round().astype(np.uint8))


def _cells(
    xyz: Float64[np.ndarray, "points 3"], width: Float64[np.ndarray, " points"], octave: np.ndarray
) -> np.ndarray:
    """A number for the cell of each point, with cells of other octaves apart."""
    steps = np.floor((xyz - xyz.min(axis=0)) / width[:, None]).astype(np.int64)
    # A hash by the largest prime below 2²¹: three coordinates of 21 bits fit into 63, and larger ones seldom collide.
    return ((octave * 2_097_143 + steps[:, 0]) * 2_097_143 + steps[:, 1]) * 2_097_143 + steps[:, 2]


def missing_points(metadata: Mapping[str, Any], mode: DenseMode) -> int:
    """Returns how many dense points at most join those of a capture, whose metadata is given."""
    own = len(metadata.get(XYZ, ()))
    least = 0 if Path(metadata.get(SOURCE, "")).name == STEREO_POINTS else COUNT // 2
    return {"never": 0, "auto": max(COUNT - own, least), "always": COUNT}[mode]


def add_dense_points(outputs: DataparserOutputs, cache: Path, mode: DenseMode) -> None:
    """Adds dense points to those of a capture, and says so in a line. They are found once and kept in the cache. Raises
    CaptureError if a photo cannot be read."""
    own, missing = len(outputs.metadata.get(XYZ, ())), missing_points(outputs.metadata, mode)
    if not missing:
        return
    path = cache / f"{capture_key(outputs, [VERSION, SIDE_PX, MOST_VIEWS, MIN_VIEWS, COUNT])}.ply"
    points, file = read_or_make(path, lambda: seek_points(outputs), read=_read_ply, encode=encode_ply)
    if not len(points.xyz):
        console().log(f"Stereo has no points on which {MIN_VIEWS} photos agree: beginning without.", markup=False)
        return
    if len(points.xyz) > missing:
        kept = np.random.default_rng(0).permutation(len(points.xyz))[:missing]
        points = DensePoints(points.xyz[kept], points.rgb[kept])
    besides = f", besides {own} of the capture" if own else ""
    origin = f"from {file}" if file else f"by stereo of {len(outputs.image_filenames)} photos"
    sentence = f"{len(points.xyz)} dense points {origin}{besides}; --dense-points never leaves them out."
    console().log(sentence, markup=False)
    xyz, rgb = torch.from_numpy(points.xyz), torch.from_numpy(points.rgb)
    if own:
        xyz = torch.cat([outputs.metadata[XYZ].float(), xyz])
        rgb = torch.cat([outputs.metadata[RGB], rgb])
    source = f"{outputs.metadata.get(SOURCE, 'the capture')} and of stereo" if own else "stereo"
    outputs.metadata.update({XYZ: xyz, RGB: rgb, SOURCE: source, DENSE: len(points.xyz)})


def seek_points(outputs: DataparserOutputs, count: int = COUNT, side_px: int = SIDE_PX) -> DensePoints:
    """Returns dense points of a capture, and shows how far the search is. Raises CaptureError if a photo cannot be
    read."""
    threads.settle(numba=True)
    stereo = PhotoStereo.from_dataset(PinholeDataset.scale_to_side(outputs, side_px))
    with image_progress("photos") as progress:
        task = progress.add_task("Stereo", total=None)
        return dense_points(stereo, count, lambda done, total: progress.update(task, completed=done, total=total))


def _read_ply(path: Path) -> DensePoints:
    xyz, rgb = read_point_cloud(path)
    return DensePoints(xyz.astype(np.float32), rgb)


def encode_ply(points: DensePoints) -> bytes:
    """Returns the bytes of a PLY file of points."""
    with io.BytesIO() as stream:
        write_ply(stream, point_columns(points.xyz, points.rgb))
        return stream.getvalue()

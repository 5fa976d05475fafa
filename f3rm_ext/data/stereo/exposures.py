"""Exposures of photos by what several of them show of the same places, for photos without EXIF.

Plane-sweep stereo finds the places. It compares normalised patches, so the exposures do not mislead it.
"""

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from torch import Tensor

from f3rm_ext.capture.exposures import MIN_RANGE_STOPS, MeasuredStops
from f3rm_ext.data.gains import fit_log_gains
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.data.stereo.agreement import DepthMaps, neighbours, project
from f3rm_ext.data.stereo.cache import capture_key, read_or_make
from f3rm_ext.data.stereo.sweep import AGREEING, PhotoStereo, StereoOptions, nearby_views
from f3rm_ext.utils import threads
from f3rm_ext.utils.console import image_progress
from f3rm_ext.utils.pictures import pick_evenly, to_linear

VERSION = 1
"""Version of the method; exposures of other versions are not used."""
SIDE_PX = 96
"""Longer side of the photos that are compared."""
MOST_VIEWS = 48
"""Photos whose depth is computed, evenly among all; if their exposures differ, the others are compared with them."""
OPTIONS = StereoOptions(depths=48, neighbours=4)
_BLUR_PX = 3
"""Side of the squares of pixels whose light is compared, as the places of stereo are not exact."""
_PLACES = 300
"""Pixels of each photo that are looked up in others, at most."""
_FEWEST_PLACES = 30
"""Nothing is known of a photo that shows fewer places which others show, too."""
_DARKEST, _BRIGHTEST = 0.005, 0.95
"""Linear light beyond says little about a gain, or is clipped."""
_OUTLIER_STOPS = 0.3
_PRIOR = 1e-3
MIN_EXPLAINED = 0.5
"""Share of the variance between photos of the same places that exposures explain where they differ. The rest is shine,
shadows and wrong places. Of these, exposures explain some, too: a quarter or less where there is only one."""
_READERS = 4
"""Photos that are decoded at a time; each takes the memory of its full size."""

Lights = Float[np.ndarray, "photos places 3"]
"""Linear light that photos show of places, 0 to 1; 0 where they do not show them."""


def read_or_measure_stops(outputs: DataparserOutputs, cache: Path) -> MeasuredStops | None:
    """Returns the exposures of the photos of a capture, measured once and kept in the cache; None if the cameras have
    no pinhole view, such as those of panoramas. Raises CaptureError if a photo cannot be read."""
    dataset = PinholeDataset.find_views(outputs, SIDE_PX)
    if dataset is None:
        return None
    path = cache / f"{capture_key(outputs, [VERSION, SIDE_PX, MOST_VIEWS, asdict(OPTIONS)])}.npz"
    return read_or_make(path, lambda: measure_stops(dataset), read=_read, encode=_encode)[0]


def _read(path: Path) -> MeasuredStops:
    with np.load(path) as archive:
        return MeasuredStops(archive["stops"], float(archive["range_stops"]), bool(archive["vary"]))


def _encode(measured: MeasuredStops) -> bytes:
    with io.BytesIO() as stream:
        np.savez(stream, **measured._asdict())
        return stream.getvalue()


def measure_stops(dataset: PinholeDataset) -> MeasuredStops:
    """Returns the exposures of the small photos of a capture, in stops; shows how far the search is. Raises
    CaptureError if a photo cannot be read."""
    threads.settle(numba=True)
    cameras = PinholeCameras.of(dataset.cameras)
    chosen = pick_evenly(len(dataset), MOST_VIEWS)
    with ThreadPoolExecutor(_READERS) as pool:
        pictures = list(pool.map(dataset.picture, chosen))
        stereo = PhotoStereo(pictures.__getitem__, cameras.take(torch.tensor(chosen)), OPTIONS)
        with image_progress("photos") as progress:
            depths = [stereo.depth(index) for index in progress.track(range(len(stereo)), description="Exposures")]
        maps = DepthMaps(stereo.cameras, depths)
        measured = fit_stops(look_up(stereo, maps))
        stops = np.zeros((len(dataset), 3), np.float32)
        stops[chosen] = measured.stops
        # Where exposures are alike, the others have the mean.
        rest = sorted(set(range(len(dataset))) - set(chosen)) if measured.vary else []
        for index, picture in zip(rest, pool.map(dataset.picture, rest), strict=True):
            camera = cameras.take(torch.tensor([*chosen, index]))
            stops[index] = compare(light_of(picture), camera, stereo, maps, measured.stops)
    return measured._replace(stops=stops - stops.mean(axis=0))


def light_of(picture: ImagePixels) -> Float[np.ndarray, "pixels 3"]:
    """Returns the linear light of a photo, 0 to 1, blurred a little."""
    return cv2.blur(to_linear(picture.pixels[..., :3].numpy() / 255.0), (_BLUR_PX, _BLUR_PX)).reshape(-1, 3)


def look_up(stereo: PhotoStereo, maps: DepthMaps) -> Lights:
    """Returns what photos show of the places of some pixels of each of them."""
    lights = [light_of(stereo.photo(index)) for index in range(len(stereo))]
    parts: list[np.ndarray] = [np.zeros((len(stereo), 0, 3))]
    for index in range(len(stereo)):
        points, pixels = some_points(maps, index)
        part = np.zeros((len(stereo), len(points), 3))
        part[index] = lights[index][pixels]
        for other in neighbours(maps, index, points):
            place, z, inside = project(maps.cameras, other, points)
            depth = torch.from_numpy(maps.depth(other)).flatten()[place]
            agrees = (inside & (depth > 0) & ((depth - z).abs() <= AGREEING * z)).numpy()
            part[other, agrees] = lights[other][place.numpy()[agrees]]
        parts.append(part)
    return np.concatenate(parts, axis=1)


def some_points(maps: DepthMaps, index: int) -> tuple[Float[Tensor, "points 3"], Int[np.ndarray, " points"]]:
    """Returns where some pixels with depth are, scene frame, and their indices in the flattened picture."""
    points, pixels = maps.points(index)
    few = torch.from_numpy(np.random.default_rng(index).permutation(len(points))[:_PLACES])
    return points[few], pixels[few].numpy()


def compare(
    light: Float[np.ndarray, "pixels 3"],
    cameras: PinholeCameras,
    stereo: PhotoStereo,
    maps: DepthMaps,
    stops: Float[np.ndarray, "photos 3"],
) -> Float[np.ndarray, "3"]:
    """Returns the exposure of a photo without depth, by photos that look its way; their mean if they show too little.

    Args:
        cameras: of the photos, and last of this one.
        stops: of the photos.
    """
    own, parts = len(stereo), [np.zeros((0, 3))]
    for near in nearby_views(cameras, own, OPTIONS.neighbours, 0.0):
        points, pixels = some_points(maps, near)
        place, _, inside = project(cameras, own, points)
        here, there = light[place[inside].numpy()], light_of(stereo.photo(near))[pixels[inside.numpy()]]
        used = clear(here) & clear(there)
        parts.append(np.log2(here[used] / there[used]) + stops[near])
    differences = np.concatenate(parts)
    return np.median(differences, axis=0) if len(differences) >= _FEWEST_PLACES else np.zeros(3)


def clear(light: Float[np.ndarray, "*places 3"]) -> Bool[np.ndarray, "*places"]:
    """Returns where light is neither clipped nor too dark to tell a gain."""
    return ((light > _DARKEST) & (light < _BRIGHTEST)).all(axis=-1)


def fit_stops(lights: Lights) -> MeasuredStops:
    """Returns the exposures by which photos differ where they show the same places."""
    used = clear(lights)
    used &= used.sum(axis=0) >= 2
    known = used.sum(axis=1) >= _FEWEST_PLACES
    used &= known[:, None]
    logs = np.log2(np.where(used[..., None], lights, 1.0))
    stops = np.stack(
        [-fit_log_gains(logs[..., i], used.astype(float), _OUTLIER_STOPS, _PRIOR) for i in range(3)], axis=1
    )
    if not known.any():
        return MeasuredStops(stops.astype(np.float32), 0.0, vary=False)
    stops[~known] = stops[known].mean(axis=0)

    def variance(logs: Lights) -> float:
        places = (logs * used[..., None]).sum(axis=0) / np.maximum(used.sum(axis=0), 1)[:, None]
        return float(np.median(np.abs(logs - places).mean(axis=2)[used])) ** 2  # wrong places do not count

    stops -= stops.mean(axis=0)
    low, high = np.quantile(stops[known].mean(axis=1), [0.05, 0.95])
    explained = 1 - variance(logs - stops[:, None]) / max(variance(logs), 1e-9)
    vary = bool(high - low >= MIN_RANGE_STOPS and explained >= MIN_EXPLAINED)
    return MeasuredStops(stops.astype(np.float32), float(high - low), vary)

"""Defaults of ``f3rm-ext sugar run`` that depend on the device, and scales that reduce large photos for a CPU."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from f3rm_ext import compat
from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.sfm.photos import find_photos
from f3rm_ext.sfm.video import sharpest_frames
from f3rm_ext.utils.pictures import UNREADABLE
from f3rm_ext.workflow.options import ChainOptions

ON_GPU: dict[str, Any] = {"coarse_method": "sugar-ext", "vertices": 200_000}
LONG_SIDE_PX, LARGE_PX = 400, 500
"""Photos with a longest side above the second are reduced to about the first. Nearer to it, resampling would cost more
detail than it saves time."""
_EVERY_FRAME = 10_000
"""Number of stretches of a video of which the first ends after few frames."""
_MOST_PX = 1600
"""Of larger images nerfstudio loads reduced copies from images_2, images_4 ... if these folders exist."""
ON_CPU: dict[str, Any] = {"coarse_method": "sugar-ext-lite", "vertices": 30_000, "refinement_time": "short"}


def choose_defaults(options: ChainOptions) -> dict[str, Any]:
    """Returns the values of options that depend on this machine, by field of :class:`ChainOptions`.

    Without a GPU they are those with which the chain takes minutes to an hour: small splats and a small mesh, a short
    refinement, and photos of about 400 px, as the demo takes them; for these, the photos are looked at.
    """
    device = options.passed_on.get("coarse", {}).get("machine.device-type")
    device_type = " ".join(device) if device else compat.default_device_type()
    if device_type != "cpu":
        return dict(ON_GPU)
    longest_px = longest_side_px(options.capture) if options.images is None else _longest_photo_px(options.images)
    scale = choose_scale(longest_px)
    return ON_CPU | ({} if scale == 1 else {"resolution_scale": scale})


def choose_scale(longest_px: float) -> float:
    """Returns the factor on the size of photos that reduces large ones to about :data:`LONG_SIDE_PX`.

    >>> choose_scale(960.0), choose_scale(421.0)
    (0.42, 1.0)
    """
    return max(0.01, round(LONG_SIDE_PX / longest_px, 2)) if longest_px > LARGE_PX else 1.0


def longest_side_px(data: Path) -> float:
    """Returns the longest side of a capture's images as training loads them; 0 if the capture does not tell.

    Raises:
        CaptureError: it cannot be read.
    """
    meta, folder = read_transforms(data)
    first = next(iter(meta["frames"]), {})
    sizes = [value for source in (meta, first) for value in (source.get("w"), source.get("h"))]
    longest = max((float(value) for value in sizes if isinstance(value, int | float)), default=0.0)
    halvings = 0
    while longest > _MOST_PX and (folder / f"images_{2 ** (halvings + 1)}").is_dir():
        halvings, longest = halvings + 1, longest / 2
    return longest


def apply_defaults(options: ChainOptions, defaults: Mapping[str, Any]) -> ChainOptions:
    """Returns options with defaults for those that are not given, here or for a stage."""
    names = {(stage, name.rsplit(".", 1)[-1]) for stage, words in options.passed_on.items() for name in words}
    length_given = names & {("refine", "max-num-iterations"), ("refine", "refinement-time")}
    size_given = names & {(stage, "camera-res-scale-factor") for stage in ("coarse", "refine")}
    omitted = {"refinement_time"} if length_given or options.skip_refine else set()
    omitted |= {"resolution_scale"} if size_given else set()
    chosen = {name: value for name, value in defaults.items() if name not in omitted and getattr(options, name) is None}
    return dataclasses.replace(options, **chosen)


def describe_defaults(given: ChainOptions, complete: ChainOptions) -> str | None:
    """Returns a sentence on what was chosen for a CPU; None if nothing was."""
    chosen = {name: getattr(complete, name) for name in (*ON_CPU, "resolution_scale") if getattr(given, name) is None}
    chosen = {name: value for name, value in chosen.items() if value is not None and value != ON_GPU.get(name)}
    if given.skip_coarse:
        chosen.pop("coarse_method", None)
    if not chosen:
        return None
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
    return f"Chosen for a machine without a GPU: {words}. Other values give more detail and take longer."


def _longest_photo_px(images: Path) -> float:
    """The longest side of a video, or of the first photo in a folder; 0 if there is none that can be read."""
    if images.is_file():
        with contextlib.closing(sharpest_frames(images, _EVERY_FRAME)) as frames:
            first = next(frames, None)
        return float(max(first.size)) if first is not None else 0.0
    for path in find_photos(images):
        try:
            with Image.open(path) as photo:
                return float(max(photo.size))
        except UNREADABLE:
            continue
    return 0.0

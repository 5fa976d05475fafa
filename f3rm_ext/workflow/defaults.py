"""What the chain takes where an option is not given: by the device, and on a CPU by the size of the photos."""

import dataclasses
from pathlib import Path
from typing import Any

from PIL import Image

from f3rm_ext import compat
from f3rm_ext.utils.pictures import UNREADABLE
from f3rm_ext.workflow.demo import LONG_SIDE_PX, longest_side_px
from f3rm_ext.workflow.options import ChainOptions

ON_GPU: dict[str, Any] = {"coarse_method": "sugar-ext", "vertices": 200_000}
ON_CPU: dict[str, Any] = {"coarse_method": "sugar-ext-lite", "vertices": 30_000, "refinement_time": "short"}


def choose_defaults(options: ChainOptions) -> dict[str, Any]:
    """Returns the values of options that depend on this machine, by field of :class:`ChainOptions`.

    Without a GPU they are those with which the chain takes minutes to an hour: small splats and a small mesh, a short
    refinement, and photos of about 400 px, as the demo takes them.

    Args:
        options: as given; the capture or the photos are looked at on a CPU.
    """
    given = options.passed_on.get("coarse", {}).get("machine.device-type")
    device_type = " ".join(given) if given else compat.default_device_type()
    if device_type != "cpu":
        return dict(ON_GPU)
    longest = longest_side_px(options.capture) if options.images is None else _longest_photo_px(options.images)
    scale = {"resolution_scale": max(0.01, round(LONG_SIDE_PX / longest, 2))} if longest > LONG_SIDE_PX else {}
    return ON_CPU | scale


def with_defaults(options: ChainOptions, defaults: dict[str, Any]) -> ChainOptions:
    """Returns options with defaults for those that are not given, here or for a stage."""
    names = {(stage, name.rsplit(".", 1)[-1]) for stage, words in options.passed_on.items() for name in words}
    length_given = names & {("refine", "max-num-iterations"), ("refine", "refinement-time")}
    size_given = names & {(stage, "camera-res-scale-factor") for stage in ("coarse", "refine")}
    left_out = {"refinement_time"} if length_given or options.skip_refine else set()
    left_out |= {"resolution_scale"} if size_given else set()
    taken = {name: value for name, value in defaults.items() if name not in left_out and getattr(options, name) is None}
    return dataclasses.replace(options, **taken)


def describe_defaults(given: ChainOptions, taken: ChainOptions) -> str | None:
    """Returns a sentence on what was chosen for a CPU; None if nothing was.

    Args:
        given: options as they were typed.
        taken: the same with defaults.
    """
    chosen = {name: getattr(taken, name) for name in (*ON_CPU, "resolution_scale") if getattr(given, name) is None}
    chosen = {name: value for name, value in chosen.items() if value is not None and value != ON_GPU.get(name)}
    if given.skip_coarse:
        chosen.pop("coarse_method", None)
    if not chosen:
        return None
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
    return f"Chosen for a machine without a GPU: {words}. Give other values for more detail, which takes longer."


def _longest_photo_px(images: Path) -> float:
    """The longest side of the first photo in a folder; 0 if there is none that can be read."""
    for path in sorted(path for path in images.rglob("*") if path.is_file()):
        try:
            with Image.open(path) as photo:
                return float(max(photo.size))
        except UNREADABLE:
            continue
    return 0.0

"""Renders one large picture of the room. Import this module late, because it imports numba."""

from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.synthetic.cameras import focal_length_px, look_at
from f3rm_ext.synthetic.capture_files import encode_normals
from f3rm_ext.synthetic.config import PictureConfig
from f3rm_ext.synthetic.render import View, render
from f3rm_ext.synthetic.world import LOOK_AT, build_world, light_world
from f3rm_ext.utils.atomic_files import open_atomic
from f3rm_ext.utils.colormaps import label_table_bytes
from f3rm_ext.utils.ranges import check_ranges

_FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}


def write_picture(out: Path, config: PictureConfig) -> Path:
    """Writes one picture of the room, see :func:`f3rm_ext.synthetic.take_picture`."""
    check_ranges(config)
    if out.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{out} does not end in .jpg or .png, so its format is unclear: choose such a name.")
    try:
        if out.is_dir() or (out.exists() and not config.overwrite):
            raise CaptureError(f"{out} already exists and would be lost: choose another name, or use --overwrite.")
        out.parent.mkdir(parents=True, exist_ok=True)  # before the room is lit and rendered
        picture = _render(config)
        with open_atomic(out) as stream:
            picture.save(stream, _FORMATS[out.suffix.lower()], quality=85, optimize=True)
    except OSError as error:
        raise CaptureError(f"Cannot write {out}: {error.strerror or error}; choose a writable place.") from error
    return out


def _render(config: PictureConfig) -> Image.Image:
    scene = light_world(build_world(config.seed, config.shiny, config.light_rays), config.light_rays)
    angle = np.deg2rad(config.azimuth)
    eye = np.array([config.distance * np.cos(angle), config.distance * np.sin(angle), config.eye_height])
    view = render(
        scene,
        look_at(eye, np.array(LOOK_AT)),
        config.width,
        config.height,
        focal_length_px(config.fov, config.width),
        samples=config.samples,
        bounces=config.bounces,
    )
    picture = Image.fromarray(view.rgb)
    return _add_maps(picture, view) if config.maps else picture


def _add_maps(picture: Image.Image, view: View) -> Image.Image:
    """Returns the picture with depth, normals and labels side by side below it."""
    width = picture.width // 3
    height = round(picture.height * width / picture.width)
    sheet = Image.new("RGB", (picture.width, picture.height + height))
    sheet.paste(picture)
    palette = np.concatenate([np.zeros((1, 3), np.uint8), label_table_bytes(int(view.labels.max()))])  # 0: nothing hit
    panels = (_grey(view.depth), encode_normals(view.normals), palette[view.labels])
    for k, pixels in enumerate(panels):
        sheet.paste(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX), (k * width, picture.height))
    return sheet


def _grey(depth: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w 3"]:
    """Shows depth as grey that is linear in inverse depth; near is bright."""
    inverse = 1 / np.maximum(depth, 1e-3)
    low, high = inverse.min(), inverse.max()
    return np.repeat((255 * (inverse - low) / max(high - low, 1e-9)).astype(np.uint8)[..., None], 3, axis=2)

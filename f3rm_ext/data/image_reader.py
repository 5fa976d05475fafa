"""Reads images of a data set, with errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from nerfstudio.data.datasets.base_dataset import InputDataset

from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.errors import CaptureError, UserError, reason_of

MaskedPixels = Literal["ignore", "background"]
"""Treatment of masked pixels in training: they are ignored, or trained as empty."""
MaskedPixelsOption = Literal["auto", "ignore", "background"]
"""Treatment of masked pixels, or auto: as the masks suggest."""


@contextmanager
def naming_image(dataset: InputDataset, image_idx: int) -> Iterator[None]:
    """Turns any error while an image is decoded into a :class:`CaptureError` that names its file."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = reason_of(error)
        raise CaptureError(
            f"The image {dataset.image_filenames[image_idx]} or its mask cannot be read ({reason}): "
            "replace the file, or take its frame out of transforms.json."
        ) from error


def read_pixels(dataset: InputDataset, image_idx: int, masked: MaskedPixels = "ignore") -> ImagePixels:
    """Reads one image through the data set (which knows scale, alpha and masks) and crops it to its camera's size.

    Args:
        masked: "background" makes masked pixels transparent instead of invalid, but for those beside kept ones: photos
            mix the outermost pixels of an object with what is behind it, and masks are not exact. Pixels outside of
            ``fisheye_crop_radius`` are always invalid: nothing is known about them.

    Raises:
        CaptureError: the file cannot be decoded, or its size is not its camera's.
    """
    # With a mask colour nerfstudio mixes uint8 pixels with a colour in [0, 1]; as floats both have one scale.
    through_float = bool(getattr(dataset, "mask_color", None))
    with naming_image(dataset, image_idx):
        data = dataset.get_data(image_idx, image_type="float32" if through_float else "uint8")
    image = data["image"]
    if image.dtype != torch.uint8:
        image = (image * 255.0).round().clamp(0, 255).to(torch.uint8)
    height, width = _camera_size(dataset, image_idx, image.shape[0], image.shape[1])
    mask = data.get("mask")
    valid = None if mask is None else mask[:height, :width, 0].bool()
    image = image[:height, :width]
    empty = None
    if masked == "background" and valid is not None:
        import cv2  # fifty times as fast as torch's pooling

        empty = torch.from_numpy(cv2.dilate(valid.numpy().astype(np.uint8), np.ones((3, 3), np.uint8)) == 0)
        image, valid = _transparent(image, ~valid), valid | empty
    circle = _circle(dataset, height, width)
    if circle is not None:
        valid = circle if valid is None else valid & circle
    return ImagePixels(pixels=image, valid=valid, empty=empty)


def _transparent(image: UInt8[torch.Tensor, "h w channels"], where: Bool[torch.Tensor, "h w"]) -> torch.Tensor:
    """RGBA with alpha 0 at the given pixels."""
    alpha = image[..., 3:] if image.shape[-1] == 4 else torch.full_like(image[..., :1], 255)
    return torch.cat([image[..., :3], alpha.masked_fill(where[..., None], 0)], dim=-1)


def read_eval_batch(dataset: InputDataset, image_idx: int) -> dict[str, Any]:
    """Reads the batch of an evaluation image: ``image`` float32 in [0, 1], ``image_idx``, and ``mask`` if there is one.

    As in training, pixels outside of ``fisheye_crop_radius`` are masked.

    Raises:
        CaptureError: the file cannot be decoded, or its size is not its camera's.
    """
    with naming_image(dataset, image_idx):
        batch = dict(dataset[image_idx])
    height, width = _camera_size(dataset, image_idx, batch["image"].shape[0], batch["image"].shape[1])
    for key in ("image", "mask"):
        if key in batch:
            batch[key] = batch[key][:height, :width]
    circle = _circle(dataset, height, width)
    if circle is not None:
        batch["mask"] = batch["mask"].bool() & circle[..., None] if "mask" in batch else circle[..., None]
    return batch


def _camera_size(dataset: InputDataset, image_idx: int, height_px: int, width_px: int) -> tuple[int, int]:
    """The camera's size. The image may be one pixel larger (rounding of downscaled images)."""
    camera_height = int(dataset.cameras.height[image_idx])
    camera_width = int(dataset.cameras.width[image_idx])
    if not (0 <= height_px - camera_height <= 1 and 0 <= width_px - camera_width <= 1):
        raise CaptureError(
            f"The image {dataset.image_filenames[image_idx]} has {width_px} x {height_px} pixels, but its camera says "
            f"{camera_width} x {camera_height}: correct w and h (and the focal length with them) in transforms.json, "
            "or resize the image."
        )
    return camera_height, camera_width


def _circle(dataset: InputDataset, height_px: int, width_px: int) -> Bool[torch.Tensor, "h w"] | None:
    """The pixels within ``fisheye_crop_radius``, px of unscaled images; None where there is no such limit."""
    radius_px = (dataset.cameras.metadata or {}).get("fisheye_crop_radius")
    if radius_px is None:
        return None
    y = torch.arange(height_px)[:, None] - height_px // 2
    x = torch.arange(width_px)[None, :] - width_px // 2
    return y**2 + x**2 <= (dataset.scale_factor * radius_px) ** 2

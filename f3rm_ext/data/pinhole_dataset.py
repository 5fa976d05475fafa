"""A data set of pinhole images and cameras, whatever lens took the photos."""

from collections.abc import Sequence
from copy import copy
from dataclasses import astuple, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from torch import Tensor

from f3rm_ext.data.image_reader import MaskedPixels, read_pixels
from f3rm_ext.data.photo_dataset import PhotoDataset
from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.data.undistort import DistortedCamera, PinholeIntrinsics, largest_pinhole, shrunk, shrunk_size, undistort
from f3rm_ext.errors import CaptureError


class PinholeDataset(PhotoDataset):
    """nerfstudio's data set with distortion undone and sizes scaled exactly.

    The cameras are known without opening an image. ``image`` has three channels, as the viewer and the renderer need
    it; :meth:`picture` keeps alpha.

    Args:
        scale_factor: of the images, (0, 1].
        draft: photos are read at 1 / draft of their size, see :class:`PhotoDataset`.

    Raises:
        CaptureError: the images of a camera cannot be undistorted.
    """

    def __init__(self, dataparser_outputs: DataparserOutputs, scale_factor: float = 1.0, *, draft: int = 1) -> None:
        super().__init__(dataparser_outputs)
        self.scale_factor = scale_factor
        self.alpha_color = dataparser_outputs.alpha_color
        """Colour behind transparent pixels where an image is shown, RGB in [0, 1]; None means white."""
        self.metadata["alpha_color"] = self.alpha_color
        self.photos = PhotoDataset(
            replace(
                dataparser_outputs,
                alpha_color=None,
                metadata={key: value for key, value in self.metadata.items() if key == "mask_color"},
            ),
            1 / draft,
            draft=draft,
        )
        cameras = self.photos.cameras
        names = self.image_filenames
        self.lenses = [DistortedCamera.of(cameras, i, names[i]) for i in range(len(cameras))]
        self.views: list[PinholeIntrinsics] = []
        """The pinhole camera of each image, at full size."""
        for lens, name in zip(self.lenses, names, strict=True):
            try:
                self.views.append(largest_pinhole(lens))
            except ValueError as error:
                raise CaptureError(
                    f"The lens distortion of {name} cannot be undone, it folds the image over near its rim: "
                    "correct k1 to k4, p1 and p2 in transforms.json, or undistort the images beforehand."
                ) from error
        self.cameras = _scale_cameras(cameras, self.views, scale_factor)

    def at_scale(self, scale_factor: float) -> "PinholeDataset":
        """Returns the data set with its images scaled by another factor in (0, 1]; the rest is shared."""
        dataset = copy(self)
        dataset.scale_factor = scale_factor
        dataset.cameras = _scale_cameras(self.cameras, self.views, scale_factor)
        return dataset

    @classmethod
    def scale_to_side(cls, dataparser_outputs: DataparserOutputs, side_px: int) -> "PinholeDataset":
        """Returns the data set whose longest side of an image is given; images are not enlarged.

        Large photos are read as drafts of at least twice that size.
        """
        cameras = dataparser_outputs.cameras
        longest = int(torch.maximum(cameras.width, cameras.height).max())
        draft = max(draft for draft in (1, 2, 4, 8) if draft == 1 or longest >= 2 * draft * side_px)
        return cls(dataparser_outputs, min(1.0, side_px * draft / longest), draft=draft)

    @classmethod
    def find_views(cls, dataparser_outputs: DataparserOutputs, side_px: int) -> "PinholeDataset | None":
        """Returns :meth:`scale_to_side`; None if the cameras have no pinhole view, such as those of panoramas."""
        try:
            return cls.scale_to_side(dataparser_outputs, side_px)
        except CaptureError:
            return None

    def picture(self, image_idx: int, masked: MaskedPixels = "ignore") -> ImagePixels:
        """Reads, undistorts and scales one image; alpha and mask are kept, and transparent pixels blend. Raises
        CaptureError if it cannot be read."""
        picture = self.full_picture(image_idx, masked)
        return shrunk(picture, int(self.cameras.height[image_idx]), int(self.cameras.width[image_idx]))

    def full_picture(self, image_idx: int, masked: MaskedPixels = "ignore") -> ImagePixels:
        """Reads and undistorts one image at the size of :attr:`views`; see :meth:`picture`. Raises CaptureError if it
        cannot be read."""
        photo = read_pixels(self.photos, image_idx, masked)
        return undistort(photo, self.lenses[image_idx], self.views[image_idx])

    def pixels_identity(self, image_idx: int) -> str:
        """Identifies everything besides the file that decides the pixels of :meth:`get_numpy_image`."""
        view = self.views[image_idx]
        size = shrunk_size(view.height, view.width, self.scale_factor)
        return f"{astuple(self.lenses[image_idx])}|{size}"

    def get_numpy_image(self, image_idx: int) -> UInt8[np.ndarray, "h w channels"]:
        """RGB or RGBA."""
        return self.picture(image_idx).pixels.numpy()

    def get_image_uint8(self, image_idx: int) -> UInt8[Tensor, "h w 3"]:
        """RGB, over :attr:`alpha_color`."""
        return self._to_rgb(self.picture(image_idx))

    def get_image_float32(self, image_idx: int) -> Float[Tensor, "h w 3"]:
        """RGB in [0, 1], over :attr:`alpha_color`."""
        return self.get_image_uint8(image_idx).float() / 255.0

    def get_data(self, image_idx: int, image_type: Literal["uint8", "float32"] = "float32") -> dict[str, Any]:
        """nerfstudio's batch: ``image_idx``, ``image`` (RGB) and ``mask`` Bool[h w 1] if there is one."""
        picture = self.picture(image_idx)
        image = self._to_rgb(picture)
        data: dict[str, Any] = {
            "image_idx": image_idx,
            "image": image if image_type == "uint8" else image.float() / 255.0,
        }
        if picture.valid is not None:
            data["mask"] = picture.valid[..., None]
        data.update(self.get_metadata(data))
        return data

    def _to_rgb(self, picture: ImagePixels) -> UInt8[Tensor, "h w 3"]:
        if picture.pixels.shape[-1] == 3:
            return picture.pixels
        values = picture.pixels.float() / 255.0
        behind = torch.ones(3) if self.alpha_color is None else self.alpha_color
        image = values[..., :3] * values[..., 3:] + behind * (1.0 - values[..., 3:])
        return (image * 255.0).round().clamp(0, 255).to(torch.uint8)


def _scale_cameras(cameras: Cameras, full: Sequence[PinholeIntrinsics], scale_factor: float) -> Cameras:
    """The same poses with the intrinsics of scaled images."""
    views = [view.resized(*shrunk_size(view.height, view.width, scale_factor)) for view in full]
    metadata = {key: value for key, value in (cameras.metadata or {}).items() if key != "fisheye_crop_radius"}

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[getattr(view, name)] for view in views], dtype=dtype)

    return Cameras(
        camera_to_worlds=cameras.camera_to_worlds,
        **{name: column(name, torch.float32) for name in ("fx", "fy", "cx", "cy")},  # type: ignore[arg-type]
        width=column("width", torch.int64),
        height=column("height", torch.int64),
        camera_type=CameraType.PERSPECTIVE,
        times=cameras.times,
        metadata=metadata or None,
    )

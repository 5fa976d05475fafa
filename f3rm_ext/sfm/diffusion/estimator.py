"""DiffusionSfM as a front end of ``f3rm-ext sfm process``: ``--method diffusionsfm``."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.ExifTags import IFD, Base

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.sfm.diffusion.checkpoint import build_model, image_side_px, read_weights
from f3rm_ext.sfm.diffusion.prediction import predict_photos
from f3rm_ext.sfm.estimators import PredictedPoses
from f3rm_ext.utils.pictures import read_picture

WEIGHTS = "F3RM_EXT_DIFFUSIONSFM"
"""Environment variable with the path of a checkpoint."""


def predict(images: Sequence[Path], /) -> PredictedPoses:
    """Predicts the cameras of photos; the first is the frame, and its median point has distance 1.

    It computes on a GPU if there is one. Focal lengths are those of the model where EXIF has none.
    """
    path = os.environ.get(WEIGHTS)
    if not path:
        raise ConfigError(
            f"--method diffusionsfm needs weights: set {WEIGHTS} to a checkpoint that `f3rm-ext sfm train` wrote or "
            "that github.com/QitaoZhao/DiffusionSfM links to."
        )
    model = build_model(read_weights(Path(path))).to(compat.default_device_type())
    cameras = predict_photos(model, map(read_picture, images), side_px=image_side_px(Path(path)))
    viewmats = np.tile(np.eye(4), (len(images), 1, 1))
    viewmats[:, :3, :3] = cameras.rotations.numpy().transpose(0, 2, 1)
    viewmats[:, :3, 3] = -(viewmats[:, :3, :3] @ cameras.centers.numpy()[:, :, None])[:, :, 0]
    focals_px = cameras.focals_px.mean(dim=1).tolist()
    return PredictedPoses(
        {image.name: viewmat for image, viewmat in zip(images, viewmats, strict=True)},
        {image.name: focal for image, focal in zip(images, focals_px, strict=True) if not _has_focal_length(image)},
    )


def _has_focal_length(path: Path) -> bool:
    with Image.open(path) as image:
        return Base.FocalLength in image.getexif().get_ifd(IFD.Exif)

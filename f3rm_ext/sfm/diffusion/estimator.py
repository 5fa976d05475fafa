"""DiffusionSfM as a front end of ``f3rm-ext sfm process``: ``--method diffusionsfm``."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from f3rm_ext import compat
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.sfm.diffusion.checkpoint import build_model, image_side_px, read_weights
from f3rm_ext.sfm.diffusion.prediction import predict_photos
from f3rm_ext.sfm.estimators import PredictedPoses
from f3rm_ext.sfm.work_folder import file_stamp
from f3rm_ext.utils.pictures import read_picture

WEIGHTS = "F3RM_EXT_DIFFUSIONSFM"
"""Environment variable with the path of a checkpoint."""


class DiffusionSfm:
    """The front end, with the weights that :data:`WEIGHTS` names. It computes on a GPU if there is one."""

    def stamp(self) -> str:
        """Returns path, size and time of the weights. Raises UserError if there are none."""
        path = _weights()
        return f"{path.resolve()} {file_stamp(path)}"

    def __call__(self, images: Sequence[Path], /) -> PredictedPoses:
        """Predicts the cameras of photos; the first is the frame, and its median point has distance 1."""
        path = _weights()
        model = build_model(read_weights(path)).to(compat.default_device_type())
        cameras = predict_photos(model, map(read_picture, images), side_px=image_side_px(path))
        viewmats = np.tile(np.eye(4), (len(images), 1, 1))
        viewmats[:, :3, :3] = cameras.rotations.numpy().transpose(0, 2, 1)
        viewmats[:, :3, 3] = -(viewmats[:, :3, :3] @ cameras.centers.numpy()[:, :, None])[:, :, 0]
        names = [image.name for image in images]
        return PredictedPoses(
            dict(zip(names, viewmats, strict=True)),
            dict(zip(names, cameras.focals_px.mean(dim=1).tolist(), strict=True)),
        )


predict = DiffusionSfm()


def _weights() -> Path:
    path = os.environ.get(WEIGHTS)
    if not path:
        raise ConfigError(
            f"--method diffusionsfm needs weights: set {WEIGHTS} to a checkpoint that `f3rm-ext sfm train` wrote or "
            "that github.com/QitaoZhao/DiffusionSfM links to."
        )
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint {path}: check the path in {WEIGHTS}.")
    return Path(path)

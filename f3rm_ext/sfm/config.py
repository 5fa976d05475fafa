"""Options of ``f3rm-ext sfm process``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.ranges import Range, check_ranges

CameraModelName = Literal["auto", "simple-pinhole", "pinhole", "simple-radial", "radial", "opencv", "opencv-fisheye"]


@dataclass
class ProcessConfig:
    """Options of making a capture from photos or a video."""

    output: Annotated[Path, tyro.conf.arg(aliases=["--out", "--output-dir"])]
    """Folder for the capture: a new one, or one from an earlier call of this command. It may lie inside the
    folder of photos."""
    images: Annotated[Path | None, tyro.conf.arg(aliases=["--data"])] = None
    """Folder of photos, searched with its subfolders; or a video."""
    video: Path | None = None
    """Video to use instead of photos. The sharpest frames at even intervals are taken, without those between which the
    camera hardly moves."""
    masks: Path | None = None
    """Folder of masks named like the photos. Black pixels are ignored, here and in training."""
    method: str = "auto"
    """Source of the initial poses: colmap, diffusionsfm (whose weights the environment variable F3RM_EXT_DIFFUSIONSFM
    names), or the front end of another package. COLMAP refines the poses that a front end predicts. auto is colmap."""
    matching: Literal["auto", "exhaustive", "sequential", "vocabulary"] = "auto"
    """Pairs of photos to match: all pairs, neighbours in time, or the most similar photos by a vocabulary of their own
    features. auto is sequential for a video, exhaustive for up to 200 photos, and vocabulary for more."""
    mapper: Literal["auto", "incremental", "global"] = "auto"
    """COLMAP's mapper. incremental adds one camera after the other; global solves for all at once, which is less
    reliable. auto tries global, too, where incremental leaves photos without a pose or its poses are doubtful, and
    takes the better solution."""
    camera_model: CameraModelName = "auto"
    """Lens model. auto is opencv for cameras with 20 or more photos, and simple-radial for others."""
    cameras: Literal["auto", "one", "per-photo"] = "auto"
    """Photos that share a camera: all (one), none (per-photo), or those with the same size, camera and focal length in
    EXIF (auto)."""
    num_frames: Annotated[int, Range(2, 10_000)] = 150
    """Maximum number of frames to take from a video, 2 to 10,000."""
    max_size: Annotated[int, Range(0, 65_536)] = 0
    """Longest side of the capture's images, in px, 0 to 65,536; larger photos are reduced. 0 keeps their size."""
    feature_size: Annotated[int, Range(64, 65_536)] = 2000
    """Longest side at which features are detected, in px, 64 to 65,536. More px find more features and take longer."""
    max_features: Annotated[int, Range(64, 65_536)] = 8192
    """Maximum number of features per photo, 64 to 65,536."""
    undistort: bool = False
    """Write images and masks without lens distortion, for programs that expect pinhole cameras."""
    start_over: bool = False
    """Discard the results of earlier calls. An existing capture stays until the new one is complete, and is
    then replaced even if the new poses are doubtful."""

    def __post_init__(self) -> None:
        if self.images is not None and self.images.is_file() and self.video is None:
            self.images, self.video = None, self.images

    def check(self) -> None:
        """Checks the options that need no file."""
        if (self.images is None) == (self.video is None):
            raise ConfigError(
                f"{'Both' if self.images else 'Neither'} of --images and --video are given: give one of them."
            )
        if self.masks is not None and self.video is not None:
            raise ConfigError("--masks only works with photos, not with a video: leave --masks out.")
        check_ranges(self)
        source = self.images or self.video
        assert source is not None
        if not source.exists():
            raise ConfigError(
                f"--{'images' if self.images else 'video'} is {source}, which does not exist: check the path."
            )
        out, inputs = self.output.resolve(), [path.resolve() for path in (source, self.masks) if path is not None]
        for path in inputs:
            if out == path or out in path.parents:
                raise ConfigError(
                    f"--output {self.output} holds {path}, so that results would mix with your files: choose a folder "
                    "elsewhere, or in that of the photos."
                )

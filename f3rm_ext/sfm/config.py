"""Options of ``f3rm-ext sfm process``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from f3rm_ext.errors import ConfigError

CameraModelName = Literal["auto", "simple-pinhole", "pinhole", "simple-radial", "radial", "opencv", "opencv-fisheye"]
_LIMITS = {
    "num_frames": (2, 10_000),
    "max_size": (0, 65_536),
    "feature_size": (64, 65_536),
    "max_features": (64, 65_536),
}


@dataclass
class ProcessConfig:
    """From photos to a capture."""

    output: Path
    """Folder for the capture: a new one, or one that this command began."""
    images: Path | None = None
    """Folder of photos, with its subfolders."""
    video: Path | None = None
    """A video instead of photos: the sharpest frames at even distances are taken."""
    masks: Path | None = None
    """Folder of masks named like the photos. What is black is ignored, here and in training."""
    method: str = "auto"
    """Where poses come from: colmap, or a front end whose poses COLMAP then refines: diffusionsfm (weights in the
    environment variable F3RM_EXT_DIFFUSIONSFM), or one of another package. By default colmap."""
    matching: Literal["auto", "exhaustive", "sequential", "vocabulary"] = "auto"
    """Pairs of photos to compare. By default sequential for a video, all pairs of up to 200 photos, and beyond that the
    most similar ones by a vocabulary of their own features."""
    mapper: Literal["incremental", "global"] = "incremental"
    """How COLMAP solves for the cameras: one after the other, or all at once, which is faster with many photos and less
    sure."""
    camera_model: CameraModelName = "auto"
    """Model of the lens. By default opencv where 20 or more photos share a camera, otherwise simple-radial."""
    cameras: Literal["auto", "one", "per-photo"] = "auto"
    """Which photos share a camera. By default those with the same size and the same camera and focal length in EXIF."""
    num_frames: int = 150
    """Frames to take from a video, 2-10000."""
    max_size: int = 0
    """Longest side of the capture's images in pixels; larger photos are reduced. 0 keeps their size."""
    feature_size: int = 2000
    """Longest side in pixels at which features are sought, 64-65536. Larger finds more and takes longer."""
    max_features: int = 8192
    """Largest number of features of a photo, 64-65536."""
    undistort: bool = False
    """Write images and masks without lens distortion, for programs that expect pinhole cameras."""
    start_over: bool = False
    """Keep nothing of what is finished. The capture that is there stays until the new one is whole."""

    def check(self) -> None:
        """Checks the options that need no file.

        Raises:
            ConfigError: an option has an impossible value, or options contradict each other.
        """
        if (self.images is None) == (self.video is None):
            raise ConfigError(
                "Give either --images (a folder of photos) or --video (a file), "
                f"and not {'both' if self.images else 'neither'}."
            )
        if self.masks is not None and self.video is not None:
            raise ConfigError("--masks belongs to --images: frames of a video have no names that masks could share.")
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                option = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{option} is {value}, but it must lie between {low} and {high}: choose such a value."
                )
        source = self.images or self.video
        assert source is not None
        if not source.exists():
            raise ConfigError(
                f"There is nothing at {source}: check the path given with --{'images' if self.images else 'video'}."
            )
        out, inputs = self.output.resolve(), [path.resolve() for path in (source, self.masks) if path is not None]
        for path in inputs:
            if out == path or out in path.parents or path in out.parents:
                raise ConfigError(
                    f"--output {self.output} and {path} lie in each other, so results would mix with your files: "
                    "choose a folder elsewhere."
                )

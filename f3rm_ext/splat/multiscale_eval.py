"""How good pictures are that are larger or smaller than those trained on (Mip-Splatting, Yu et al. 2024, §6).

Nearer and farther cameras are stood for by the same cameras with more and with fewer pixels. What a smaller picture
should show is the photo averaged over the area of its pixels; what a larger one should show is the photo's own file,
where training was at a lower resolution than that of the files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from f3rm_ext.data.image_stream import picture_batch
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.undistort import PinholeIntrinsics, shrunk, shrunk_cameras, shrunk_size

METRICS = ("psnr", "ssim", "lpips", "l1")
MIN_SIDE_PX = 11
"""Side of SSIM's window; smaller pictures are not compared."""
_ROUNDING = 1e-6


@runtime_checkable
class EvaluatedModel(Protocol):
    """A model, as far as it is needed here."""

    @property
    def device(self) -> torch.device: ...

    def get_outputs_for_camera(self, camera: Cameras) -> dict[str, Tensor]: ...

    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]: ...


@dataclass(frozen=True)
class Possible:
    """Which of the scales asked for can be compared."""

    scales: tuple[float, ...]
    """In rising order; ratios to the sizes of training."""
    left_out: tuple[str, ...]
    """A sentence for each of the others."""


@dataclass
class ScaleResult:
    """Pictures of one size against the photos."""

    scale: float
    """Ratio of their sides to those of training."""
    width_px: int
    """Of the first of them."""
    height_px: int
    """Of the first of them."""
    per_image: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each photo, in order; empty where a mask leaves nothing of it."""
    example: Float[Tensor, "h width 3"] | None = None
    """The photo to look at, beside it what was drawn, in [0, 1]."""

    def means(self) -> dict[str, float]:
        """psnr, ssim, l1 and (where it was measured for all pictures) lpips, averaged over pictures.

        Pictures of which a mask leaves nothing have no metrics and do not count.
        """
        measured = [metrics for metrics in self.per_image if metrics]
        return {
            name: sum(metrics[name] for metrics in measured) / len(measured)
            for name in METRICS
            if measured and all(name in metrics for metrics in measured)
        }

    def record(self) -> dict[str, object]:
        """For the file of figures."""
        return {
            "scale": self.scale,
            "width_px": self.width_px,
            "height_px": self.height_px,
            "images": len(self.per_image),
            **self.means(),
            "psnr_of_images": [metrics.get("psnr") for metrics in self.per_image],
        }


def possible_scales(scales: Sequence[float], views: Sequence[PinholeIntrinsics], trained: float) -> Possible:
    """Sorts out the scales for which there is nothing to compare with.

    Args:
        scales: wanted ratios of sides to those of training, above 0; twice the same counts once.
        views: the pictures at the size of their files, undistorted.
        trained: ratio of the sides of training to those of the files, (0, 1].
    """
    largest = (max(view.width for view in views), max(view.height for view in views))
    kept, left_out = [], []
    for scale in sorted(set(scales)):
        ratio = scale * trained
        if ratio > 1 + _ROUNDING:
            wanted = " × ".join(str(round(side * ratio)) for side in largest)
            have = " × ".join(map(str, largest))
            left_out.append(
                f"×{scale:g} is left out: it takes pictures of {wanted} px, and the files have {have}; train with "
                f"--pipeline.datamanager.camera-res-scale-factor {1 / scale:.4g} or less to measure it."
            )
            continue
        short = min(min(size_at(view, scale, trained)) for view in views)
        if short < MIN_SIDE_PX:
            left_out.append(
                f"×{scale:g} is left out: its pictures have a side of {short} px, and it takes {MIN_SIDE_PX} to "
                "compare them."
            )
        else:
            kept.append(scale)
    return Possible(tuple(kept), tuple(left_out))


def size_at(view: PinholeIntrinsics, scale: float, trained: float) -> tuple[int, int]:
    """Height and width of a picture at a scale, px; at 1 they are those of training.

    Args:
        view: the picture at the size of its file.
        scale: ratio to the size of training.
        trained: ratio of the size of training to that of the file.
    """
    return shrunk_size(view.height, view.width, min(scale * trained, 1.0))


@torch.no_grad()
def evaluate_scales(
    model: EvaluatedModel,
    photos: PinholeDataset,
    scales: Sequence[float],
    example: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[ScaleResult]:
    """Draws each photo's view at each scale and compares. Files are read once, and one at a time.

    Args:
        model: in evaluation mode.
        photos: those to compare with, at the size of training.
        scales: as :func:`possible_scales` has them.
        example: index of the photo whose pictures are kept.
        advance: called after each picture.

    Raises:
        CaptureError: a photo cannot be read.
    """
    cameras, trained = photos.cameras.to(model.device), photos.scale_factor
    results: list[ScaleResult] = []
    for scale in scales:
        height, width = size_at(photos.views[0], scale, trained)
        results.append(ScaleResult(scale, width, height))
    for image_idx, view in enumerate(photos.views):
        full = photos.full_picture(image_idx)
        for result in results:
            size = size_at(view, result.scale, trained)
            camera = shrunk_cameras(cameras[image_idx : image_idx + 1], *size)
            batch = picture_batch(shrunk(full, *size), image_idx, model.device)
            metrics, images = model.get_image_metrics_and_images(model.get_outputs_for_camera(camera), batch)
            result.per_image.append({name: float(metrics[name]) for name in METRICS if name in metrics})
            if image_idx == example:
                result.example = images["img"].cpu()
            advance()
    return results

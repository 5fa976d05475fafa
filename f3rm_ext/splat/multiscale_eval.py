"""Image quality at resolutions above and below that of training (Mip-Splatting, Yu et al. 2024, §6).

The same cameras with more or fewer pixels stand in for cameras nearer to or farther from the scene. A smaller image is
compared with the photo averaged over the area of each pixel. A larger image is compared with the photo's file, which
requires training at a lower resolution than that of the files.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from nerfstudio.models.base_model import Model
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from f3rm_ext.data.image_stream import picture_batch
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.undistort import PinholeIntrinsics, shrunk, shrunk_cameras, shrunk_size
from f3rm_ext.utils.pictures import to_bytes

METRICS = ("psnr", "ssim", "lpips", "l1")
MIN_SIDE_PX = 11
"""Side of SSIM's window; smaller images are not compared."""
_ROUNDING = 1e-6
HEIGHT_PX = 256
"""Height of every image in the strip; small images are magnified with nearest-neighbour sampling."""
GAP_PX = 4
LABEL_PX = 18
_INK, _PAPER = (30, 30, 30), (255, 255, 255)


@dataclass
class ScaleResult:
    """Metrics of the images rendered at one scale."""

    scale: float
    """Ratio to the training resolution."""
    width_px: int
    """Width of the first image."""
    height_px: int
    """Height of the first image."""
    per_image: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each photo, in order; empty where a mask leaves out the whole photo."""
    example: Float[Tensor, "h width 3"] | None = None
    """The example photo and, to its right, the rendering, in [0, 1]."""

    def means(self) -> dict[str, float]:
        """Averages psnr, ssim, l1 and, where every image has it, lpips over the images.

        Images that a mask leaves out entirely have no metrics and do not count.
        """
        measured = [metrics for metrics in self.per_image if metrics]
        return {
            name: sum(metrics[name] for metrics in measured) / len(measured)
            for name in METRICS
            if measured and all(name in metrics for metrics in measured)
        }

    def record(self) -> dict[str, object]:
        """Returns the entry for the JSON file."""
        return {
            "scale": self.scale,
            "width_px": self.width_px,
            "height_px": self.height_px,
            "images": len(self.per_image),
            **self.means(),
            "psnr_of_images": [metrics.get("psnr") for metrics in self.per_image],
        }


def select_scales(
    scales: Sequence[float], views: Sequence[PinholeIntrinsics], trained: float
) -> tuple[list[float], list[str]]:
    """Returns the scales that can be compared with photos, ascending, and a sentence on each of the others.

    Args:
        scales: requested ratios to the training resolution, > 0; duplicates count once.
        views: intrinsics of the photos at the resolution of their files, undistorted.
        trained: ratio of the training resolution to that of the files, (0, 1].
    """
    largest = (max(view.width for view in views), max(view.height for view in views))
    kept, left_out = [], []
    for scale in sorted(set(scales)):
        ratio = scale * trained
        if ratio > 1 + _ROUNDING:
            wanted = " × ".join(str(round(side * ratio)) for side in largest)
            have = " × ".join(map(str, largest))
            left_out.append(
                f"×{scale:g} is left out: it needs photos of {wanted} px, but the files have {have}; train with "
                f"--pipeline.datamanager.camera-res-scale-factor {1 / scale:.4g} or less to measure it."
            )
            continue
        short = min(min(image_size(view, scale, trained)) for view in views)
        if short < MIN_SIDE_PX:
            left_out.append(
                f"×{scale:g} is left out: its images have a side of {short} px, but comparing them takes at least "
                f"{MIN_SIDE_PX}."
            )
        else:
            kept.append(scale)
    return kept, left_out


def image_size(view: PinholeIntrinsics, scale: float, trained: float) -> tuple[int, int]:
    """Returns height and width of an image at a scale, pixels; scale 1 is the training resolution.

    Args:
        trained: ratio of the training resolution to that of the file.
    """
    return shrunk_size(view.height, view.width, min(scale * trained, 1.0))


@torch.no_grad()
def evaluate_scales(
    model: Model,
    photos: PinholeDataset,
    scales: Sequence[float],
    example: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[ScaleResult]:
    """Renders the view of each photo at each scale and compares. Reads each file once, one at a time.

    Args:
        example: index of the photo whose images are kept.

    Raises:
        CaptureError: a photo cannot be read.
    """
    cameras, trained = photos.cameras.to(model.device), photos.scale_factor
    results: list[ScaleResult] = []
    for scale in scales:
        height, width = image_size(photos.views[0], scale, trained)
        results.append(ScaleResult(scale, width, height))
    for image_idx, view in enumerate(photos.views):
        full = photos.full_picture(image_idx)
        for result in results:
            size = image_size(view, result.scale, trained)
            camera = shrunk_cameras(cameras[image_idx : image_idx + 1], *size)
            batch = picture_batch(shrunk(full, *size), image_idx, model.device)
            metrics, images = model.get_image_metrics_and_images(model.get_outputs_for_camera(camera), batch)
            result.per_image.append({name: float(metrics[name]) for name in METRICS if name in metrics})
            if image_idx == example:
                result.example = images["img"].cpu()
            advance()
    return results


def strip_png(results: Sequence[ScaleResult]) -> bytes:
    """Draws the examples of all scales that have one side by side, each photo above its rendering, as PNG."""
    columns = [column for result in results if (column := _column(result)) is not None]
    width = sum(picture.width for picture, _ in columns) + GAP_PX * max(0, len(columns) - 1)
    height = LABEL_PX + 2 * HEIGHT_PX + GAP_PX
    strip = Image.new("RGB", (max(1, width), height), _PAPER)
    draw, font, left = ImageDraw.Draw(strip), ImageFont.load_default(), 0
    for picture, label in columns:
        draw.text((left + 2, 3), label, fill=_INK, font=font)
        strip.paste(picture, (left, LABEL_PX))
        left += picture.width + GAP_PX
    stream = io.BytesIO()
    strip.save(stream, "PNG")
    return stream.getvalue()


def _column(result: ScaleResult) -> tuple[Image.Image, str] | None:
    """Returns the photo above the rendering, and the label; None where no example was kept."""
    if result.example is None:
        return None
    pixels = to_bytes(result.example.numpy())
    height, both, _ = pixels.shape
    width_px = max(1, round(both / 2 * HEIGHT_PX / height))
    resampling = Image.Resampling.NEAREST if height < HEIGHT_PX else Image.Resampling.BOX
    column = Image.new("RGB", (width_px, 2 * HEIGHT_PX + GAP_PX), _PAPER)
    for row, half in enumerate((pixels[:, : both // 2], pixels[:, both // 2 :])):
        small = Image.fromarray(half).resize((width_px, HEIGHT_PX), resampling)
        column.paste(small, (0, row * (HEIGHT_PX + GAP_PX)))
    return column, f"x{result.scale:g}  {both // 2} x {height} px"

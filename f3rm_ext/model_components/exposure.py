"""Exposure and white balance of each photo, kept out of the scene."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor, nn

from f3rm_ext.capture.exposures import MIN_RANGE_STOPS, MeasuredStops
from f3rm_ext.model_components import masks

ExposureOption = Literal["auto", "on", "off"]
MeasureStops = Callable[[], MeasuredStops | None]
"""Finds exposures in what photos show; None where that is not possible."""
_SATURATED = 254 / 255
"""Colour from which on a photo only says that the scene is at least as bright."""


def make_exposures(option: ExposureOption, num_images: int, metadata: Mapping[str, Any]) -> "ExposureModel | None":
    """Returns the exposures of the training photos, or None if they are constant.

    Args:
        option: auto models them if they vary, by EXIF or, where it tells nothing, by what the photos show; it says so.
        metadata: of the data set: ``exif_stops`` of the photos (:func:`~f3rm_ext.capture.exposures.exposure_stops`) and
            ``measure_stops``, which finds them without EXIF; either may be missing.
    """
    stops: Sequence[float | None] = metadata.get("exif_stops") or [None] * num_images
    if option == "off":
        return None
    exposures = ExposureModel(stops)
    if option == "on":
        return exposures
    known = [value for value in stops if value is not None]
    measure: MeasureStops = metadata.get("measure_stops", lambda: None)
    if known:
        range_stops, source = max(known) - min(known), "EXIF"
        vary = range_stops >= MIN_RANGE_STOPS
    elif (measured := measure()) is not None:
        vary, range_stops, source = measured.vary, measured.range_stops, "what the photos show of the same places"
        if vary:
            exposures.start(lambda: measured)
    else:
        return None
    if vary:
        CONSOLE.log(
            f"Exposure by {source} varies by {range_stops:.1f} stops: each photo has gains of its own, which the scene "
            "does not take in. With --pipeline.model.exposure off there are none.",
            markup=False,
        )
    elif not known:
        explains = f"varies by {range_stops:.1f} stops, but explains less than half of how they differ"
        CONSOLE.log(
            f"Exposure by {source} {'is constant' if range_stops < MIN_RANGE_STOPS else explains}. With "
            "--pipeline.model.exposure on each photo has gains of its own.",
            markup=False,
        )
    return exposures if vary else None


def choices(option: ExposureOption, exposures: "ExposureModel | None") -> dict[str, str | float]:
    return {"exposure": "off" if exposures is None else "on"} if option == "auto" else {}


class ExposureModel(nn.Module):
    """Gains of the three colours of each training photo, in linear light, on the scene as rendered.

    Their logarithms have mean zero, so that the scene has the mean exposure and white balance of the photos.
    """

    exif_stops: Tensor
    """Exposure by EXIF, (photos,); NaN where unknown."""

    def __init__(self, exif_stops: Sequence[float | None]) -> None:
        """Starts with the exposures of EXIF; photos without have the mean."""
        super().__init__()
        known = torch.tensor([math.nan if stops is None else stops for stops in exif_stops], dtype=torch.float32)
        self.register_buffer("exif_stops", known)
        self.stops = nn.Parameter((known - known.nanmean()).nan_to_num(0.0)[:, None].repeat(1, 3))
        """Binary logarithms of the gains, (photos, 3)."""

    def forward(
        self,
        rgb: Float[Tensor, "*batch 3"],
        image: Int[Tensor, "*batch"] | int,
        behind: Float[Tensor, "*batch 3"] | None = None,
    ) -> Float[Tensor, "*batch 3"]:
        """Returns rendered colours (sRGB, 0 is black) as a training photo shows them; above 1 where it is saturated.

        Args:
            image: index of the training photo, of each colour or of all.
            behind: share of a background in the colours, which is no part of the scene and stays as it is.
        """
        if behind is None:
            return apply_stops(rgb, self.stops[image])
        return apply_stops(rgb - behind, self.stops[image]) + behind

    @torch.no_grad()
    def undo(self, photo: Float[Tensor, "*batch 3"], image: int) -> tuple[Tensor, Bool[Tensor, "*batch 1"]]:
        """Returns the colours of a training photo at the mean exposure, and where they are known: not saturated."""
        return apply_stops(photo, -self.stops[image]), (photo < _SATURATED).all(dim=-1, keepdim=True)

    @torch.no_grad()
    def start(self, measure: MeasureStops | None) -> None:
        """Starts a training without EXIF with what its photos show; does nothing in one that resumes."""
        if measure is None or bool(self.exif_stops.isfinite().any() or self.stops.any()):
            return
        if (measured := measure()) is not None:
            self.stops += torch.from_numpy(measured.stops).to(self.stops)

    @torch.no_grad()
    def project(self) -> None:
        """Makes the mean of the logarithms zero; called after each step of the optimiser."""
        self.stops -= self.stops.double().mean(dim=0).to(self.stops)

    def held_out_stops(self, exif_stops: float | None) -> Float[Tensor, "3"] | None:
        """Returns logarithms of the gains of a photo that was not trained on, by its EXIF; None if that is not known.

        A stop of EXIF has the effect that it has in the training photos, whose tone curves may soften it.
        """
        known = self.exif_stops.isfinite()
        if exif_stops is None or not bool(known.any()):
            return None
        mean = self.exif_stops[known].mean()
        deviations = (self.exif_stops[known] - mean)[:, None]
        spread = deviations.square().sum()
        effect = (deviations * self.stops.detach()[known]).sum(dim=0) / spread
        return torch.where(spread > 0, effect, 1.0) * (exif_stops - mean)


def apply_stops(rgb: Float[Tensor, "*batch 3"], stops: Float[Tensor, "*#batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Multiplies colours (sRGB) by 2^stops in linear light."""
    return _to_srgb(_to_linear(rgb.float()) * torch.exp2(stops))


def saturate(rgb: Float[Tensor, "*batch 3"], photo: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Returns colours of which those above 1 are cut off where the photo is saturated, too."""
    return torch.where(photo >= _SATURATED, rgb.clamp(max=1), rgb)


def judge(
    exposures: ExposureModel | None,
    outputs: Mapping[str, Tensor],
    photo: Float[Tensor, "h w 3"],
    batch: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gives a rendering the exposure of a held-out photo, so that metrics compare the scene and not its exposure.

    The exposure is that of EXIF. Without EXIF, gains are fitted to one half of the image and applied to the other, both
    ways, so that no pixel is judged by a fit that has seen it.

    Args:
        outputs: of the rendering; ``rgb`` is replaced.
        batch: ``exif_stops`` of the photo, if known, and ``mask``, if there is one.

    Returns:
        The outputs, and the metrics ``psnr_at_mean_exposure`` of the rendering as it was and ``exposure_from_exif``, 1
        or 0. Without exposures, the outputs as they are and no metrics.
    """
    if exposures is None:
        return dict(outputs), {}
    rgb, mask = outputs["rgb"], batch.get("mask")
    mask = None if mask is None else mask.to(rgb.device)
    stops = exposures.held_out_stops(batch.get("exif_stops"))
    metrics = {"exposure_from_exif": float(stops is not None)}
    if not masks.is_empty(mask):
        metrics["psnr_at_mean_exposure"] = float(masks.psnr(rgb, photo, mask))
    shown = fit_halves(rgb, photo, mask) if stops is None else apply_stops(rgb, stops)
    return {**outputs, "rgb": shown.clamp(0, 1)}, metrics


def fit_halves(
    rgb: Float[Tensor, "h w 3"], photo: Float[Tensor, "h w 3"], mask: Bool[Tensor, "h w 1"] | None = None
) -> Float[Tensor, "h w 3"]:
    """Returns the left half of an image with the gains that fit its right half to the photo, and the other way round.

    Args:
        mask: False for pixels that do not count.
    """
    kept = ((photo < _SATURATED) & (rgb < _SATURATED)).all(dim=-1, keepdim=True)
    kept = kept if mask is None else kept & mask
    middle = rgb.shape[1] // 2
    halves = (slice(None, middle), slice(middle, None))
    left, right = (_fit_stops(rgb[:, half], photo[:, half], kept[:, half]) for half in halves)
    return torch.cat([apply_stops(rgb[:, halves[0]], right), apply_stops(rgb[:, halves[1]], left)], dim=1)


def _fit_stops(
    rgb: Float[Tensor, "h w 3"], photo: Float[Tensor, "h w 3"], kept: Bool[Tensor, "h w 1"]
) -> Float[Tensor, "3"]:
    """Returns the logarithms of the ratios of the mean light of photo and rendering; 0 where there is none."""
    own, wanted = ((_to_linear(image) * kept).sum(dim=(0, 1)) for image in (rgb, photo))
    return torch.where((own > 0) & (wanted > 0), (wanted / own).log2(), 0.0)


def _to_linear(srgb: Tensor) -> Tensor:
    return torch.where(srgb <= 0.04045, srgb / 12.92, ((srgb.clamp(min=0.04045) + 0.055) / 1.055) ** 2.4)


def _to_srgb(linear: Tensor) -> Tensor:
    return torch.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear.clamp(min=0.0031308) ** (1 / 2.4) - 0.055)

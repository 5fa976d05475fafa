"""Views rendered and scored: the scores, the best pixel and its place, and the range of a heat map."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import Queryable, score_image
from f3rm_ext.query.relevancy import label_map
from f3rm_ext.query.run import View
from f3rm_ext.utils.pictures import to_bytes

MIN_ACCUMULATION = 0.5
"""Accumulation from which a pixel counts as showing a surface."""
_PREVIEW_VIEWS = 16
"""From how many views heat ranges are chosen, at most."""
_PREVIEW_PX = 4096
"""Number of pixels of each of them, about."""
_HOTTEST_QUANTILE = 0.999


@dataclass(frozen=True)
class ScoredView:
    """One view, rendered and scored."""

    view: View
    scores: Float32[np.ndarray, "h w queries"]
    """Relevancy or cosine of each query."""
    rgb: UInt8[np.ndarray, "h w 3"]
    depth: Float32[np.ndarray, "h w"]
    """Median distance along the ray, scene units."""
    accumulation: Float32[np.ndarray, "h w"]
    """Opacity, 0 to 1."""

    def labels(self, threshold: float) -> Int64[np.ndarray, "h w"]:
        """Returns the index of the query with the highest score, -1 where that score is below the threshold."""
        return label_map(torch.from_numpy(self.scores), threshold).numpy()


@torch.inference_mode()
def match_pixels(
    model: Queryable, camera: Cameras, queries: Sequence[Query], threshold: float
) -> Bool[np.ndarray, "h w"]:
    """Returns the pixels whose surface has at least this score for any of the queries."""
    scores, outputs = score_image(model, camera, queries)
    match = (scores.amax(dim=-1) >= threshold) & (outputs["accumulation"][..., 0] >= MIN_ACCUMULATION)
    return match.cpu().numpy()


def score_views(model: Queryable, views: Sequence[View], queries: Sequence[Query]) -> Iterator[ScoredView]:
    """Scores views one by one, each when it is needed; see :func:`score_view`."""
    return (score_view(model, view, queries) for view in views)


def score_view(model: Queryable, view: View, queries: Sequence[Query]) -> ScoredView:
    scores, outputs = score_image(model, view.camera, queries)
    rgb, depth, accumulation = (outputs[name].float().cpu().numpy() for name in ("rgb", "depth", "accumulation"))
    return ScoredView(
        view=view,
        scores=scores.float().cpu().numpy(),
        rgb=to_bytes(rgb),
        depth=depth[..., 0],
        accumulation=accumulation[..., 0],
    )


def summarize_view(
    scored: ScoredView, queries: Sequence[Query], threshold: float, frame: CaptureFrame
) -> dict[str, dict]:
    """Summarises the result of each query in a view, as JSON by the query's name.

    Returns:
        ``best_px`` (x, y of the best pixel's centre), ``best_score``, ``fraction_found``, and the place where that
        pixel's ray meets a surface, ``best_at_scene`` and ``best_at_capture`` (None where it meets none).
    """
    summary = {}
    for index, query in enumerate(queries):
        scores = scored.scores[..., index]
        row, col = np.unravel_index(int(scores.argmax()), scores.shape)
        place = surface_point(scored, int(row), int(col))
        summary[query.name] = {
            "best_px": [float(col) + 0.5, float(row) + 0.5],
            "best_score": float(scores[row, col]),
            "fraction_found": float((scores >= threshold).mean()),
            "best_at_scene": None if place is None else place.tolist(),
            "best_at_capture": None if place is None else frame.to_capture(place).tolist(),
        }
    return summary


def surface_point(scored: ScoredView, row: int, col: int) -> np.ndarray | None:
    """Returns where the ray of a pixel meets a surface, scene frame; None where it meets none."""
    if scored.accumulation[row, col] < MIN_ACCUMULATION:
        return None
    place = torch.tensor([[row + 0.5, col + 0.5]])
    rays = scored.view.camera.generate_rays(camera_indices=torch.zeros(1, 1, dtype=torch.long), coords=place)
    return (rays.origins + rays.directions * float(scored.depth[row, col]))[0].double().numpy()


def heat_ranges(
    model: Queryable, views: Sequence[View], queries: Sequence[Query], advance: Callable[[], None] = lambda: None
) -> list[tuple[float, float]]:
    """Chooses for each query the scores at which heat begins and is greatest, the same in all views.

    Some of the views, :func:`preview_views`, are scored at a small size. The highest score there is hottest. Heat
    begins at a relevancy of ½, where a pixel is as similar to negatives as to the query, or at the median of cosines.
    """
    previews = []
    for view in preview_views(views):
        small = View(view.name, _small_camera(view.camera))
        previews.append(score_view(model, small, queries).scores.reshape(-1, len(queries)))
        advance()
    scores = np.concatenate(previews)
    ranges = []
    for index, query in enumerate(queries):
        column = scores[:, index]
        column = column[column > query.lowest] if (column > query.lowest).any() else column  # where features are
        high = float(np.quantile(column, _HOTTEST_QUANTILE))
        low = 0.5 if query.is_relevancy else float(np.median(column))
        # What is nowhere found is nowhere hot.
        ranges.append((low, max(high, low + (0.1 if query.is_relevancy else 0.02))))
    return ranges


def preview_views(views: Sequence[View]) -> list[View]:
    """Returns the views from which heat ranges are chosen: a few of all views, evenly spread."""
    count = min(_PREVIEW_VIEWS, len(views))
    return [views[int(place)] for place in np.linspace(0, len(views) - 1, count)]


def _small_camera(camera: Cameras) -> Cameras:
    pixels = int(camera.width.item()) * int(camera.height.item())
    small = camera[:]  # A copy, because rescaling changes a camera in place.
    if pixels > _PREVIEW_PX:
        small.rescale_output_resolution((_PREVIEW_PX / pixels) ** 0.5)
    return small

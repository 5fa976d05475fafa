"""Answers to queries in views: scores, where the best of them is, and how hot a heat map should be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import Queryable, score_image
from f3rm_ext.query.relevancy import label_map
from f3rm_ext.query.views import View
from f3rm_ext.utils.pictures import to_bytes

OPAQUE = 0.5
"""Accumulation from which on a pixel is taken to show a surface."""
_LOOKED_AT = 16
"""Views that the heat is chosen from."""
_PREVIEW_PX = 4096
"""Pixels of each of them."""
_TOP = 0.999


@dataclass(frozen=True)
class ScoredView:
    """What a view answers to several queries."""

    view: View
    """The view."""
    scores: Float32[np.ndarray, "h w queries"]
    """Relevancy or cosine of each query."""
    rgb: UInt8[np.ndarray, "h w 3"]
    """The rendered picture."""
    depth: Float32[np.ndarray, "h w"] | None
    """Median distance along the ray, scene units; None where the model renders none."""
    accumulation: Float32[np.ndarray, "h w"] | None
    """Opacity; None where the model renders none."""

    def labels(self, threshold: float) -> Int64[np.ndarray, "h w"]:
        """Index of the query with the greatest score, -1 where it is below the threshold."""
        return label_map(torch.from_numpy(self.scores), threshold).numpy()


def ask(model: Queryable, view: View, queries: Sequence[Query]) -> ScoredView:
    """Renders a view and asks.

    Args:
        model: the model.
        view: the view.
        queries: at least one.
    """
    scores, outputs = score_image(model, view.camera, queries)
    rgb = outputs.get("rgb")
    height, width = scores.shape[:2]
    black = np.zeros((height, width, 3), dtype=np.uint8)
    return ScoredView(
        view=view,
        scores=scores.float().cpu().numpy(),
        rgb=black if rgb is None else to_bytes(rgb[..., :3].float().cpu().numpy()),
        depth=_plane(outputs, "depth"),
        accumulation=_plane(outputs, "accumulation"),
    )


def _plane(outputs: Mapping[str, torch.Tensor], name: str) -> Float32[np.ndarray, "h w"] | None:
    return outputs[name][..., 0].float().cpu().numpy() if name in outputs else None


def summarise(answer: ScoredView, queries: Sequence[Query], threshold: float, frame: CaptureFrame) -> dict[str, dict]:
    """What there is to say of each query in a view, as JSON by name.

    Args:
        answer: of the view.
        queries: those that were asked.
        threshold: from which on a pixel counts as found.
        frame: of the capture.

    Returns:
        ``best_px`` (x, y of the pixel's centre), ``best_score``, ``fraction_found``, and where that pixel's ray
        meets a surface in both frames (None where it meets none).
    """
    summary = {}
    for index, query in enumerate(queries):
        scores = answer.scores[..., index]
        row, col = np.unravel_index(int(scores.argmax()), scores.shape)
        at = surface_point(answer, int(row), int(col))
        summary[query.name] = {
            "best_px": [float(col) + 0.5, float(row) + 0.5],
            "best_score": float(scores[row, col]),
            "fraction_found": float((scores >= threshold).mean()),
            "best_at_scene": None if at is None else at.tolist(),
            "best_at_capture": None if at is None else frame.to_capture(at).tolist(),
        }
    return summary


def surface_point(answer: ScoredView, row: int, col: int) -> np.ndarray | None:
    """Where the ray of a pixel meets a surface, scene frame; None where it meets none."""
    if answer.depth is None or (answer.accumulation is not None and answer.accumulation[row, col] < OPAQUE):
        return None
    place = torch.tensor([[row + 0.5, col + 0.5]])
    rays = answer.view.camera.generate_rays(camera_indices=torch.zeros(1, 1, dtype=torch.long), coords=place)
    return (rays.origins + rays.directions * float(answer.depth[row, col]))[0].double().numpy()


def heat_ranges(
    model: Queryable, views: Sequence[View], queries: Sequence[Query], advance: Callable[[], None] = lambda: None
) -> list[tuple[float, float]]:
    """For each query the scores at which heat begins and is greatest, the same for all views.

    Some of the views are asked at a small size. The greatest score seen there is hottest. Heat begins at a relevancy
    of ½, as much like the query as like what it is told from; and for cosines at their median.

    Args:
        model: the model.
        views: all views.
        queries: at least one.
        advance: called once for each view looked at, see :func:`looked_at`.
    """
    seen = []
    for view in looked_at(views):
        seen.append(ask(model, View(view.name, _small(view.camera)), queries).scores.reshape(-1, len(queries)))
        advance()
    scores = np.concatenate(seen)
    ranges = []
    for index, query in enumerate(queries):
        high = float(np.quantile(scores[:, index], _TOP))
        low = 0.5 if query.is_relevancy else float(np.median(scores[:, index]))
        # What is nowhere found is nowhere hot.
        ranges.append((low, max(high, low + (0.1 if query.is_relevancy else 0.02))))
    return ranges


def looked_at(views: Sequence[View]) -> list[View]:
    """The views that the heat is chosen from: some, evenly spread."""
    count = min(_LOOKED_AT, len(views))
    return [views[int(place)] for place in np.linspace(0, len(views) - 1, count)]


def _small(camera: Cameras) -> Cameras:
    pixels = int(camera.width.item()) * int(camera.height.item())
    small = camera[:]
    if pixels > _PREVIEW_PX:
        small.rescale_output_resolution((_PREVIEW_PX / pixels) ** 0.5)
    return small

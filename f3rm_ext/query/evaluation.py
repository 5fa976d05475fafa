"""Compares queries with labels: in rendered views, at points in space, and in the 2D features."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from f3rm_ext.capture.ground_truth import CaptureGroundTruth, LabelledView, LabelSource
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.features.space import FeatureSpace
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.exemplar import append_residual
from f3rm_ext.query.metrics import QueryMetrics
from f3rm_ext.query.queryable import Queryable, Scorer, score_points

MIN_VISIBLE_PX = 25
"""Classes with fewer pixels in a view do not count there."""
_PIXELS_AT_ONCE = 1 << 14
_SCORES_AT_ONCE = 1 << 26


def find_labelled_cameras(
    files: Sequence[Path], cameras: Cameras, truth: LabelSource
) -> Iterator[tuple[Path, Cameras, LabelledView]]:
    """Yields photo, camera and labels, at the camera's size, of those views of a split that have labels.

    Raises CaptureError if labels cannot be read.
    """
    for index, file in enumerate(files):
        camera = cameras[index : index + 1]
        view = truth.view(file, int(camera.height.item()), int(camera.width.item()))
        if view is not None:
            yield file, camera, view


def count_view(
    metrics: QueryMetrics,
    queries: Sequence[Query],
    scores: Float[Tensor, "h w queries"],
    view: LabelledView,
    kept: Bool[np.ndarray, "h w"] | None = None,
    *,
    draw: int = 0,
) -> None:
    """Adds a view to the metrics: every class that is visible in it, with the query of that name.

    Args:
        queries: named after the classes they look for.
        kept: pixels that count; None for all.
    """
    columns = {query.name: index for index, query in enumerate(queries)}
    masks = view.masks if kept is None else {name: mask & kept for name, mask in view.masks.items()}
    count_classes(
        metrics, columns, lambda name: only_kept(scores[..., columns[name]], kept), masks, view.boxes, draw=draw
    )


def count_draws(
    metrics: QueryMetrics,
    draws: Sequence[Sequence[Query]],
    score: Callable[[list[Query]], Float[Tensor, "h w queries"]],
    view: LabelledView,
    kept: Bool[np.ndarray, "h w"] | None = None,
) -> None:
    """Adds a view to the metrics, asked by each draw of examples.

    Args:
        score: returns the scores of queries; called for as many draws at a time as fit into 256 MiB.
    """
    height, width = next(iter(view.masks.values())).shape if view.masks else (1, 1)
    step = max(1, _SCORES_AT_ONCE // (height * width * max(1, *map(len, draws))))
    for first in range(0, len(draws), step):
        part = draws[first : first + step]
        scores = score([query for queries in part for query in queries])
        for draw, (queries, own) in enumerate(zip(part, split_draws(scores, part), strict=True), first):
            count_view(metrics, queries, own, view, kept, draw=draw)


def count_classes(
    metrics: QueryMetrics,
    classes: Iterable[str],
    score: Callable[[str], Float[Tensor, "..."] | None],
    masks: Mapping[str, Bool[np.ndarray, "..."]],
    boxes: Mapping[str, tuple[tuple[float, float, float, float], ...]] | None = None,
    *,
    draw: int = 0,
) -> None:
    """Adds every class that is visible to the metrics.

    Args:
        score: returns the scores of a class, at pixels or points; None for a class that is not predicted.
        masks: pixels or points of the visible classes.
        boxes: boxes of their objects; None for points.
    """
    for name in classes:
        mask = masks.get(name)
        if mask is not None and int(mask.sum()) >= MIN_VISIBLE_PX:
            metrics.add(name, score(name), torch.from_numpy(mask), None if boxes is None else boxes[name], draw=draw)


def only_kept(score: Float[Tensor, "h w"], kept: Bool[np.ndarray, "h w"] | None) -> Float[Tensor, "h w"]:
    """Returns the scores with −∞ at the pixels left out: below every threshold, and never the best."""
    return score if kept is None else score.masked_fill(torch.from_numpy(~kept).to(score.device), -torch.inf)


@torch.inference_mode()
def score_feature_map(
    feature_map: FeatureMap, queries: Sequence[Query], height_px: int, width_px: int
) -> Float[Tensor, "h w queries"]:
    """Scores the 2D features themselves, interpolated to pixels: the baseline for a field distilled from them.

    All queries are of the map's head.
    """
    packed = PackedMaps.pack([append_residual(feature_map)])
    space = FeatureSpace.of_features()
    if feature_map.residual_norm is not None:
        space = FeatureSpace.from_residual_codes(feature_map.values.shape[2])
    scorer = Scorer(queries, {queries[0].head: space})
    y, x = torch.meshgrid(torch.arange(height_px) + 0.5, torch.arange(width_px) + 0.5, indexing="ij")
    places = torch.stack([y, x], dim=-1).view(-1, 2)
    parts = []
    for part in places.split(_PIXELS_AT_ONCE):
        sampled = packed.sample(torch.zeros(len(part), dtype=torch.long), part)
        parts.append(scorer(lambda _, sampled=sampled: sampled))
    return torch.cat(parts).view(height_px, width_px, -1)


@dataclass(frozen=True)
class LabelledPoints:
    """Points on surfaces, with labels."""

    points: Float[np.ndarray, "points 3"]
    """Scene frame."""
    labels: np.ndarray
    """Class of each, as numbered in the label images."""

    def masks(self, truth: CaptureGroundTruth) -> dict[str, Bool[np.ndarray, " points"]]:
        return {thing.name: self.labels == thing.label for thing in truth.things}


def surface_points(
    files: Sequence[Path],
    cameras: Cameras,
    truth: CaptureGroundTruth,
    scale: float,
    every_px: int = 3,
    kept: Callable[[int], Bool[np.ndarray, "h w"] | None] = lambda index: None,
) -> LabelledPoints | None:
    """Returns surface points of the views that have both depth and labels: every n-th pixel of every n-th row.

    Args:
        scale: scene units per metre.
        kept: returns the pixels of a view that count, None for all.

    Returns:
        The points; None where no view has both.
    """
    points, labels = [], []
    for index, file in enumerate(files):
        camera = cameras[index : index + 1]
        height, width = int(camera.height.item()), int(camera.width.item())
        depth_m, label = truth.depth_m(file, height, width), truth.labels(file, height, width)
        if depth_m is None or label is None:
            continue
        rays = camera.generate_rays(camera_indices=0, keep_shape=True)
        distance = torch.from_numpy(depth_m)[..., None] * scale * rays.metadata["directions_norm"]
        places = (rays.origins + rays.directions * distance).numpy()[::every_px, ::every_px]
        known = depth_m[::every_px, ::every_px] > 0
        mask = kept(index)
        if mask is not None:
            known &= mask[::every_px, ::every_px]
        points.append(places[known])
        labels.append(label[::every_px, ::every_px][known])
    if not points:
        return None
    return LabelledPoints(np.concatenate(points).astype(np.float32), np.concatenate(labels))


def evaluate_points(
    model: Queryable,
    draws: Sequence[Sequence[Query]],
    surface: LabelledPoints,
    truth: CaptureGroundTruth,
    threshold: float,
) -> QueryMetrics:
    """Scores the points themselves, without rendering; each class of each draw is one pair.

    Args:
        draws: queries named after the classes they look for.
    """
    metrics, masks = QueryMetrics(threshold), surface.masks(truth)
    scores = score_points(model, torch.from_numpy(surface.points), [query for queries in draws for query in queries])
    for draw, (queries, part) in enumerate(zip(draws, split_draws(scores, draws), strict=True)):
        columns = {query.name: part[:, index] for index, query in enumerate(queries)}
        count_classes(metrics, columns, columns.get, masks, draw=draw)
    return metrics


def split_draws(
    scores: Float[Tensor, "*batch queries"], draws: Sequence[Sequence[Query]]
) -> tuple[Float[Tensor, "*batch _"], ...]:
    """Splits the scores of all queries into those of each draw."""
    return scores.split([len(queries) for queries in draws], dim=-1)

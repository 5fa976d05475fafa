"""Accuracy of queries against labels. Pure maths on scores and masks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

PINNED_THRESHOLD = 0.5
"""The relevancy of a pixel that is as similar to the nearest negative as to the query."""
THRESHOLDS = np.linspace(-1.0, 1.0, 401)
"""The candidates for the best threshold."""
_RIM = 0.02
"""Width of the rim of :func:`boundary_iou`, as a share of the image's diagonal."""
_RESAMPLES = 2000


@dataclass
class _Pair:
    """One class in one view."""

    name: str
    draw: int
    hit: bool
    size: int
    pinned_selected: int
    pinned_both: int
    boundary: float | None
    selected: np.ndarray
    both: np.ndarray


@dataclass
class QueryMetrics:
    """Mean accuracy over pairs of view and class; all pairs count the same.

    *Localisation* is LERF's: the best-scored pixel lies in a box of the object. *IoU* compares the pixels that reach
    the threshold with the object's; *accuracy* is the share of the object's pixels that reach it. Both are reported at
    a threshold fixed beforehand and, separately, at the single threshold for all classes and views that is best
    afterwards. *Boundary IoU* compares only the pixels along both outlines, at the fixed threshold
    (Cheng et al. 2021, arXiv:2103.16562).

    >>> import torch
    >>> metrics = QueryMetrics(threshold=0.5)
    >>> metrics.add("mug", torch.tensor([0.9, 0.6, 0.2, 0.1]), torch.tensor([True, False, True, False]))
    >>> summary = metrics.summary()
    >>> summary["localisation"], round(summary["miou"], 3), summary["macc"]
    (1.0, 0.333, 0.5)
    """

    threshold: float = PINNED_THRESHOLD
    _pairs: list[_Pair] = field(default_factory=list)

    def add(
        self,
        name: str,
        score: Float[Tensor, "..."] | None,
        mask: Bool[Tensor, "..."],
        boxes: Sequence[tuple[float, float, float, float]] | None = None,
        *,
        draw: int = 0,
    ) -> None:
        """Counts one class in one view.

        Args:
            score: score of its query, −1 to 1, per pixel (h, w) or per point; NaN counts as −1. None where nothing is
                predicted: a miss, whatever pixel comes first.
            boxes: left, top, right and bottom of its objects in pixels; None requires the best pixel in the mask.
            draw: number of the example that the query was made of, where there are several.
        """
        is_predicted = score is not None
        score = torch.full(mask.shape, -1.0) if score is None else score
        score, mask = score.detach().float().cpu().nan_to_num(nan=-1.0), mask.cpu()
        flat, inside = score.flatten(), mask.flatten()
        best = int(flat.argmax())
        if boxes is None:
            hit = bool(inside[best])
        else:
            row, col = divmod(best, score.shape[-1])
            hit = any(left <= col + 0.5 <= right and top <= row + 0.5 <= bottom for left, top, right, bottom in boxes)
        at_least = flat >= self.threshold
        selected, both = (_count_reached(values.double().numpy()) for values in (flat, flat[inside]))
        self._pairs.append(
            _Pair(
                name=name,
                draw=draw,
                hit=hit and is_predicted,
                size=int(inside.sum()),
                pinned_selected=int(at_least.sum()),
                pinned_both=int((at_least & inside).sum()),
                boundary=boundary_iou(at_least.view(mask.shape).numpy(), mask.numpy()) if mask.ndim == 2 else None,
                selected=selected,
                both=both,
            )
        )

    def __len__(self) -> int:
        return len(self._pairs)

    def summary(self) -> dict[str, Any]:
        """Returns means over the pairs; only ``pairs`` = 0 where there are none.

        With several draws, ``intervals`` has the 95 % interval of each mean, from a bootstrap over the draws.
        """
        return self._summary(self._pairs)

    def summarize_classes(self) -> dict[str, dict[str, Any]]:
        """Returns the same for each class, at the best threshold of all classes together."""
        names = dict.fromkeys(pair.name for pair in self._pairs)
        best = self._best(self._pairs) if self._pairs else 0
        return {name: self._summary([p for p in self._pairs if p.name == name], best) for name in names}

    def _summary(self, pairs: Sequence[_Pair], best: int | None = None) -> dict[str, Any]:
        if not pairs:
            return {"pairs": 0}
        best = self._best(pairs) if best is None else best
        pinned = np.asarray([_iou(pair.pinned_both, pair.pinned_selected, pair.size) for pair in pairs])
        at_best = np.asarray([_iou(int(p.both[best]), int(p.selected[best]), p.size) for p in pairs])
        figures = {
            "localisation": np.asarray([float(pair.hit) for pair in pairs]),
            "miou": pinned,
            "macc": np.asarray([pair.pinned_both / max(1, pair.size) for pair in pairs]),
            "iou_above_25": (pinned > 0.25).astype(float),
            "iou_above_50": (pinned > 0.5).astype(float),
            "best_miou": at_best,
            "best_macc": np.asarray([p.both[best] / max(1, p.size) for p in pairs]),
        }
        if all(pair.boundary is not None for pair in pairs):
            figures["boundary_iou"] = np.asarray([float(pair.boundary or 0.0) for pair in pairs])
        draws = [pair.draw for pair in pairs]
        intervals = {name: bootstrap_interval(values, draws) for name, values in figures.items()}
        return {
            "pairs": len(pairs),
            "draws": len(set(draws)),
            "threshold": self.threshold,
            "best_threshold": float(THRESHOLDS[best]),
            **{name: float(values.mean()) for name, values in figures.items()},
            **({"intervals": intervals} if len(set(draws)) > 1 else {}),
        }

    def _best(self, pairs: Sequence[_Pair]) -> int:
        both, selected = (
            np.stack([getattr(pair, name) for pair in pairs]).astype(float) for name in ("both", "selected")
        )
        sizes = np.asarray([pair.size for pair in pairs], dtype=float)[:, None]
        return int((both / np.maximum(1.0, selected + sizes - both)).mean(axis=0).argmax())


def boundary_iou(mask: Bool[np.ndarray, "h w"], other: Bool[np.ndarray, "h w"]) -> float:
    """Returns the IoU of the inner rims of two masks, 2 % of the image's diagonal wide; 1 where both are empty.

    Source: Cheng et al. 2021, Boundary IoU (arXiv:2103.16562). Outside of the image counts as outside of a mask.

    >>> square = np.zeros((50, 50), dtype=bool)
    >>> square[10:30, 10:30] = True
    >>> boundary_iou(square, square), round(boundary_iou(square, np.roll(square, 1, axis=1)), 2)
    (1.0, 0.33)
    """
    import cv2

    height, width = mask.shape
    rim_px = max(1, round(_RIM * float(np.hypot(height, width))))
    rims = []
    for one in (mask, other):
        pixels = cv2.copyMakeBorder(one.astype(np.uint8), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=[0])
        inner = cv2.erode(pixels, np.ones((3, 3), np.uint8), iterations=rim_px)[1:-1, 1:-1]
        rims.append(one & (inner == 0))
    union = int((rims[0] | rims[1]).sum())
    return int((rims[0] & rims[1]).sum()) / union if union else 1.0


def bootstrap_interval(values: Float[np.ndarray, "n"], draws: Sequence[int]) -> tuple[float, float]:
    """Returns the 95 % interval of a mean, by the percentile bootstrap over draws; without extent for a single one.

    Values of the same draw stay together, since they come from the same examples (Efron and Tibshirani 1993, ch. 13).
    """
    _, draw_of = np.unique(draws, return_inverse=True)
    sums, counts = np.bincount(draw_of, values), np.bincount(draw_of)
    chosen = np.random.default_rng(0).integers(len(sums), size=(_RESAMPLES, len(sums)))
    means = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return low, high


def _iou(both: int, selected: int, size: int) -> float:
    return float(both / max(1, selected + size - both))


def _count_reached(values: Float[np.ndarray, "n"]) -> np.ndarray:
    """How many values reach each of :data:`THRESHOLDS`."""
    ordered = np.sort(values)
    return len(ordered) - np.searchsorted(ordered, THRESHOLDS, side="left")

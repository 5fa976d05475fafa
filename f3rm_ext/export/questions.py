"""Questions of a page of splats: the scores of the Gaussians as the page stores them, and the places of matches."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, UInt8
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.html.page import rounded
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import Queryable, Scorer, get_head, score_chunks
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.files.spz import TO_RUB
from f3rm_ext.splat.gaussians import Gaussians

SCORE_LEVELS = 85
"""Steps of a stored score. 255 is a multiple, so a step is a whole number of the bytes that the shader reads."""
_MAX_LOGIT = 8.0
"""Relevancies nearer to 0 and 1 than its sigmoid are stored as that."""
MAX_PLACES = 5
_MIN_SHARE = 0.04
"""Smallest share of a question's matches that makes a place."""
_LINKS = 8
"""Neighbours that a Gaussian may be joined with to one place."""
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Place:
    """Where a question's matches lie together. Axes of .spz files."""

    at: tuple[float, float, float]
    """Weighted mean of the matches, scene units."""
    size: float
    """Distance from there within which nine tenths of the matches lie, scene units."""
    camera: int
    """Index of the camera that shows it best."""
    label: str
    """Text beside its button, such as its width."""


@dataclass(frozen=True)
class Question:
    """A question and the score of every Gaussian.

    A page blends what it stores over the Gaussians of a pixel, weighted by :attr:`PageContent.lengths`. Relevancies are
    stored as logits, which are differences of cosines: times the length of the feature they are linear in it, so that
    their blend has the sign of the blended feature's logit, and nearly its value. A blend of relevancies has not:
    outlines move.
    """

    name: str
    scores: Float32[np.ndarray, " gaussians"]
    threshold: float
    """Scores from here upwards match."""
    is_relevancy: bool = False
    """Whether scores are relevancies, 0 to 1, rather than cosines."""

    @cached_property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest value that is stored."""
        scored = self.scores[self.scores > (0.0 if self.is_relevancy else -1.0)]  # the others have no features
        values = self._values(scored if len(scored) else self.scores)
        threshold = float(self._values(np.float64(self.threshold)))
        return min(float(values.min()), threshold - 1e-3), max(float(values.max()), threshold + 1e-3)

    def matches(self) -> Bool[np.ndarray, " gaussians"]:
        """Returns which Gaussians match."""
        return self.scores >= self.threshold

    def to_bytes(self) -> UInt8[np.ndarray, " gaussians"]:
        """Returns the scores in steps; rounding moves none across the threshold."""
        low, high = self.range
        levels = np.rint((self._values(self.scores) - low) / (high - low) * SCORE_LEVELS)
        first = np.ceil((self._values(np.float64(self.threshold)) - low) / (high - low) * SCORE_LEVELS)
        levels = np.where(self.matches(), np.maximum(levels, first), np.minimum(levels, first - 1))
        return (np.clip(levels, 0, SCORE_LEVELS) * (255 // SCORE_LEVELS)).astype(np.uint8)

    def _values(self, scores: Any) -> Any:
        if not self.is_relevancy:
            return scores
        shares = np.clip(np.asarray(scores, np.float64), 1e-9, 1 - 1e-9)  # in float32 the upper end would be 1
        return np.clip(np.log(shares / (1 - shares)), -_MAX_LOGIT, _MAX_LOGIT)


@torch.inference_mode()
def score_gaussians(model: Queryable, query: Query) -> Float32[np.ndarray, " gaussians"]:
    """Returns the scores of the Gaussians' own features, chunk by chunk.

    Raises:
        ConfigError: see :meth:`~f3rm_ext.query.queryable.Scorer.from_model`.
    """
    scorer, head = Scorer.from_model(model, [query]), get_head(model.query_heads(), query.head)
    assert isinstance(head, LiftedHead)
    chunks = (lambda _, part=part: part.float() for part in head.codes.split(_CHUNK))
    return score_chunks(scorer, chunks)[:, 0].float().numpy()


def find_places(
    gaussians: Gaussians, matches: Bool[np.ndarray, " gaussians"], cameras: PinholeCameras, scale: float
) -> list[Place]:
    """Finds where Gaussians that match lie together, the place with the largest area first.

    Neighbours are joined that are no farther apart than three times the usual distance between matches.

    Args:
        gaussians: on the CPU, scene frame.
        cameras: of the capture, scene frame.
        scale: scene units per unit of the capture, in which sizes are told.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import KDTree

    chosen = gaussians[torch.from_numpy(matches)]
    if not len(chosen):
        return []
    means = chosen.means.numpy().astype(np.float64)
    # How much each shows: its opacity times the section through its two larger axes.
    weights = (chosen.alphas() * chosen.sizes().sort(dim=1).values[:, 1:].prod(dim=1)).numpy().astype(np.float64)
    neighbours = min(_LINKS + 1, len(means))
    apart, near = KDTree(means).query(means, k=neighbours)
    apart, near = apart.reshape(len(means), -1), near.reshape(len(means), -1)
    linked = apart <= 3 * np.median(apart[:, -1])
    rows = np.repeat(np.arange(len(means)), neighbours).reshape(near.shape)
    graph = coo_matrix((np.ones(int(linked.sum())), (rows[linked], near[linked])), shape=(len(means),) * 2)
    _, component = connected_components(graph, directed=False)
    totals = np.bincount(component, weights)
    places = []
    for number in np.argsort(-totals)[:MAX_PLACES]:
        share = totals[number] / totals.sum()
        if share < _MIN_SHARE:
            break
        inside = component == number
        middle = np.average(means[inside], axis=0, weights=weights[inside] + 1e-30)
        radius = float(np.quantile(np.linalg.norm(means[inside] - middle, axis=1), 0.9)) or 1e-3
        x, y, z = (middle * TO_RUB).tolist()
        label = f"{rounded(2 * radius / scale)} wide, {share:.0%} of the matches"
        places.append(Place((x, y, z), radius, best_camera(torch.from_numpy(middle), cameras), label))
    return places


def best_camera(point: Float[Tensor, "3"], cameras: PinholeCameras) -> int:
    """Returns the camera, by its index, that shows a point of the scene frame near its middle and from near by."""
    in_camera = torch.einsum("nij,j->ni", cameras.viewmats[:, :3, :3], point.float()) + cameras.viewmats[:, :3, 3]
    depth = in_camera[:, 2]
    pixels = torch.einsum("nij,nj->ni", cameras.Ks, in_camera)[:, :2] / depth.clamp_min(1e-6)[:, None]
    sides = torch.stack([cameras.widths, cameras.heights], dim=1)
    off = ((pixels / sides - 0.5).abs().amax(dim=1) * 2).clamp_max(1e3)
    cost = depth / depth.clamp_min(1e-6).median() + torch.where(off < 0.9, 0.5 * off, 100.0 * off)
    return int(torch.where(depth > 0, cost, torch.inf).argmin())

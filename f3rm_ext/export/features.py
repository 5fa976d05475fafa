"""Writes a point cloud with features, colours, normals and scores: a PLY file to view, an NPZ file to compute with."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.export.cloud import Cloud
from f3rm_ext.features.space import FeatureSpace
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.queryable import Queryable, QueryHead
from f3rm_ext.query.relevancy import label_map
from f3rm_ext.utils.output_file import NpzWriter, replace_file
from f3rm_ext.utils.pictures import to_bytes
from f3rm_ext.utils.ply import property_names, write_ply
from f3rm_ext.utils.provenance import PROVENANCE, comment_lines

_CHUNK = 1 << 13
Space = Literal["distilled", "full", "none"]
"""Features of the NPZ file: as distilled (PCA codes, if there are any), in the extractor's full space, or none."""


@dataclass(frozen=True)
class FeatureCloud:
    """A point cloud with features, ready to be written."""

    cloud: Cloud
    """The points, scene frame."""
    normals: Float[np.ndarray, "points 3"]
    """Unit normals, scene frame."""
    frame: CaptureFrame | None
    """The capture's frame, to write positions and normals in; None for the scene frame."""
    queries: Sequence[Query]
    threshold: float
    """Lowest score that gives a point a query's label."""

    def positions(self) -> Float[np.ndarray, "points 3"]:
        """Returns the positions in the frame to write, float32."""
        at = self.cloud.positions.astype(np.float64)
        return (at if self.frame is None else self.frame.to_capture(at)).astype(np.float32)

    def directions(self) -> Float[np.ndarray, "points 3"]:
        """Returns the normals in the frame to write, float32."""
        at = self.normals.astype(np.float64)
        return (at if self.frame is None else self.frame.directions_to_capture(at)).astype(np.float32)

    def labels(self) -> Int[np.ndarray, "points"]:
        """Returns the index of the query with the highest score, -1 below the threshold."""
        return label_map(torch.from_numpy(self.cloud.scores), self.threshold).numpy().astype(np.int32)

    def columns(self, pca: UInt8[np.ndarray, "points 3"]) -> dict[str, np.ndarray]:
        """Returns the columns of the PLY file; ``pca`` are the features as colours."""
        columns: dict[str, np.ndarray] = {}
        columns |= dict(zip(("x", "y", "z"), self.positions().T, strict=True))
        columns |= dict(zip(("nx", "ny", "nz"), self.directions().T, strict=True))
        columns |= dict(zip(("red", "green", "blue"), self.cloud.colors.T, strict=True))
        columns |= dict(zip(("pca_red", "pca_green", "pca_blue"), pca.T, strict=True))
        columns["accumulation"] = self.cloud.accumulation
        if self.has_density:
            columns["density"] = self.cloud.density
        kinds = [(query.name, "relevancy" if query.is_relevancy else "cosine") for query in self.queries]
        columns |= dict(zip(property_names(kinds), self.cloud.scores.T, strict=True))
        if len(self.queries) > 1:
            columns["label"] = self.labels()
        return columns

    @property
    def has_density(self) -> bool:
        """Whether the points have a density."""
        return bool(np.isfinite(self.cloud.density).all())


def features_at(
    model: Queryable, head: QueryHead, points: Float[np.ndarray, "points 3"]
) -> Iterator[Float[Tensor, "_ feat"]]:
    """Yields distilled features at points of the scene frame, chunk by chunk, on the CPU, float32."""
    space: FeatureSpace = head.space().to(model.device)
    for start in range(0, len(points), _CHUNK):
        part = torch.from_numpy(points[start : start + _CHUNK]).to(model.device)
        with torch.inference_mode():
            values = space.features(model.render_points(part)[head.name]).cpu()
        yield values


def write_features(
    out: Path,
    model: Queryable,
    head: QueryHead,
    feature_cloud: FeatureCloud,
    provenance: Mapping[str, object],
    space: Space = "distilled",
    on_progress: Callable[[int], None] = lambda points: None,
) -> Path:
    """Writes ``out`` (.ply) and an NPZ file of the same name beside it, computing features as it writes them.

    Returns the NPZ file.

    Raises:
        ConfigError: a file cannot be written.
    """
    cloud = feature_cloud.cloud
    pca = np.zeros((len(cloud), 3), dtype=np.uint8)
    basis = None if head.basis is None else head.basis.float().cpu()

    def chunks() -> Iterator[np.ndarray]:
        done = 0
        for features in features_at(model, head, cloud.positions):
            shown = head.colors(features.to(model.device)).detach().float().cpu().numpy()
            pca[done : done + len(features)] = to_bytes(shown[None])[0]
            done += len(features)
            on_progress(done)
            full = features if space != "full" or basis is None else features @ basis
            yield full.numpy().astype(np.float16)

    npz = out.with_suffix(".npz")
    with replace_file(npz) as stream, NpzWriter(stream) as archive:
        archive.array(PROVENANCE, np.asarray(json.dumps(dict(provenance))))
        if space == "none":
            for _ in chunks():
                pass
        else:
            dim = head.dim if space == "distilled" or basis is None else basis.shape[1]
            archive.rows("features", (len(cloud), dim), np.dtype(np.float16), chunks())
        if space == "distilled" and basis is not None:
            archive.array("code_basis", basis.numpy())
        archive.array("positions", feature_cloud.positions())
        archive.array("normals", feature_cloud.directions())
        archive.array("colors", cloud.colors)
        archive.array("pca_colors", pca)
        archive.array("accumulation", cloud.accumulation)
        if feature_cloud.has_density:
            archive.array("density", cloud.density)
        if feature_cloud.queries:
            archive.array("scores", cloud.scores)
            archive.array("names", np.asarray([query.name for query in feature_cloud.queries]))
            archive.array("labels", feature_cloud.labels())
    with replace_file(out) as stream:
        write_ply(stream, feature_cloud.columns(pca), comment_lines(provenance))
    return npz

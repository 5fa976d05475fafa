"""Scores of queries on Gaussians, as they travel in files of splats: in the file itself, or in one beside it.

PLY has columns, glTF attributes and OpenUSD primvars. The other formats have no place for them, so there the scores are
in ``NAME.queries.npz``, which knows by a digest which file it belongs to.
"""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int, Int32
from torch import Tensor

from f3rm_ext.query.relevancy import label_map
from f3rm_ext.utils.atomic_files import hash_file
from f3rm_ext.utils.json_shape import parse_json
from f3rm_ext.utils.output_file import NpzWriter, replace_file
from f3rm_ext.utils.ply import property_names
from f3rm_ext.utils.provenance import MADE_BY, PROVENANCE

LABEL, PREFIX = "label", "score"
SIDECAR = ".queries.npz"
_DIGEST = "sha256"


@dataclass(frozen=True, eq=False)
class GaussianScores:
    """Scores of one or more queries."""

    names: tuple[str, ...]
    """Names of the queries."""
    scores: Float32[np.ndarray, "gaussians queries"]
    labels: Int32[np.ndarray, " gaussians"]
    """Index of the query with the highest score, -1 below the threshold."""

    @classmethod
    def of_queries(cls, scores: Mapping[str, Float32[np.ndarray, " gaussians"]], threshold: float) -> "GaussianScores":
        """Collects the scores of queries by name; from the threshold upwards, a Gaussian gets a label."""
        joined = np.stack(list(scores.values()), axis=1)
        return cls(tuple(scores), joined, label_map(torch.from_numpy(joined), threshold).numpy().astype(np.int32))

    def add(self, name: str, values: Float32[np.ndarray, " gaussians"]) -> "GaussianScores":
        """Returns the scores with those of another name, which no label is of."""
        return GaussianScores((*self.names, name), np.column_stack([self.scores, values]), self.labels)

    def take(self, rows: Int[Tensor, " kept"] | Bool[Tensor, " gaussians"]) -> "GaussianScores":
        """Returns the scores of some Gaussians."""
        chosen = rows.cpu().numpy()
        return GaussianScores(self.names, self.scores[chosen], self.labels[chosen])

    @property
    def columns(self) -> dict[str, Float32[np.ndarray, " gaussians"]]:
        """Scores by a name that all formats accept, ``score_blue_mug`` for "blue mug"."""
        names = property_names([(name, PREFIX) for name in self.names])
        return dict(zip(names, self.scores.T, strict=True))

    def comments(self) -> list[str]:
        """Returns comments that say which query a column is of."""
        return [f"{column}: {name}" for column, name in zip(self.columns, self.names, strict=True)]


def sidecar_path(path: Path) -> Path:
    """Returns the name of the file with the scores of a file of splats."""
    return path.with_name(path.name + SIDECAR)


def write_sidecar(path: Path, scores: GaussianScores, maker: str | None) -> Path:
    """Writes the scores beside a file of splats, which is complete. Returns the name.

    Raises:
        ConfigError: it cannot be written.
    """
    beside = sidecar_path(path)
    record = {MADE_BY: maker, "splats": path.name, _DIGEST: hash_file(path, "sha256"), "queries": scores.names}
    with replace_file(beside) as stream, NpzWriter(stream) as archive:
        archive.array(PROVENANCE, np.array(json.dumps(record)))
        archive.array("scores", scores.scores)
        archive.array("labels", scores.labels)
    return beside


def read_sidecar(path: Path, count: int) -> tuple[GaussianScores | None, list[str]]:
    """Returns the scores beside a file of splats, if there are any, and sentences for the user."""
    beside = sidecar_path(path)
    if not beside.is_file():
        return None, []
    try:
        with zipfile.ZipFile(beside) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("it is compressed")  # stored, no entry is larger than the file
        with beside.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            record = parse_json(str(archive[PROVENANCE]), dict[str, object])
            names = tuple(parse_json(json.dumps(record["queries"]), list[str]))
            scores, labels = archive["scores"], archive["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        return None, [f"{beside.name} is damaged ({error}), so its scores are left out."]
    if record.get(_DIGEST) != hash_file(path, "sha256"):
        return None, [f"{beside.name} belongs to another {path.name}, so its scores are left out."]
    right = scores.shape == (count, len(names)) and labels.shape == (count,)
    if not (right and names and scores.dtype == np.float32 and labels.dtype == np.int32):
        return None, [f"{beside.name} does not hold scores of {count} Gaussians, so they are left out."]
    return GaussianScores(names, scores, labels), []

"""Predictions of any program for labelled photos, judged by the protocols of ``f3rm-ext eval query``.

A folder of predictions holds one file per photo and class, ``PHOTO/CLASS.npy`` or ``PHOTO/CLASS.png``, or the scores
that ``f3rm-ext query`` writes, ``scores/PHOTO.npz``. Scores of points or Gaussians are in ``points.ply`` or
``points.npz``, in the frame of the capture. Names of photos are without suffix, as they are or as ``f3rm-ext query``
writes them; in names of classes only letters and digits count.
"""

import filecmp
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from PIL import Image
from torch import Tensor

from f3rm_ext.capture.ground_truth import CaptureGroundTruth, LabelSource
from f3rm_ext.errors import CaptureError, ConfigError, UserError, reason_of
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX, LabelledPoints, count_classes
from f3rm_ext.query.metrics import QueryMetrics
from f3rm_ext.utils.output_folder import file_names
from f3rm_ext.utils.pictures import UNREADABLE, pick_evenly

LOWEST = -1.0
"""Score of a surface point without a predicted point nearby: below every threshold."""
REACH = 3.0
"""Distance from a surface point to the nearest predicted point up to which its score counts, as a multiple of the
median distance between neighbouring predicted points; farther points have no prediction."""
_SAMPLES = 20_000
"""Most predicted points whose distances are measured."""
_DAMAGED = (*UNREADABLE, KeyError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True)
class PredictionFolder:
    """The predictions of one program for one capture."""

    folder: Path

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise ConfigError(f"There is no folder of predictions {self.folder}: give the folder with --predictions.")

    def views(self) -> list[str]:
        """Returns the names of the photos that have predictions, sorted."""
        folders = {path.parent.name for suffix in ("npy", "png") for path in self.folder.glob(f"*/*.{suffix}")}
        return sorted(folders | {path.stem for path in (self.folder / "scores").glob("*.npz")})

    def scores(
        self, view: str, classes: Sequence[str], height_px: int, width_px: int
    ) -> dict[str, Float32[Tensor, "h w"]]:
        """Returns the scores of the classes that are predicted in a photo, resampled to a size.

        Masks are resampled by nearest pixel, scores bilinearly. Pixels of a PNG are divided by the largest value of
        their type.

        Raises:
            ConfigError: a file cannot be understood, or its scores are not between −1 and 1.
        """
        return {
            name: _resize(values, height_px, width_px)
            for name, values in _match(self._read_view(view), classes, self.folder / view)
        }

    def points(self, classes: Sequence[str]) -> "tuple[Float32[np.ndarray, 'points 3'], dict[str, np.ndarray]] | None":
        """Returns positions, capture frame, and the scores of each predicted class; None where there are none.

        Raises:
            ConfigError: the file cannot be understood, or its scores are not between −1 and 1.
        """
        for path, read in ((self.folder / "points.ply", _read_ply), (self.folder / "points.npz", _read_npz)):
            if path.is_file():
                try:
                    places, columns = read(path)
                except UserError:
                    raise
                except _DAMAGED as error:
                    raise _damage_error(path, reason_of(error)) from error
                if not (len(places) > 1 and np.isfinite(places).all()):
                    raise _damage_error(path, "it has fewer than two points, or positions that are not finite")
                return places, {
                    name: np.asarray(values, dtype=np.float32) for name, values in _match(columns, classes, path)
                }
        return None

    def _read_view(self, view: str) -> dict[str, np.ndarray]:
        path = self.folder / "scores" / f"{view}.npz"
        try:
            if path.is_file():
                with np.load(path, allow_pickle=False) as archive:
                    scores, names = archive["scores"], archive["names"].tolist()
                return dict(zip(map(str, names), np.moveaxis(scores, -1, 0), strict=True))
            values = {}
            for path in sorted((self.folder / view).glob("*")):
                if path.suffix == ".npy":
                    values[path.stem] = np.load(path, allow_pickle=False)
                elif path.suffix == ".png":
                    values[path.stem] = _read_picture(path)
        except _DAMAGED as error:
            raise _damage_error(path, reason_of(error)) from error
        return values


@dataclass
class Judgement:
    """The figures of predictions, with what they rest on."""

    rendered: QueryMetrics
    judged: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    """Photos left out because they, or copies of them, were trained on."""
    missing: list[str] = field(default_factory=list)
    """Labelled photos without any prediction; each of their classes counts as a miss."""
    unlabelled: list[str] = field(default_factory=list)
    """Photos with predictions but without labels."""

    def notices(self) -> list[str]:
        """Returns sentences on what does not count."""
        lines = []
        if self.training:
            lines.append(f"{_listed(self.training)} trained on, and left out.")
        if self.missing:
            lines.append(f"{_listed(self.missing)} labelled but not predicted, and every class there counts as a miss.")
        return lines

    def protocol(self) -> dict[str, object]:
        """Returns what the figures rest on, as JSON."""
        return {
            "views": self.judged,
            "views_without_prediction": self.missing,
            "views_trained_on": self.training,
            "views_without_labels": self.unlabelled,
            "least_visible_px": MIN_VISIBLE_PX,
            "reach_in_point_distances": REACH,
        }


def judge_views(
    predictions: PredictionFolder,
    truth: LabelSource,
    photos: Sequence[Path],
    trained: "TrainingPhotos",
    classes: Sequence[str],
    threshold: float,
) -> Judgement:
    """Compares predictions with the labels of held-out photos, at the size of the labels.

    A class that is visible but not predicted counts as a miss, so that what is left out gains nothing.

    Args:
        photos: held-out photos; those without labels do not count.
        trained: photos that were trained on, which are left out.

    Raises:
        CaptureError: no photo is left to judge, or several with predictions have one name.
        ConfigError: a prediction cannot be understood.
    """
    result = Judgement(QueryMetrics(threshold))
    views = predictions.views()
    result.training = [name for name in views if name in trained.names]
    labelled = set()
    for photo in photos:
        size = truth.size_px(photo)
        view = None if size is None else truth.view(photo, *size)
        if view is None or size is None:
            continue
        # `f3rm-ext query` leaves out what does not belong in the name of a file, such as spaces.
        name = next((name for name in (photo.stem, *file_names([photo.stem])) if name in views), photo.stem)
        if name in labelled and name in views:
            raise CaptureError(
                f"Several held-out photos are called {photo.stem}, so predictions by name do not tell them apart: give "
                "the files names of their own, in the capture and in the predictions."
            )
        labelled.add(name)
        if photo in trained:
            result.training.append(photo.stem)
            continue
        if name not in views:
            result.missing.append(photo.stem)
        result.judged.append(photo.stem)
        scores = predictions.scores(name, classes, *size) if name in views else {}
        count_classes(result.rendered, classes, scores.get, view.masks, view.boxes)
    result.training = sorted(set(result.training))
    result.unlabelled = sorted(set(views) - labelled - set(result.training))
    if len(result.missing) == len(result.judged):
        left_out = f" ({len(result.training)} of its photos were trained on)" if result.training else ""
        raise CaptureError(
            f"{predictions.folder} holds no predictions for a held-out photo with labels{left_out}: name its folders "
            "or files after the photos."
        )
    return result


def judge_points(
    predictions: PredictionFolder,
    surface: LabelledPoints,
    truth: CaptureGroundTruth,
    classes: Sequence[str],
    threshold: float,
) -> QueryMetrics | None:
    """Compares the scores of points or Gaussians with the labels of the true surface; each class is one pair.

    A surface point has the score of the nearest predicted point, within :data:`REACH`.

    Args:
        surface: labelled points, capture frame.

    Returns:
        The figures; None where there are no predicted points.
    """
    from scipy.spatial import KDTree

    points = predictions.points(classes)
    if points is None:
        return None
    places, scores = points
    # Triangles that share no vertices have several points in one place, between which there is no distance.
    distinct = np.sort(np.unique(places, axis=0, return_index=True)[1])
    places = places[distinct]
    tree = KDTree(places)
    apart, _ = map(np.asarray, tree.query(places[pick_evenly(len(places), _SAMPLES)], k=2))
    reach = REACH * float(np.median(apart[:, 1]))
    distances, nearest = map(np.asarray, tree.query(surface.points, distance_upper_bound=reach))
    near, metrics = np.isfinite(distances), QueryMetrics(threshold)

    def score(name: str) -> Tensor | None:
        if name not in scores:
            return None
        values = np.full(len(surface.points), LOWEST, dtype=np.float32)
        values[near] = scores[name][distinct][nearest[near]]
        return torch.from_numpy(values)

    count_classes(metrics, classes, score, surface.masks(truth))
    return metrics


class TrainingPhotos:
    """The photos that a model was trained on: known by name, which will do alone, and copies of them by content."""

    def __init__(self, photos: Iterable[Path]) -> None:
        paths = list(photos)
        self.names = {path.stem for path in paths}
        self._sizes: dict[int, list[Path]] = {}
        for path in paths:
            if path.is_file():
                self._sizes.setdefault(path.stat().st_size, []).append(path)

    @classmethod
    def read(cls, path: Path) -> "TrainingPhotos":
        """Reads names of photos, one per line. Raises ConfigError if the file cannot be read."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({reason_of(error)}): give a text file with a name per line."
            ) from error
        return cls(path.parent / line.strip() for line in lines if line.strip())

    def __contains__(self, photo: Path) -> bool:
        """Whether a photo, or a file with the same content, was trained on."""
        if photo.stem in self.names:
            return True
        twins = self._sizes.get(photo.stat().st_size, []) if photo.is_file() else []
        return any(filecmp.cmp(photo, twin, shallow=False) for twin in twins)


def _match(values: Mapping[str, np.ndarray], classes: Sequence[str], place: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the predictions of known classes, checked, under the names that the labels have."""
    names = {_key(name): name for name in classes}
    for name, array in values.items():
        if _key(name) not in names:
            continue
        if array.dtype.kind not in "bfiu":
            raise _damage_error(place, f"the values of {name!r} are no numbers")
        largest = float(np.nanmax(np.abs(array.astype(np.float32)), initial=0.0))
        if not largest <= 1.0:
            raise ConfigError(
                f"The scores of {name!r} in {place} reach {largest:g}, but must be between -1 and 1: divide them by "
                "their largest value, or write masks."
            )
        yield names[_key(name)], array


def _listed(names: Sequence[str]) -> str:
    first = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} photo{'s' * (len(names) > 1)} ({first}) {'are' if len(names) > 1 else 'is'}"


def _key(name: str) -> str:
    """The letters and digits of a name.

    >>> _key("Blue Mug") == _key("blue-mug") == _key("score_blue_mug")
    True
    """
    return "".join(filter(str.isalnum, name.casefold().removeprefix("score_")))


def _resize(values: np.ndarray, height_px: int, width_px: int) -> Float[Tensor, "h w"]:
    if values.ndim != 2:
        raise ConfigError(f"A prediction has {values.ndim} axes, but a view has two: write one picture per class.")
    picture, size = torch.from_numpy(values.astype(np.float32))[None, None], (height_px, width_px)
    if picture.shape[2:] == size:
        return picture[0, 0]
    if values.dtype.kind == "b" or np.isin(values, (0, 1)).all():  # a mask
        return torch.nn.functional.interpolate(picture, size, mode="nearest-exact")[0, 0]
    return torch.nn.functional.interpolate(picture, size, mode="bilinear", align_corners=False, antialias=True)[0, 0]


def _read_picture(path: Path) -> Float32[np.ndarray, "h w"]:
    with Image.open(path) as picture:
        values = np.asarray(picture)
    if values.ndim != 2:
        raise ValueError(f"it has {values.shape[2]} channels, but scores have one")
    if values.dtype == bool:
        return values.astype(np.float32)
    return values.astype(np.float32) / (255.0 if values.dtype == np.uint8 else 65535.0)


def _read_ply(path: Path) -> tuple[Float32[np.ndarray, "points 3"], dict[str, np.ndarray]]:
    from f3rm_ext.utils.ply import PlyTables

    ply = PlyTables.open(path)
    table = ply.tables.get("vertex")
    scored = [] if table is None else [name for name in table.kinds if name.startswith("score_")]
    if table is None or not scored or not {"x", "y", "z"} <= table.kinds.keys():
        raise _damage_error(path, "it has no vertices with x, y, z and columns score_CLASS")
    rows = np.concatenate([part for _, part in ply.rows("vertex", ["x", "y", "z", *scored])])
    places = np.stack([rows[axis] for axis in "xyz"], axis=1).astype(np.float32)
    return places, {name: np.asarray(rows[name], dtype=np.float32) for name in scored}


def _read_npz(path: Path) -> tuple[Float32[np.ndarray, "points 3"], dict[str, np.ndarray]]:
    with np.load(path, allow_pickle=False) as archive:
        places, scores, names = archive["positions"], archive["scores"], archive["names"].tolist()
    if places.ndim != 2 or places.shape[1] != 3 or scores.shape != (len(places), len(names)):
        raise _damage_error(path, "it needs positions (points, 3), scores (points, classes) and names (classes)")
    return places.astype(np.float32), dict(zip(map(str, names), scores.T, strict=True))


def _damage_error(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"The prediction {path} cannot be used ({reason}): write it again.")

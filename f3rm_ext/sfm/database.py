"""Features and matches by COLMAP, in a database that a later run continues."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from f3rm_ext import compat
from f3rm_ext.capture.colmap_model import colmap
from f3rm_ext.errors import CaptureError, reason_of
from f3rm_ext.utils import threads

T = TypeVar("T")
Count = Callable[[int, int], None]
"""Called with the units done and the units to do."""
Pair = tuple[str, str]
_PAIRS_AT_ONCE = 64
_LEAST_FREE_MIB = 256
"""Disk space without which COLMAP is not called; a batch of features or matches takes some MiB for each core."""
_LEAST_CAMERA_PHOTOS = 20
"""Photos of one camera from which the eight parameters of the model opencv are estimated rather than four."""


@contextlib.contextmanager
def redirect_stderr(path: Path) -> Iterator[None]:
    """Appends COLMAP's messages on stderr, which its settings cannot turn off, to a file."""
    sys.stderr.flush()
    before = os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.dup2(log, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        os.close(log)


@contextlib.contextmanager
def translate_errors(what: str, writes_to: Path | None = None) -> Iterator[None]:
    """Turns errors of COLMAP into one sentence.

    Args:
        writes_to: output folder, whose free space is checked, since COLMAP aborts the whole process on a full disk.
    """
    if writes_to is not None:
        free_mib = shutil.disk_usage(writes_to).free >> 20
        if free_mib < _LEAST_FREE_MIB:
            raise CaptureError(
                f"Only {free_mib} MiB are free on the disk of {writes_to}, but {what} needs {_LEAST_FREE_MIB} MiB: "
                "free some space, then repeat the command to continue."
            )
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise CaptureError(
            f"COLMAP failed while {what} ({reason_of(error)}): check that the disk is not full, then repeat the "
            "command to continue."
        ) from error


class FeatureDatabase:
    """COLMAP's database of a capture.

    Args:
        path: the file, which is created when photos are added.
        masks: folder with a mask ``NAME.png`` for a photo NAME; photos without one are used whole.
        feature_size: longest side at which features are detected, px.
    """

    def __init__(self, path: Path, images: Path, masks: Path, feature_size: int, max_features: int) -> None:
        self.path, self.images, self.masks = path, images, masks
        self.feature_size, self.max_features = feature_size, max_features

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Opens the database for a ``with`` block."""
        try:
            database = colmap().Database.open(self.path)
        except (RuntimeError, ValueError, OSError) as error:
            raise CaptureError(
                f"COLMAP cannot open {self.path}, which may be damaged: add --start-over to rebuild it; the capture "
                "stays until the new one is complete."
            ) from error
        with contextlib.closing(database):
            yield database

    def copy(self, path: Path, focal_factor: float) -> "FeatureDatabase":
        """Returns a copy of the database with other focal lengths, in a file that is replaced."""
        with translate_errors("copying its database", path.parent):
            shutil.copyfile(self.path, path)
            copy = FeatureDatabase(path, self.images, self.masks, self.feature_size, self.max_features)
            with copy.open() as database:
                for camera in database.read_all_cameras():
                    _update_focal_length(database, camera, focal_factor * camera.mean_focal_length())
        return copy

    def ids(self) -> dict[str, int]:
        """Returns the id of each photo by name."""
        with self.open() as database:
            return {image.name: image.image_id for image in database.read_all_images()}

    def add_photos(
        self,
        cameras: Mapping[str, str],
        model: str,
        focal_px: Mapping[str, float],
        predicted_px: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Adds the photos that the database does not have. A killed call leaves the database as it was.

        Args:
            cameras: for each photo a text that is the same for photos that share a camera.
            model: camera model, or ``auto``.
            focal_px: focal lengths that are known, px; otherwise EXIF tells.
            predicted_px: focal lengths of cameras without a known one, px; otherwise 1.2 times the longest side is a
                start.
        """
        pycolmap = colmap()
        known: dict[str, int] = {}
        if self.path.exists():
            with self.open() as database:
                known = {image.name: image.camera_id for image in database.read_all_images()}
        groups: dict[str, list[str]] = defaultdict(list)
        for name, camera in cameras.items():
            groups[camera].append(name)
        if all(name in known for name in cameras):
            return
        fresh = self.path.with_name(f".{self.path.name}.tmp")
        fresh.unlink(missing_ok=True)
        with translate_errors("adding photos to its database", self.path.parent):
            if known:
                shutil.copyfile(self.path, fresh)
            pycolmap.Database.open(fresh).close()
            for names in groups.values():
                new = [name for name in names if name not in known]
                if not new:  # of no names COLMAP would take all files of the folder
                    continue
                options = pycolmap.ImageReaderOptions(camera_model=_model_name(model, len(names)))
                shared = [known[name] for name in names if name in known]
                if shared:
                    options.existing_camera_id = min(shared)
                pycolmap.import_images(fresh, self.images, pycolmap.CameraMode.SINGLE, new, options)
            _set_focal_lengths(fresh, focal_px)
            _set_focal_lengths(fresh, predicted_px, replace=False)
            os.replace(fresh, self.path)

    def find_features(self, names: Sequence[str], count: Count) -> None:
        """Finds features in the photos that have none yet."""
        pycolmap = colmap()
        ids = self.ids()
        with self.open() as database:
            todo = [
                name
                for name in names
                if not (database.exists_keypoints(ids[name]) and database.exists_descriptors(ids[name]))
            ]
        cores = threads.usable_cores()
        options = pycolmap.FeatureExtractionOptions(
            num_threads=cores, max_image_size=self.feature_size, use_gpu=_has_gpu()
        )
        options.sift.max_num_features = self.max_features
        reader = pycolmap.ImageReaderOptions()
        if self.masks.is_dir():
            reader.mask_path = self.masks
        for batch in _batches(todo, cores, len(names), count):
            with translate_errors("finding features", self.path.parent):
                pycolmap.extract_features(
                    self.path, self.images, batch, reader_options=reader, extraction_options=options
                )

    def match(self, pairs: Sequence[Pair], count: Count) -> None:
        """Compares the pairs of photos that were not compared yet, and keeps matches that fit two cameras' geometry."""
        pycolmap = colmap()
        ids = self.ids()
        with self.open() as database:
            todo = [(a, b) for a, b in pairs if not database.exists_two_view_geometry(ids[a], ids[b])]
        options = pycolmap.FeatureMatchingOptions(num_threads=threads.usable_cores(), use_gpu=_has_gpu())
        for batch in _batches(todo, _PAIRS_AT_ONCE, len(pairs), count):
            with tempfile.TemporaryDirectory() as folder, translate_errors("matching photos", self.path.parent):
                pair_file = Path(folder, "pairs.txt")
                pair_file.write_text("".join(f"{a} {b}\n" for a, b in batch), encoding="utf-8")
                pairing = pycolmap.ImportedPairingOptions(match_list_path=pair_file)
                pycolmap.match_image_pairs(self.path, options, pairing)

    def num_features(self) -> dict[str, int]:
        """Returns the number of features of each photo."""
        with self.open() as database:
            return {
                image.name: database.num_keypoints_for_image(image.image_id) for image in database.read_all_images()
            }

    def num_matches(self) -> dict[Pair, int]:
        """Returns the number of verified matches of each pair of photos that has any."""
        pycolmap = colmap()
        with self.open() as database:
            names = {image.image_id: image.name for image in database.read_all_images()}
            numbers, counts = database.read_two_view_geometry_num_inliers()
        pairs = (pycolmap.pair_id_to_image_pair(number) for number in numbers)
        return {(names[a], names[b]): number for (a, b), number in zip(pairs, counts, strict=True) if number}


def _batches(todo: list[T], size: int, total: int, count: Count) -> Iterator[list[T]]:
    """Yields the units to do in batches, and counts those that are done among all."""
    done = total - len(todo)
    for start in range(0, len(todo), size):
        count(done + start, total)
        yield todo[start : start + size]
    count(total, total)


def _has_gpu() -> bool:
    return bool(colmap().has_cuda) and compat.has_cuda()


def _model_name(model: str, num_photos: int) -> str:
    if model == "auto":
        model = "opencv" if num_photos >= _LEAST_CAMERA_PHOTOS else "simple-radial"
    return model.upper().replace("-", "_")


def _set_focal_lengths(path: Path, focal_px: Mapping[str, float], replace: bool = True) -> None:
    """Gives each camera the median of these focal lengths of its photos.

    Args:
        replace: also where the camera has one, as from EXIF.
    """
    if not focal_px:
        return
    with contextlib.closing(colmap().Database.open(path)) as database:
        of_camera: dict[int, list[float]] = defaultdict(list)
        for image in database.read_all_images():
            if image.name in focal_px:
                of_camera[image.camera_id].append(focal_px[image.name])
        for camera_id, values in of_camera.items():
            camera = database.read_camera(camera_id)
            if camera.has_prior_focal_length and not replace:
                continue
            camera.has_prior_focal_length = True
            _update_focal_length(database, camera, float(np.median(values)))


def _update_focal_length(database: Any, camera: Any, focal_px: float) -> None:
    """Writes a camera with another focal length, the same in both directions."""
    params = camera.params.copy()
    params[camera.focal_length_idxs()] = focal_px
    camera.params = params
    database.update_camera(camera)

"""From photos or a video to a capture: the stages of ``f3rm-ext sfm process``."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from f3rm_ext.capture.checks import require_images
from f3rm_ext.capture.colmap_model import APPLIED, UNCHANGED
from f3rm_ext.capture.images import name_some
from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm import capture_writer, quality, video
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.sfm.database import FeatureDatabase, redirect_stderr
from f3rm_ext.sfm.estimators import PredictedPoses, build_estimator, predict_poses
from f3rm_ext.sfm.mapping import align_with_gps, distortion_folds, image_names, refine_predicted, solve
from f3rm_ext.sfm.pairs import choose_matching, exhaustive_pairs, sequential_pairs, similar_pairs
from f3rm_ext.sfm.photos import Photo, allow_large_images, capture_names, find_masks, find_photos, read_mask, read_photo
from f3rm_ext.sfm.quality import missing_pose_reasons
from f3rm_ext.sfm.report import write_report
from f3rm_ext.sfm.second_pass import register_missing
from f3rm_ext.sfm.verdict import collect_evidence, find_doubt
from f3rm_ext.sfm.work_folder import POINTS, TRANSFORMS, WorkFolder, file_stamp
from f3rm_ext.utils import threads
from f3rm_ext.utils.console import StageProgress

READING, FRAMES, FEATURES = "Reading photos", "Reading the video", "Finding features"
MATCHING, SOLVING, AGAIN = "Matching photos", "Solving for cameras", "Trying photos again"
UNDISTORTING = "Undistorting photos"
LOG = "log.txt"
"""COLMAP's own messages, in ``colmap/``."""
_RESULT_OPTIONS = ("matching", "mapper", "undistort")
_NON_FEATURE_OPTIONS = ("output", "start_over", *_RESULT_OPTIONS)
_FEW_PHOTOS = 8
_SAVE_EVERY = 16
_FRAME_QUALITY = 95


class Processing:
    """One call of ``f3rm-ext sfm process``.

    Args:
        show: called with the progress of each stage.
    """

    def __init__(self, config: ProcessConfig, show: StageProgress, say: Callable[[str], None]) -> None:
        self.config, self.show, self.say = config, show, say

    def run(self) -> dict[str, Any]:
        """Runs the stages that are not complete yet.

        Returns:
            The figures of :meth:`_finish`, which are also in ``sfm.json``.

        Raises:
            ConfigError: an option has an impossible value, or the folder holds something else.
            CaptureError: no capture can be made from these photos.
        """
        config = self.config
        config.check()
        estimator = build_estimator(config.method)
        photos = self._source_photos()
        work = WorkFolder(config.output)
        with work.lock.hold():
            options = {
                name: _plain(value) for name, value in asdict(config).items() if name not in _NON_FEATURE_OPTIONS
            }
            wanted = {name: _plain(getattr(config, name)) for name in _RESULT_OPTIONS}
            masks_of: dict[Path, Path] = {}
            if config.masks is not None and config.images is not None:
                masks_of = find_masks(config.masks, list(photos.values()), config.images)
            stamps = {stem: _stamp(path, masks_of) for stem, path in photos.items()}
            if config.video is not None:
                options["video"], stamps = f"{options['video']} {file_stamp(config.video)}", None
            lost = work.begin(options, stamps, config.start_over)
            if lost:
                self.say(f"Starting over, because {lost}.")
            if config.video is not None:
                photos = {path.stem: path for path in self._frames(work, config.video)}
            masks = self._read_photos(work, photos, masks_of)
            key = {**wanted, "photos": sorted(work.photos)}
            files = (work.out / TRANSFORMS, work.out / POINTS)
            if work.state.get("result", {}).get("key") == key and all(file.is_file() for file in files):
                work.publish()
                return work.state["result"]
            predicted = None
            if estimator is not None:
                predicted = predict_poses(config.method, estimator, [work.images / name for name in work.photos])
            with redirect_stderr(work.database.with_name(LOG)):
                database = self._features(work, predicted)
                matching = self._match(database, list(work.photos))
                models = self._solve(work, database, predicted)
                result = {"key": key, "matching": matching, **self._finish(work, database, models, masks)}
            work.save(result=result)
            work.publish()
            return result

    # --- photos ------------------------------------------------------------------------------------------------------

    def _source_photos(self) -> dict[str, Path]:
        """Returns the original photos by their name in the capture, without suffix; none for a video."""
        images = self.config.images
        if images is None:
            return {}
        paths = find_photos(images)
        require_images(min(len(paths), 2), images)
        return dict(zip(capture_names(paths, images), paths, strict=True))

    def _frames(self, work: WorkFolder, path: Path) -> list[Path]:
        wanted = {"stamp": file_stamp(path), "num_frames": self.config.num_frames, "max_size": self.config.max_size}
        known = work.state.get("video", {})
        frames = [work.images / name for name in known.get("frames", ())]
        if known.get("wanted") == wanted and all(frame.is_file() for frame in frames):
            return frames
        frames = []
        reading = video.sharpest_frames(path, self.config.num_frames, partial(self.show, FRAMES))
        for number, image in enumerate(reading):
            if self.config.max_size:
                image.thumbnail((self.config.max_size, self.config.max_size), Image.Resampling.LANCZOS)
            stream = io.BytesIO()
            image.save(stream, "JPEG", quality=_FRAME_QUALITY, subsampling=0)
            frames.append(work.images / f"frame_{number + 1:05d}.jpg")
            work.write(frames[-1], stream.getvalue())
        require_images(min(len(frames), 2), path)
        work.save(video={"wanted": wanted, "frames": [frame.name for frame in frames]})
        return frames

    def _read_photos(self, work: WorkFolder, sources: dict[str, Path], masks_of: dict[Path, Path]) -> dict[str, str]:
        """Copies the photos that are new. Returns the masks for training by photo, relative to the capture."""
        done = {Path(name).stem for name in work.photos if (work.images / name).is_file()}
        todo = [stem for stem in sources if stem not in done]
        unreadable: dict[str, str] = {}

        def prepare(stem: str) -> tuple[str, dict[str, Any]] | str:
            source = sources[stem]
            try:
                photo = read_photo(source, self.config.max_size)
            except CaptureError as error:
                return str(error)
            name, known = self._prepare(work, stem, source, photo, masks_of.get(source))
            return name, {**known, "stamp": _stamp(source, masks_of)}

        self.show(READING, len(done), len(sources))
        fresh: dict[str, dict[str, Any]] = {}
        with allow_large_images(), ThreadPoolExecutor(threads.usable_cores()) as pool:
            for number, (stem, photo) in enumerate(zip(todo, pool.map(prepare, todo), strict=True)):
                if isinstance(photo, str):
                    unreadable[str(sources[stem])] = photo
                else:
                    fresh[photo[0]] = photo[1]
                self.show(READING, len(done) + number + 1, len(sources))
                if number % _SAVE_EVERY == _SAVE_EVERY - 1:
                    self._save_photos(work, sources, fresh)
        self._save_photos(work, sources, fresh)
        work.state["unreadable"] = unreadable
        for sentence in unreadable.values():
            self.say(f"Left out: {sentence}")
        if unreadable and len(work.photos) < 2:
            raise CaptureError(
                f"{len(unreadable)} of {len(sources)} photos cannot be read ({name_some(list(unreadable))}), and a "
                "scene needs at least two: export them again as JPEG."
            )
        if len(work.photos) < _FEW_PHOTOS:
            self.say(f"{len(work.photos)} photos are very few: 50 or more that overlap their neighbours work well.")
        return {name: f"masks/{Path(name).stem}.png" for name in work.photos} if masks_of else {}

    def _save_photos(self, work: WorkFolder, sources: dict[str, Path], fresh: dict[str, dict[str, Any]]) -> None:
        """Adds photos to the state, in the order of the sources."""
        known = {Path(name).stem: (name, values) for name, values in {**work.photos, **fresh}.items()}
        work.save(photos=dict(known[stem] for stem in sources if stem in known))

    def _prepare(
        self, work: WorkFolder, stem: str, source: Path, photo: Photo, mask: Path | None
    ) -> tuple[str, dict[str, Any]]:
        """Writes a photo and its masks. Returns its name and its properties."""
        name = f"{stem}{photo.suffix}"
        keep = photo.alpha
        if mask is not None:
            seen = read_mask(mask, source, photo)
            work.write(work.masks / f"{stem}.png", _png(seen))
            keep = seen if keep is None else keep & seen
        if keep is not None:
            work.write(work.feature_masks / f"{name}.png", _png(keep))
        if source != work.images / name:
            work.write(work.images / name, photo.data)
        return name, {
            "source": str(source),
            "size": [photo.width, photo.height],
            "camera": photo.camera,
            "turned": photo.turned,
            "blur": round(quality.measure_blur(photo.grey), 3),
            "fingerprint": quality.make_fingerprint(photo.grey).hex(),
        }

    # --- poses -------------------------------------------------------------------------------------------------------

    def _features(self, work: WorkFolder, predicted: PredictedPoses | None) -> FeatureDatabase:
        config = self.config
        database = FeatureDatabase(
            work.database, work.images, work.feature_masks, config.feature_size, config.max_features
        )
        cameras = {name: str(values["camera"]) for name, values in work.photos.items()}
        if config.cameras == "per-photo":
            cameras = {name: name for name in cameras}
        elif config.cameras == "one":
            sizes = {tuple(values["size"]) for values in work.photos.values()}
            if len(sizes) > 1:
                raise CaptureError(
                    f"--cameras one needs photos of one size, but there are {len(sizes)} sizes: use --cameras auto."
                )
            cameras = dict.fromkeys(cameras, "one")
        database.add_photos(cameras, config.camera_model, predicted.focal_px if predicted else {})
        database.find_features(list(work.photos), partial(self.show, FEATURES))
        return database

    def _match(self, database: FeatureDatabase, names: list[str]) -> str:
        matching = self.config.matching
        if matching == "auto":
            matching = choose_matching(len(names), self.config.video is not None)
        if matching == "exhaustive":
            pairs = exhaustive_pairs(names)
        elif matching == "sequential":
            pairs = sequential_pairs(names)
        else:
            pairs = similar_pairs(database, names)
        database.match(pairs, partial(self.show, MATCHING))
        return matching

    def _solve(self, work: WorkFolder, database: FeatureDatabase, predicted: PredictedPoses | None) -> list[Any]:
        folder = work.database.parent / ".solving.tmp"
        capture_writer.remove_folder(folder)
        if predicted is not None:
            return [refine_predicted(database, predicted.viewmats, folder, partial(self.show, SOLVING))]
        mapper, show = self.config.mapper, partial(self.show, SOLVING)
        models = solve(database, folder, mapper, show)
        bent = models and any(distortion_folds(camera) for camera in models[0].cameras.values())
        if bent and self.config.camera_model == "auto" and mapper == "incremental":
            self.say("These photos do not determine the lens distortion, so it is left out.")
            models = solve(database, folder, mapper, show, refine_distortion=False)
        if models:
            lost = [name for name in work.photos if name not in image_names(models[0])]
            again = register_missing(models[0], database, lost, partial(self.show, AGAIN))
            if again:
                self.say(f"A second pass found poses of {name_some(again)}.")
        return models

    # --- results -----------------------------------------------------------------------------------------------------

    def _finish(
        self, work: WorkFolder, database: FeatureDatabase, models: list[Any], masks: dict[str, str]
    ) -> dict[str, Any]:
        """Writes the capture and its report. Returns the figures."""
        config, out = self.config, work.out
        blurred = quality.find_blurred({name: values["blur"] for name, values in work.photos.items()})
        same = quality.find_duplicates(
            {name: bytes.fromhex(values["fingerprint"]) for name, values in work.photos.items()}
        )
        features, matches = database.num_features(), database.num_matches()
        groups = [image_names(model) for model in models]
        groups = [*groups[:1], *(left for group in groups[1:] if (left := group - groups[0]))]
        reasons = missing_pose_reasons(features, matches, groups, blurred)
        if not models or len(groups[0]) < 2:
            why = f" ({next(iter(reasons.values()))})" if len(set(reasons.values())) == 1 else ""
            if len(same) == len(work.photos) - 1:
                why = " (they all show the same picture)"
            raise CaptureError(
                f"No two of the {len(work.photos)} photos fit together{why}: take photos of textured things that "
                "overlap by at least half."
            )
        model = models[0]
        evidence = collect_evidence(model, database)
        gps_error_m = align_with_gps(model, database)
        applied = APPLIED if gps_error_m is None else UNCHANGED
        images = "images"
        if config.undistort:
            capture_writer.write_sparse(model, out)
            count = partial(self.show, UNDISTORTING)
            model = capture_writer.undistort(model, out, "images", "images_undistorted", masks, count)
            images = "images_undistorted"
            masks = {name: capture_writer.undistorted_mask(mask) for name, mask in masks.items()}
        result = {
            "photos": len(work.photos),
            "registered": len(groups[0]),
            "groups": [len(group) for group in groups],
            "without_pose": reasons,
            "unreadable": work.state.get("unreadable", {}),
            "blurred": blurred,
            "same": same,
            "points": int(model.num_points3D()),
            "track_length": round(float(model.compute_mean_track_length()), 2),
            "reprojection_error_px": round(float(model.compute_mean_reprojection_error()), 3),
            "cameras": sorted({camera.model.name for camera in model.cameras.values()}),
            "gps_error_m": gps_error_m,
            "evidence": asdict(evidence),
            "doubt": find_doubt(evidence),
        }
        write_report(out, model, work.photos, result, features, matches)
        capture_writer.write_capture(model, out, images, masks, applied)
        return result


def _stamp(source: Path, masks_of: dict[Path, Path]) -> str:
    """Returns a text that changes with a photo or its mask."""
    return " ".join(file_stamp(path) for path in (source, masks_of.get(source)) if path is not None)


def _plain(value: Any) -> Any:
    return str(value.resolve()) if isinstance(value, Path) else value


def _png(keep: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.where(keep, 255, 0).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()

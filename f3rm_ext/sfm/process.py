"""From photos or a video to a capture: the stages of ``f3rm-ext sfm process``."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm import capture_writer, quality
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.sfm.database import FeatureDatabase, redirect_stderr
from f3rm_ext.sfm.estimators import PredictedPoses, StampedEstimator, build_estimator, predict_poses
from f3rm_ext.sfm.mapping import align_with_gps, level_positions, refine_predicted
from f3rm_ext.sfm.pairs import choose_pairs
from f3rm_ext.sfm.report import write_report
from f3rm_ext.sfm.solution import SOLVING, Solution, Solver, judge
from f3rm_ext.sfm.sources import copy_photos, find_sources, write_frames
from f3rm_ext.sfm.work_folder import WorkFolder, file_stamp
from f3rm_ext.utils.console import StageProgress
from f3rm_ext.utils.pictures import allow_large_images

FEATURES, MATCHING, UNDISTORTING = "Finding features", "Matching photos", "Undistorting photos"
LOG = "log.txt"
"""COLMAP's own messages, in ``colmap/``."""
_RESULT_OPTIONS = ("matching", "mapper", "undistort")
_NON_FEATURE_OPTIONS = ("output", "start_over", *_RESULT_OPTIONS)


class Processing:
    """One call of ``f3rm-ext sfm process``.

    Args:
        show: called with the progress of each stage.
        say: called with each sentence that the user should read.
    """

    def __init__(self, config: ProcessConfig, show: StageProgress, say: Callable[[str], None]) -> None:
        self.config, self.show, self.say = config, show, say

    @allow_large_images()
    def run(self) -> dict[str, Any]:
        """Runs the stages that are not complete yet.

        Returns:
            The figures that are also in ``sfm.json``.

        Raises:
            ConfigError: an option has an impossible value, or the folder holds something else.
            CaptureError: no capture can be made from these photos, or its poses are doubtful and those of the earlier
                capture in the folder are not.
        """
        config = self.config
        config.check()
        estimator = build_estimator(config.method)
        stamp = [estimator.stamp()] if isinstance(estimator, StampedEstimator) else []
        sources = find_sources(config, self.say)
        work = WorkFolder(config.output)
        with work.hold():
            values = {name: str(v.resolve()) if isinstance(v, Path) else v for name, v in asdict(config).items()}
            options = {name: value for name, value in values.items() if name not in _NON_FEATURE_OPTIONS}
            options["method"] = " ".join([config.method, *stamp])
            stamps = {name: source.stamp for name, source in sources.items()}
            if config.video is not None:
                options["video"], stamps = f"{options['video']} {file_stamp(config.video)}", None
            cause = work.begin(options, stamps, config.start_over)
            if cause:
                self.say(f"Starting over, because {cause}.")
            if config.video is not None:
                sources = write_frames(work, config.video, config, self.show, self.say)
            copy_photos(work, sources, config.max_size, self.show, self.say)
            key = {**{name: values[name] for name in _RESULT_OPTIONS}, "photos": sorted(work.photos)}
            result = work.find_result(key)
            if result is None:
                predicted = None
                if estimator is not None:
                    predicted = predict_poses(config.method, estimator, [work.images / name for name in work.photos])
                with redirect_stderr(work.database.with_name(LOG)):
                    database, matching = self._match(work, predicted)
                    solution = self._solve(work, database, predicted)
                    result = {"key": key, "matching": matching, **self._write(work, database, solution)}
            work.publish(result)
            return result

    def _match(self, work: WorkFolder, predicted: PredictedPoses | None) -> tuple[FeatureDatabase, str]:
        """Finds features and matches. Returns them with the way in which pairs of photos were chosen."""
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
        known_px = {name: values["focal_px"] for name, values in work.photos.items() if "focal_px" in values}
        database.add_photos(cameras, config.camera_model, known_px, predicted.focal_px if predicted else {})
        database.find_features(list(work.photos), partial(self.show, FEATURES))
        matching, pairs = choose_pairs(config.matching, database, list(work.photos), config.video is not None)
        database.match(pairs, partial(self.show, MATCHING))
        return database, matching

    def _solve(self, work: WorkFolder, database: FeatureDatabase, predicted: PredictedPoses | None) -> Solution | None:
        """Returns the best solution for the cameras; None if no two photos fit together."""
        folder = work.database.parent / ".solving.tmp"
        solver = Solver(database, folder, self.config.camera_model == "auto", self.show, self.say)
        if predicted is None:
            return solver.find(self.config.mapper)
        model = refine_predicted(database, predicted.viewmats, folder, partial(self.show, SOLVING))
        return judge([model], "predicted", database, [])

    def _write(self, work: WorkFolder, database: FeatureDatabase, solution: Solution | None) -> dict[str, Any]:
        """Writes the capture and its report. Returns the figures."""
        config, out = self.config, work.out
        blurred = quality.find_blurred({name: values["blur"] for name, values in work.photos.items()})
        same = quality.find_duplicates(
            {name: bytes.fromhex(values["fingerprint"]) for name, values in work.photos.items()}
        )
        features, matches = database.num_features(), database.num_matches()
        groups = solution.groups if solution else []
        reasons = quality.missing_pose_reasons(features, matches, groups, blurred)
        if solution is None or len(groups[0]) < 2:
            reason = quality.no_pose_reason(reasons, matches, same)
            raise CaptureError(
                f"The {len(work.photos)} photos do not fit together{reason}: take photos of textured things that "
                "overlap by at least half."
            )
        model, doubt = solution.model, solution.doubt
        if doubt and work.has_trusted_capture and not config.start_over:
            raise CaptureError(
                f"The new poses are doubtful: {doubt}. The earlier capture in {work.final} stays, because nothing "
                "speaks against its poses; to replace it anyway, add --start-over."
            )
        gps_error_m = align_with_gps(model, database)
        z_is_up = gps_error_m is not None or level_positions(model)
        images, masks = "images", {}
        if config.masks is not None:
            masks = {name: f"masks/{Path(name).stem}.png" for name in work.photos}
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
            "z_is_up": z_is_up,
            "mapper": solution.mapper,
            "evidence": asdict(solution.evidence),
            "doubt": doubt,
        }
        # The capture is finished with transforms.json, so the report comes before it.
        write_report(out, model, work.photos, result, features, matches)
        capture_writer.write_capture(model, out, images, masks, z_is_up=z_is_up)
        return result

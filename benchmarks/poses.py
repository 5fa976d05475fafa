"""How near the poses that `f3rm-ext sfm process` finds are to those a capture came with.

    python benchmarks/poses.py --captures fox dtu_scan24 --mappers incremental global
    python benchmarks/poses.py --room-photos 240

takes the photos of each capture alone, finds poses, moves them onto the given ones by one similarity, and compares.
The given poses are not exact either: fox's are an earlier COLMAP's, from the full video. Those of a room that
`f3rm-ext scene synth` makes are. The table is printed and
written to results/poses.json, which keeps the rows of other captures.

Metrics are those of `f3rm-ext sfm eval` (f3rm_ext.sfm.metrics), in the published protocols. A photo without a pose is a
miss in all its pairs. Errors of centres are shares of the largest distance of a given camera from their mean.
"""

import json
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap
import tyro
from processes import call, print_table, read_report, write_report

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.sfm.metrics import align, compare_poses

HERE = Path(__file__).parent
_DOUBTFUL = 3
"""Exit code of `f3rm-ext sfm process` where the poses are doubtful."""


def poses_of(capture: Path) -> dict[str, np.ndarray]:
    """Returns the poses (4, 4) of a capture, camera to world, by file name of the photo."""
    meta, _ = read_transforms(capture)
    return {Path(frame["file_path"]).name: np.array(frame["transform_matrix"]) for frame in meta["frames"]}


def compare(found: dict[str, np.ndarray], given: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns errors of poses against given ones."""
    names = sorted(found.keys() & given.keys())
    if len(names) < 3:
        raise SystemExit("Fewer than three poses were found: there is nothing to compare.")
    ours, true = (np.array([poses[name] for name in names]) for poses in (found, given))
    all_centers = np.array([pose[:3, 3] for pose in given.values()])
    metrics = compare_poses(
        (ours[:, :3, :3], ours[:, :3, 3]), (true[:, :3, :3], true[:, :3, 3]), all_centers, len(given) - len(names)
    )
    scene_scale = np.linalg.norm(all_centers - all_centers.mean(axis=0), axis=1).max()
    off = np.linalg.norm(align(ours[:, :3, 3], true[:, :3, 3])(ours[:, :3, 3]) - true[:, :3, 3], axis=1)
    return {**asdict(metrics), "center_worst": float(off.max() / scene_scale)}


@dataclass
class Poses:
    """Compares poses."""

    captures: tuple[Path, ...] = ()
    """Captures with poses."""
    room_photos: int = 0
    """Photos of a synthetic room, 320 × 240, that is made and compared, too; 0 for none."""
    mappers: tuple[str, ...] = ("incremental", "global")
    """Mappers to compare."""
    feature_size: int = 1000
    """Longest side at which features are sought, px."""
    out: Path = HERE / "results" / "poses.json"
    """File of the results."""

    def main(self) -> None:
        """Runs everything and writes the table."""
        report = {"captures": {}, **read_report(self.out)}
        with tempfile.TemporaryDirectory() as made:
            captures = [*self.captures, *([self._room(Path(made))] if self.room_photos else [])]
            self._compare(captures, report)
        write_report(report | {"pycolmap": pycolmap.__version__}, self.out)
        print_table("poses", report)

    def _room(self, folder: Path) -> Path:
        """Makes the room."""
        capture = folder / f"room_{self.room_photos}"
        call(["f3rm-ext", "scene", "synth", capture, "--num-images", self.room_photos, "--width", 320,
              "--height", 240])  # fmt: skip
        return capture

    def _compare(self, captures: list[Path], report: dict[str, Any]) -> None:
        """Enters the rows of captures."""
        for capture in captures:
            meta, folder = read_transforms(capture)
            with tempfile.TemporaryDirectory() as work:
                photos = Path(work, "photos")
                photos.mkdir()
                for frame in meta["frames"]:
                    shutil.copy(folder / frame["file_path"], photos)
                rows = [self._row(mapper, photos, Path(work, mapper), poses_of(capture)) for mapper in self.mappers]
            report["captures"][capture.resolve().name] = rows

    def _row(self, mapper: str, photos: Path, out: Path, given: dict[str, np.ndarray]) -> dict[str, Any]:
        """One run."""
        start = time.monotonic()
        command = ["f3rm-ext", "sfm", "process", "--images", photos, "--output", out, "--mapper", mapper,
                   "--feature-size", self.feature_size]  # fmt: skip
        try:
            call(command)
        except subprocess.CalledProcessError as error:
            if error.returncode != _DOUBTFUL:
                raise
        seconds = time.monotonic() - start
        result = json.loads((out / "sfm.json").read_text())["result"]
        figures = {key: result[key] for key in ("registered", "photos", "points", "track_length")}
        return {
            "mapper": mapper,
            **figures,
            "reprojection_error_px": result["reprojection_error_px"],
            **compare(poses_of(out), given),
            "verdict": "doubted" if result["doubt"] else "trusted",
            "seconds": seconds,
        }


if __name__ == "__main__":
    tyro.cli(Poses).main()

"""How near the poses that `f3rm-ext sfm process` finds are to those a capture came with.

    python benchmarks/poses.py --captures fox dtu_scan24 --mappers incremental global

takes the photos of each capture alone, finds poses, moves them onto the given ones by one similarity, and compares.
The given poses are not exact either: fox's are an earlier COLMAP's, from the full video. The table is printed and
written to results/poses.json, which keeps the rows of other captures.

RRA@5 and RTA@5 (PoseDiffusion's protocol) are shares of pairs of photos whose relative rotation, and direction of
translation, is off by less than 5°. A photo without a pose fails in all its pairs.
"""

import datetime
import itertools
import json
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap
import tyro
from commands import call
from scipy.spatial.transform import Rotation

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.sfm.metrics import align, relative_rotation_errors_deg
from f3rm_ext.utils.atomic_files import write_atomic

HERE = Path(__file__).parent
_LIMIT_DEG = 5.0


def poses_of(capture: Path) -> dict[str, np.ndarray]:
    """Returns the poses (4, 4) of a capture, camera to world, by file name of the photo."""
    meta, _ = read_transforms(capture)
    return {Path(frame["file_path"]).name: np.array(frame["transform_matrix"]) for frame in meta["frames"]}


def direction_deg(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the angle between two directions."""
    cosine = a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def compare(found: dict[str, np.ndarray], given: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns errors of poses against given ones."""
    names = sorted(found.keys() & given.keys())
    a, b = (np.array([poses[name][:3, 3] for name in names]) for poses in (found, given))
    if len(names) < 3:
        raise SystemExit("Fewer than three poses were found: there is nothing to compare.")
    fit = align(a, b)
    extent = np.linalg.norm(b - b.mean(axis=0), axis=1).max()
    centres = np.linalg.norm(fit(a) - b, axis=1) / extent
    turned, true = (np.array([poses[name][:3, :3] for name in names]) for poses in (found, given))
    rotations = np.degrees(Rotation.from_matrix((fit.rotation @ turned).transpose(0, 2, 1) @ true).magnitude())
    rotation_hits = int((relative_rotation_errors_deg(turned, true) < _LIMIT_DEG).sum())
    translation_hits = pairs = 0
    for i, j in itertools.combinations(sorted(given), 2):
        pairs += 1
        if i in found and j in found:
            (p, q), (r, s) = ((np.linalg.inv(poses[i]), poses[j]) for poses in (found, given))
            translation_hits += direction_deg((p @ q)[:3, 3], (r @ s)[:3, 3]) < _LIMIT_DEG
    return {
        "rra_5": rotation_hits / pairs,
        "rta_5": translation_hits / pairs,
        "rotation_median_deg": float(np.median(rotations)),
        "rotation_worst_deg": float(np.max(rotations)),
        "centre_median": float(np.median(centres)),
        "centre_worst": float(np.max(centres)),
    }


@dataclass
class Poses:
    """Compares poses."""

    captures: tuple[Path, ...]
    """Captures with poses."""
    mappers: tuple[str, ...] = ("incremental", "global")
    """Mappers to compare."""
    feature_size: int = 1000
    """Longest side at which features are sought, px."""
    out: Path = HERE / "results" / "poses.json"
    """File of the results."""

    def main(self) -> None:
        """Runs everything and writes the table."""
        report: dict[str, Any] = json.loads(self.out.read_text()) if self.out.exists() else {"captures": {}}
        for capture in self.captures:
            meta, folder = read_transforms(capture)
            with tempfile.TemporaryDirectory() as work:
                photos = Path(work, "photos")
                photos.mkdir()
                for frame in meta["frames"]:
                    shutil.copy(folder / frame["file_path"], photos)
                rows = [self._row(mapper, photos, Path(work, "capture"), poses_of(capture)) for mapper in self.mappers]
            report["captures"][capture.resolve().name] = rows
        report |= {
            "date": datetime.date.today().isoformat(), "machine": platform.machine(), "pycolmap": pycolmap.__version__,
        }  # fmt: skip
        write_atomic(self.out, json.dumps(report, indent=1).encode() + b"\n")
        print("capture, mapper: registered, RRA@5, RTA@5, rotation, centre (of the extent), reprojection px, s")
        for name, rows in report["captures"].items():
            for row in rows:
                print(
                    f"{name}, {row['mapper']}: {row['registered']} of {row['photos']}, {row['rra_5']:.3f}, "
                    f"{row['rta_5']:.3f}, {row['rotation_median_deg']:.2f}° ({row['rotation_worst_deg']:.2f}°), "
                    f"{row['centre_median']:.4f} ({row['centre_worst']:.4f}), {row['reprojection_error_px']:.2f}, "
                    f"{row['seconds']:.0f}"
                )

    def _row(self, mapper: str, photos: Path, out: Path, given: dict[str, np.ndarray]) -> dict[str, Any]:
        """One run. Features and matches are those of the first; only the first row's time has them."""
        reused = out.exists()
        start = time.monotonic()
        call(["f3rm-ext", "sfm", "process", "--images", photos, "--output", out, "--mapper", mapper,
              "--feature-size", self.feature_size])  # fmt: skip
        seconds = time.monotonic() - start
        result = json.loads((out / "sfm.json").read_text())["result"]
        figures = {key: result[key] for key in ("registered", "photos", "points", "track_length")}
        return {
            "mapper": mapper,
            **figures,
            "reprojection_error_px": result["reprojection_error_px"],
            **compare(poses_of(out), given),
            "seconds": seconds,
            "features_reused": reused,
        }


if __name__ == "__main__":
    tyro.cli(Poses).main()

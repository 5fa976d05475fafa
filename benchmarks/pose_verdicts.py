"""How often `f3rm-ext sfm process` is right about the poses that it finds.

    python benchmarks/pose_verdicts.py --data DATA --work WORK

makes photos with true poses (pose_captures.py), finds poses, asks for the verdict, and compares. Many of the captures
are hard on purpose: walls that look alike, mirrors, photos of two scenes. DATA has the folders fox, chair, dtu_scan24
and tabletop. WORK keeps photos and models, so that another call judges them anew within a minute.

Poses are right if nine of ten pairs of photos have a relative rotation less than 5° off, and nine of ten cameras lie
within a tenth of the scene's scale. Photos of different scenes must not share a model, and cameras that all stand in
one place have no poses that could be right. Photos without a pose do not count, since the command says so. The
thresholds of f3rm_ext.sfm.verdict were chosen on the captures of the half "choose"; those of "judge" test them.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap
import tyro
from pose_captures import CAPTURES
from processes import write_report

from f3rm_ext.errors import CaptureError
from f3rm_ext.sfm.capture_writer import SPARSE
from f3rm_ext.sfm.config import ProcessConfig
from f3rm_ext.sfm.database import FeatureDatabase
from f3rm_ext.sfm.metrics import align, relative_rotation_errors_deg
from f3rm_ext.sfm.process import Processing
from f3rm_ext.sfm.verdict import collect_evidence, find_doubt

HERE = Path(__file__).parent
_FEATURE_PX, _MAX_FEATURES = 640, 1500
_LEAST_SHARE, _LEAST_ANGLE_DEG, _LEAST_CENTRE = 0.9, 5.0, 0.1


@dataclass
class PoseVerdicts:
    """Compares verdicts with the truth."""

    data: Path
    """Folder with the captures of others."""
    work: Path
    """Folder for photos and models, which are kept."""
    only: tuple[str, ...] = ()
    """Captures to make; by default all. Rows of all that are in WORK are written."""
    out: Path = HERE / "results" / "pose_verdicts.json"
    """File of the results."""

    def main(self) -> None:
        """Makes what is not there, judges everything, and writes the rows."""
        rows = []
        for name in CAPTURES:
            folder = self.work / name
            if not (folder / "done.json").exists() and (name in self.only or not self.only):
                self._make(name, folder)
            if (folder / "done.json").exists():
                rows += [self._row(name, folder, mapper) for mapper in CAPTURES[name].mappers]
        for row in rows:
            print(f"{row['capture']:18}{row['mapper']:12}{row['photos']:4}{row.get('registered', 0):4}",
                  *(f"{row[key]:8.2f}" if key in row else " " * 8 for key in ("rotation_deg", "rra5", "centres_near")),
                  {True: "right", False: "WRONG", None: "-"}[row["right"]], row["verdict"], sep="  ")  # fmt: skip
        write_report({"pycolmap": pycolmap.__version__, "rows": rows}, self.out)

    def _make(self, name: str, folder: Path) -> None:
        """Makes the photos, and finds poses with each mapper."""
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "photos").mkdir(parents=True)
        truth = {}
        for number, photo in enumerate(CAPTURES[name].make(self.data)):
            file = f"p{number:03d}.png"
            photo.picture.save(folder / "photos" / file)
            truth[file] = {"scene": photo.scene, "pose": photo.pose.tolist()}
        (folder / "truth.json").write_text(json.dumps(truth))
        for mapper in CAPTURES[name].mappers:
            config = ProcessConfig(
                output=folder / "out", images=folder / "photos", mapper=mapper,  # type: ignore[arg-type]
                feature_size=_FEATURE_PX, max_features=_MAX_FEATURES,
            )  # fmt: skip
            try:
                Processing(config, lambda *_: None, lambda _: None).run()
            except CaptureError as error:
                print(f"{name}, {mapper}: {error}")
                continue
            shutil.copytree(folder / "out" / SPARSE, folder / f"model_{mapper}")
        (folder / "done.json").write_text("{}")

    def _row(self, name: str, folder: Path, mapper: str) -> dict[str, Any]:
        """Judges a model, and compares it with the truth."""
        capture, truth = CAPTURES[name], json.loads((folder / "truth.json").read_text())
        row: dict[str, Any] = {"capture": name, "what": capture.what, "half": capture.half, "mapper": mapper}
        row["photos"] = len(truth)
        if not (folder / f"model_{mapper}").exists():
            return {**row, "right": None, "verdict": "no capture", "doubt": ""}
        model = pycolmap.Reconstruction(folder / f"model_{mapper}")
        out = folder / "out"
        database = FeatureDatabase(out / "colmap" / "database.db", out / "images", out, _FEATURE_PX, _MAX_FEATURES)
        evidence = collect_evidence(model, database)
        doubt = find_doubt(evidence)
        return {
            **row, "registered": model.num_reg_images(), **compare(model, truth), "doubt": doubt,
            "reprojection_error_px": model.compute_mean_reprojection_error(), "evidence": asdict(evidence),
            "verdict": "doubtful" if doubt else "trusted",
        }  # fmt: skip


def compare(model: Any, truth: dict[str, Any]) -> dict[str, Any]:
    """Returns errors of a model, and whether its poses are right.

    Args:
        model: a ``pycolmap.Reconstruction``.
        truth: pose and scene by file name.
    """
    images = [model.image(number) for number in model.reg_image_ids()]
    found = np.array([image.cam_from_world().inverse().matrix() for image in images])
    true = np.array([truth[image.name]["pose"] for image in images])[:, :3] @ np.diag([1.0, -1, -1, 1])
    scenes = np.array([truth[image.name]["scene"] for image in images])
    errors_deg = relative_rotation_errors_deg(found[:, :, :3], true[:, :, :3])
    i, j = np.triu_indices(len(images), 1)
    errors_deg[scenes[i] != scenes[j]] = 180.0
    rra5 = float((errors_deg < _LEAST_ANGLE_DEG).mean())
    near: list[bool] = []
    for scene in np.unique(scenes):
        ours, centers = (poses[scenes == scene][:, :, 3] for poses in (found, true))
        scale = np.linalg.norm(centers - centers.mean(axis=0), axis=1).max()
        off = np.linalg.norm(align(ours, centers)(ours) - centers, axis=1)
        near += (off < _LEAST_CENTRE * scale).tolist() if scale > 1e-6 else [False] * len(off)
    return {
        "rotation_deg": float(np.median(errors_deg)),
        "rotation_95_deg": float(np.percentile(errors_deg, 95)),
        "rra5": rra5,
        "centres_near": float(np.mean(near)),
        "right": bool(rra5 >= _LEAST_SHARE and np.mean(near) >= _LEAST_SHARE),
    }


if __name__ == "__main__":
    tyro.cli(PoseVerdicts).main()

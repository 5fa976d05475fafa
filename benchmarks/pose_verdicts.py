"""How often `f3rm-ext sfm process` is right about the poses that it finds from few photos.

    python benchmarks/pose_verdicts.py --captures fox dtu_scan24 tabletop

takes photos of each capture at random, so few and so small that poses often come out wrong, finds poses, and compares
the verdict with the truth: the poses that the capture came with. Poses are right if nine of ten pairs of photos have a
relative rotation less than 5° off, and nine of ten cameras lie within a tenth of the scene's scale. Photos without a
pose do not count, since the command says so. The counts, and the photos with a right pose that is trusted, are printed
and written to results/pose_verdicts.json.
"""

import itertools
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pycolmap
import tyro
from poses import compare, poses_of
from processes import write_report

import f3rm_ext
from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.errors import CaptureError

HERE = Path(__file__).parent
SIZES = (8, 9, 10, 11, 12, 13, 14, 16, 20, 24)
"""Photos of the subsets, in turn."""
VERDICTS = ("right, trusted", "right, doubted", "wrong, doubted", "wrong, trusted", "refused")


@dataclass
class PoseVerdicts:
    """Compares verdicts on poses with the truth."""

    captures: tuple[Path, ...]
    """Captures with true poses."""
    subsets: int = 20
    """Subsets of each capture."""
    seed: int = 0
    """Seed of the choice of photos."""
    mappers: tuple[Literal["auto", "incremental", "global"], ...] = ("incremental", "auto")
    """Mappers to compare."""
    feature_size: int = 640
    """Longest side at which features are sought, px."""
    max_features: int = 1500
    """Maximum number of features of a photo."""
    out: Path = HERE / "results" / "pose_verdicts.json"
    """File of the results."""

    def main(self) -> None:
        """Judges everything, and writes the counts."""
        rows = []
        for capture, mapper in itertools.product(self.captures, self.mappers):
            verdicts, photos = Counter[str](), 0
            for number in range(self.subsets):
                verdict, count = self._judge(capture, number, mapper)
                verdicts[verdict] += 1
                photos += count if verdict == VERDICTS[0] else 0
            counts = {verdict: verdicts[verdict] for verdict in VERDICTS}
            rows.append({"capture": capture.resolve().name, "mapper": mapper, **counts, "photos": photos})
            print(rows[-1], flush=True)
        options = {"seed": self.seed, "feature_size": self.feature_size, "max_features": self.max_features}
        write_report({"pycolmap": pycolmap.__version__, **options, "rows": rows}, self.out)

    def _judge(self, capture: Path, number: int, mapper: str) -> tuple[str, int]:
        """Finds poses of one subset. Returns which of VERDICTS came out, and how many photos have a pose."""
        meta, folder = read_transforms(capture)
        files = sorted(folder / frame["file_path"] for frame in meta["frames"])
        size = min(SIZES[number % len(SIZES)], len(files))
        with tempfile.TemporaryDirectory() as work:
            photos = Path(work, "photos")
            photos.mkdir()
            for file in random.Random(f"{self.seed} {number}").sample(files, size):
                (photos / file.name).symlink_to(file.resolve())
            try:
                poses = f3rm_ext.estimate_poses(
                    photos,
                    Path(work, "capture"),
                    mapper=mapper,
                    feature_size=self.feature_size,
                    max_features=self.max_features,
                )
            except CaptureError:
                return "refused", 0
            found, true = poses_of(Path(work, "capture")), poses_of(capture)
        is_right = _is_right(compare(found, {name: true[name] for name in found})) if len(found) > 2 else False
        verdict = f"{'right' if is_right else 'wrong'}, {'doubted' if poses.doubt else 'trusted'}"
        print(f"{capture.name} {number}: {len(found)} of {size} photos, {verdict}", flush=True)
        return verdict, len(found)


def _is_right(metrics: dict[str, Any]) -> bool:
    return min(metrics["rra"]["5"], metrics["center_accuracy"]) >= 0.9


if __name__ == "__main__":
    tyro.cli(PoseVerdicts).main()

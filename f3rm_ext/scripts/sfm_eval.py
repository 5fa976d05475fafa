"""``f3rm-ext sfm eval``: errors of the poses of a capture against true poses."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from f3rm_ext.scripts.common import OutArg, check_suffix, require_own_file, write_json
from f3rm_ext.utils.console import say

if TYPE_CHECKING:
    from f3rm_ext.sfm.metrics import PoseMetrics

_CHAMFER_CELLS = 64
"""Cells along each side of an image whose endpoints are compared."""


@dataclass
class Eval:
    """Compare the camera poses of a capture with true poses, by the metrics of papers on pose estimation.

    RRA and RTA are the shares of image pairs whose relative rotation, and whose direction of relative translation, has
    an error below 5, 15 or 30 degrees. AUC@30 is the area under the curve of the larger of both errors up to 30
    degrees. Centre accuracy is the share of cameras within 0.1 scene scales of their true position, after alignment by
    the best similarity. The captures may have different frames and scales. Images are matched by path, otherwise by
    file name.

    If both captures have depth maps, their points are compared by chamfer distance, too.

    Typical calls:
      f3rm-ext sfm eval --predicted capture --truth fox
      f3rm-ext sfm eval --predicted capture --truth room --missing ignore --out poses.json
    """

    predicted: Path
    """Capture with the poses to evaluate: a folder with transforms.json or COLMAP's sparse/0, or that JSON file."""
    truth: Path
    """Capture with the true poses of the same photos."""
    missing: Literal["fail", "ignore"] = "fail"
    """Treatment of images without a predicted pose: fail counts every pair with such an image as a miss, ignore leaves
    them out."""
    out: Annotated[Path | None, OutArg] = None
    """JSON file to write the metrics to; by default none is written."""

    def __post_init__(self) -> None:
        check_suffix(self.out, ".json")

    def main(self) -> int:
        from f3rm_ext.sfm import capture_cameras, metrics
        from f3rm_ext.sfm.capture_cameras import match_images, read_capture_cameras
        from f3rm_ext.utils.output_folder import made_by

        if self.out is not None:
            require_own_file(self.out, "f3rm-ext sfm eval")
        predicted, true = read_capture_cameras(self.predicted), read_capture_cameras(self.truth)
        pairs = match_images(predicted, true)
        theirs, ours = (list(indices) for indices in zip(*pairs, strict=True))
        lost = sorted(set(range(len(true.frames))) - set(ours))
        result = metrics.compare_poses(
            predicted=(predicted.poses[0][theirs], predicted.poses[1][theirs]),
            true=(true.poses[0][ours], true.poses[1][ours]),
            all_true_centers=true.poses[1],
            missing=len(lost) if self.missing == "fail" else 0,
        )
        chamfer = None
        if capture_cameras.has_depth(predicted, theirs) and capture_cameras.has_depth(true, ours):
            points, known = capture_cameras.cell_points(predicted, theirs, _CHAMFER_CELLS, _CHAMFER_CELLS)
            true_points, true_known = capture_cameras.cell_points(true, ours, _CHAMFER_CELLS, _CHAMFER_CELLS)
            both = known & true_known
            if int(both.sum()) >= 3:
                chamfer = metrics.chamfer_distance(points[both].numpy(), true_points[both].numpy())
        if self.out is not None:
            record = {
                **made_by("sfm eval"),
                "predicted": str(self.predicted.resolve()),
                "truth": str(self.truth.resolve()),
                "missing_counts_as": self.missing,
                "missing_images": [true.frames[index]["file_path"] for index in lost],
                **asdict(result),
                "chamfer": chamfer,
            }
            write_json(self.out, record)
        say(self._table(result, chamfer, len(lost)))
        if self.out is not None:
            say(f"Metrics are in {self.out}.")
        return 0

    def _table(self, result: "PoseMetrics", chamfer: float | None, lost: int) -> str:
        from f3rm_ext.html.tables import Table

        def shares(by_limit: dict[str, float]) -> str:
            return " / ".join(f"{share:.3f}" for share in by_limit.values())

        note = "missing ones " + ("are misses" if self.missing == "fail" else "are left out")
        rows = [["images", f"{result.cameras} of {result.cameras + lost}", note]]
        if result.pairs < (count := result.cameras * (result.cameras - 1) // 2):
            rows.append(["pairs", f"{result.pairs:,}", f"of {count:,}, drawn at random"])
        center = (
            f"median error {result.center_error:.3g} scene scales, {result.center_error_units:.3g} units of the truth"
        )
        rows += [
            ["RRA@5 / 15 / 30", shares(result.rra), f"median error {result.rotation_error_deg:.3g}°"],
            ["RTA@5 / 15 / 30", shares(result.rta), f"median error {result.translation_error_deg:.3g}°"],
            ["AUC@30", f"{result.auc_30:.3f}", "the larger of both errors"],
            ["centre accuracy", f"{result.center_accuracy:.3f}", center],
        ]
        if chamfer is not None:
            rows.append(["chamfer of endpoints", f"{chamfer:.3g}", "squared; mean distance from the centre 1"])
        table = Table(["metric", "value", ""], rows, "lrl").text()
        return f"{self.predicted} against {self.truth}\n\n{table}"

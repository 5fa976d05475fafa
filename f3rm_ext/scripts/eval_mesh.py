"""``f3rm-ext eval mesh``: how well a mesh fits the true surface."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.scripts.common import OutArg, check_crop, check_suffix, require_own_file, write_json
from f3rm_ext.utils.console import console, image_progress, say
from f3rm_ext.utils.ranges import Positive, Range, check_ranges

if TYPE_CHECKING:
    import numpy as np

    from f3rm_ext.mesh.metrics import Comparison, SurfaceMetrics
    from f3rm_ext.mesh.protocols import Surface

COMMAND = "f3rm-ext eval mesh"
Coordinate = Annotated[float, Range(-1e12)]
Vector = tuple[Coordinate, Coordinate, Coordinate]
_SHARES = (0.005, 0.01, 0.02)
"""Default thresholds, shares of the diagonal of the truth's box."""


@dataclass
class EvalMesh:
    """Measures how well a mesh fits the true surface: accuracy, completeness, chamfer, F-scores, normal consistency.

    Accuracy is the mean distance from the mesh to the truth, completeness the mean distance from the truth to the mesh,
    chamfer the mean of both. An F-score is the harmonic mean of the shares of both that are nearer than a threshold.
    Distances are in the units of the truth; the mesh must be in the same frame (`f3rm-ext export mesh` writes that of
    the capture). Nothing is aligned unless --icp says so.

    Protocols: plain takes points spread evenly over both surfaces. dtu takes points 0.2 mm apart, within DTU's masks,
    and leaves out distances of 20 mm and more. tanks-and-temples crops both to the scene's polygon and takes one point
    per voxel of half the threshold. Figures of different protocols cannot be compared.

    Typical calls:
      f3rm-ext eval mesh room.ply --truth room/gt_mesh.ply --seen-from room
      f3rm-ext eval mesh objects.obj --truth gt_mesh.npz --thresholds 0.005 --crop-min -0.5 -0.5 0.004
      f3rm-ext eval mesh scan24.ply --truth stl024_total.ply --protocol dtu --observation-mask ObsMask24_10.mat \\
        --ground-plane Plane24.mat
      f3rm-ext eval mesh barn.ply --truth Barn.ply --protocol tanks-and-temples --crop Barn.json --thresholds 0.01 \\
        --transform Barn_trans.txt
    """

    mesh: tyro.conf.Positional[Path]
    """Mesh to measure (.ply, .obj, .glb, .stl), or points (.ply)."""
    truth: Path
    """The true surface: a mesh, or points with or without normals (.ply, .npz …). NPZ files hold vertices and faces,
    or points."""
    protocol: Literal["plain", "dtu", "tanks-and-temples"] = "plain"
    """Convention of the comparison."""
    thresholds: tuple[Positive, ...] = ()
    """Distances for the F-score, units of the truth, above 0. By default 0.5, 1 and 2 % of the diagonal of the truth's
    box, and 1 and 2 mm for dtu. tanks-and-temples needs the scene's own."""
    points: Annotated[int, Range(1, 100_000_000)] = 500_000
    """Points on each mesh in the plain protocol, 1 to 100 million."""
    crop: Path | None = None
    """Polygon (.json of Open3D) outside which neither surface counts."""
    crop_min: Vector | None = None
    """Lowest x, y and z that count."""
    crop_max: Vector | None = None
    """Highest x, y and z that count."""
    seen_from: Path | None = None
    """Capture of which at least two training cameras must see a part of the truth for it to count in completeness. The
    truth must be a mesh, in the frame of the capture."""
    observation_mask: Path | None = None
    """DTU's ObsMask*.mat."""
    ground_plane: Path | None = None
    """DTU's Plane*.mat."""
    transform: Path | None = None
    """Text file with a 4 × 4 matrix that brings the mesh to the frame of the truth."""
    icp: bool = False
    """Align the mesh to the truth first, by a rigid motion. Figures are then better than those of others without."""
    out: Annotated[Path | None, OutArg] = None
    """JSON file for the metrics; by default none is written."""

    def __post_init__(self) -> None:
        check_ranges(self)
        check_crop(self.crop_min, self.crop_max)
        if self.protocol == "dtu" and self.observation_mask is None:
            raise ConfigError("The protocol dtu counts what the scanner saw: give DTU's --observation-mask.")
        if self.protocol != "dtu" and (self.observation_mask or self.ground_plane):
            raise ConfigError("--observation-mask and --ground-plane belong to DTU: add --protocol dtu.")
        if self.protocol == "tanks-and-temples" and not self.thresholds:
            from f3rm_ext.mesh.protocols import TANKS_THRESHOLDS

            known = ", ".join(f"{name} {value:g}" for name, value in TANKS_THRESHOLDS.items())
            raise ConfigError(f"Each scene of Tanks and Temples has its own threshold: give --thresholds ({known}).")
        check_suffix(self.out, ".json")

    def main(self) -> int:
        from f3rm_ext.mesh.mesh_files import read_surface
        from f3rm_ext.mesh.metrics import compare

        if self.out is not None:
            require_own_file(self.out, COMMAND)
        surface, truth = read_surface(self.mesh), read_surface(self.truth)
        thresholds = self.thresholds or self._default_thresholds(truth)
        surface, transform = self._align(surface, truth, thresholds)
        comparison = self._comparison(surface, truth, thresholds)
        with image_progress("points") as progress:
            task = progress.add_task("Distances", total=len(comparison.surface) + len(comparison.truth))
            metrics = compare(comparison, thresholds, lambda done: progress.update(task, completed=done))
        record = {
            "made_by": COMMAND,
            "mesh": str(self.mesh.resolve()),
            "truth": str(self.truth.resolve()),
            "protocol": self.protocol,
            "seen_from": None if self.seen_from is None else str(self.seen_from.resolve()),
            "crop": None if self.crop is None else str(self.crop.resolve()),
            "crop_min": self.crop_min,
            "crop_max": self.crop_max,
            "icp": self.icp,
            "transform": None if transform is None else transform.tolist(),
            **metrics.record(),
        }
        console().print(self._table(metrics))
        if self.out is not None:
            write_json(self.out, record)
            say(f"Metrics are in {self.out}.")
        return 0

    def _default_thresholds(self, truth: "Surface") -> tuple[float, ...]:
        import numpy as np

        from f3rm_ext.mesh.mesh_files import SurfacePoints

        if self.protocol == "dtu":
            return (1.0, 2.0)
        places = truth.positions if isinstance(truth, SurfacePoints) else np.asarray(truth.vertices)
        return tuple(share * float(np.linalg.norm(np.ptp(places, axis=0))) for share in _SHARES)

    def _align(
        self, surface: "Surface", truth: "Surface", thresholds: tuple[float, ...]
    ) -> "tuple[Surface, np.ndarray | None]":
        import numpy as np

        from f3rm_ext.mesh.protocols import icp_transform, plain_comparison, transform_surface

        transform = None
        if self.transform is not None:
            try:
                transform = np.loadtxt(self.transform)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.transform} cannot be read ({error}): give a text file of numbers.") from error
            if transform.shape != (4, 4):
                raise ConfigError(f"{self.transform} holds no 4 × 4 matrix: write it as four lines of four numbers.")
            surface = transform_surface(surface, transform)
        if self.icp:
            points = plain_comparison(surface, truth, min(self.points, 200_000))
            motion = icp_transform(points.surface, points.truth, 5 * max(thresholds))
            transform = motion if transform is None else motion @ transform
            surface = transform_surface(surface, motion)
        return surface, transform

    def _comparison(self, surface: "Surface", truth: "Surface", thresholds: tuple[float, ...]) -> "Comparison":
        import trimesh

        from f3rm_ext.mesh import protocols
        from f3rm_ext.mesh.mesh_files import box_mask

        if self.protocol == "dtu":
            assert self.observation_mask is not None
            masks = protocols.DtuMasks.read(self.observation_mask, self.ground_plane)
            comparison = protocols.dtu_comparison(surface, truth, masks)
        elif self.protocol == "tanks-and-temples":
            comparison = protocols.tanks_comparison(surface, truth, self.crop, min(thresholds))
        else:
            comparison = protocols.plain_comparison(surface, truth, self.points, self.crop_min, self.crop_max)
        comparison = comparison.restrict(
            *(box_mask(part.positions, self.crop_min, self.crop_max) for part in (comparison.surface, comparison.truth))
        )
        if self.crop is not None and self.protocol != "tanks-and-temples":
            comparison = comparison.restrict(
                protocols.volume_mask(comparison.surface, self.crop),
                protocols.volume_mask(comparison.truth, self.crop),
            )
        if self.seen_from is not None:
            if not isinstance(truth, trimesh.Trimesh):
                raise ConfigError(
                    f"{self.truth} has points only, and what hides them is not known: give a mesh, or leave "
                    "--seen-from out."
                )
            with image_progress("views") as progress:
                task = progress.add_task("Visible truth", total=None)
                seen = protocols.visible_points(
                    comparison.truth.positions,
                    truth,
                    self.seen_from,
                    lambda done: progress.update(task, completed=done),
                )
            comparison = comparison.restrict(truth=seen)
        return comparison

    def _table(self, metrics: "SurfaceMetrics") -> Any:
        from rich.table import Table

        table = Table(title=f"{self.mesh.name} against {self.truth.name} ({self.protocol})")
        table.add_column("metric")
        table.add_column("value", justify="right")
        table.add_column("")
        rows: list[tuple[str, float | None, str]] = [
            ("accuracy", metrics.accuracy, f"mean, mesh to truth (median {metrics.accuracy_median:.4g})"),
            ("completeness", metrics.completeness, f"mean, truth to mesh (median {metrics.completeness_median:.4g})"),
            ("chamfer", metrics.chamfer, "mean of the two"),
        ]
        rows += [
            (f"F-score at {s.threshold:.4g}", s.f_score, f"precision {s.precision:.3f}, recall {s.recall:.3f}")
            for s in metrics.scores
        ]
        rows.append(("normal consistency", metrics.normal_consistency, "mean |cos| of both directions"))
        for name, value, note in rows:
            table.add_row(name, "-" if value is None else f"{value:.4g}", note)
        return table

"""``f3rm-ext export``: the scene as files that other programs read."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.options import QueryOptions

if TYPE_CHECKING:
    from f3rm_ext.capture.frame import CaptureFrame
    from f3rm_ext.export.features import ColoredHead
    from f3rm_ext.query.queryable import QueryHead

COMMAND = "export features"
Vector = tuple[float, float, float]


@dataclass(kw_only=True)
class Features(QueryOptions):
    """Writes a point cloud of the scene with its features, and with the scores of queries if any are given.

    The points lie on the surfaces that the training cameras see; features are those of the field at the points. The
    PLY file has x y z, nx ny nz (normals), red green blue, pca_red pca_green pca_blue (features as colours),
    accumulation, density, and for each query relevancy_NAME (or cosine_NAME), with several also label, the number of
    the query that claims the point (-1: none). An NPZ file of the same name has all that as arrays, and the features
    as float16. Both say which checkpoint and queries they come from.

    Typical calls:
      f3rm-ext export features --load-config .../config.yml --out room.ply
      f3rm-ext export features --load-config .../config.yml --out mug.ply --text "blue mug" --select
      f3rm-ext export features --load-config .../config.yml --out table.ply --crop-min -1 -1 0 --crop-max 1 1 0.5
    """

    out: Path
    """File to write, .ply; the features go to the .npz beside it."""
    points: int = 200_000
    """Number of points, at most, 1 or more."""
    accumulation: float = 0.8
    """Least opacity of the ray a point was seen along, 0 to 1."""
    density: float = 0.0
    """Least density at a point, per scene unit; 0 takes all."""
    depth: Literal["median", "expected"] = "median"
    """Where along a ray its point lies: median is sharp at edges, expected smoother on walls."""
    crop_min: Vector | None = None
    """Least x, y and z of the points, in the frame of --frame."""
    crop_max: Vector | None = None
    """Greatest x, y and z of the points, in the frame of --frame."""
    voxel: float = 0.0
    """Keep one point in each cube of this side, in units of --frame; 0 keeps all."""
    frame: Literal["capture", "scene"] = "capture"
    """capture: coordinates and units of transforms.json. scene: those of the model, cameras within about ±1."""
    select: bool = False
    """Take only points where some query scores at least --threshold."""
    space: Literal["distilled", "full", "none"] = "distilled"
    """Features in the NPZ file: as they were distilled (PCA codes, where there are), in the extractor's full space, or
    none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out.suffix.lower() != ".ply":
            raise ConfigError(
                f"--out is {self.out}, but a point cloud is written as PLY: give a name that ends in .ply."
            )
        if self.points < 1:
            raise ConfigError(f"--points is {self.points}, but there has to be 1 at least.")
        if not 0 <= self.accumulation <= 1:
            raise ConfigError(f"--accumulation is {self.accumulation}, outside 0 to 1.")
        if not (self.density >= 0 and self.voxel >= 0):
            raise ConfigError("--density and --voxel have to be 0 (take all) or above.")
        if self.crop_min and self.crop_max and any(a >= b for a, b in zip(self.crop_min, self.crop_max, strict=True)):
            raise ConfigError("The crop box is empty: each of --crop-min has to be below that of --crop-max.")
        if self.select and not (self.text or self.exemplar or self.vector):
            raise ConfigError("--select takes what a query finds, and nothing is asked: give --text or --exemplar.")

    def main(self) -> int:
        """Exports. Returns the exit code."""
        from f3rm_ext.capture.frame import CaptureFrame
        from f3rm_ext.export.cloud import gather
        from f3rm_ext.export.features import FeatureCloud, write_features
        from f3rm_ext.export.normals import estimate_normals
        from f3rm_ext.query.parsing import build_queries
        from f3rm_ext.query.queryable import checked_head
        from f3rm_ext.query.run import load_run
        from f3rm_ext.query.writer import provenance
        from f3rm_ext.utils.console import console, image_progress
        from f3rm_ext.utils.output_file import require_ours

        for path in (self.out, self.out.with_suffix(".npz")):
            require_ours(path, f"f3rm-ext {COMMAND}")
        run = load_run(self.load_config)
        head = checked_head(run.model.query_heads(), self.feature)
        queries = build_queries(self, run)
        frame = CaptureFrame.of_outputs(run.manager.train_dataparser_outputs, run.data)
        with image_progress("points") as progress:
            task = progress.add_task("Points", total=self.points)
            cloud = gather(
                run.model,
                run.cameras("train"),
                self._options(frame),
                queries,
                lambda points: progress.update(task, completed=points),
            )
            progress.update(task, total=len(cloud))
            normals = estimate_normals(cloud.positions, cloud.seen_from)
            made = FeatureCloud(cloud, normals, frame if self.frame == "capture" else None, queries, self.threshold)
            task = progress.add_task("Features", total=len(cloud))
            npz = write_features(
                self.out,
                run.model,
                cast("ColoredHead", head),
                made,
                self._provenance(provenance(COMMAND, run, queries, self.threshold), head, frame),
                self.space,
                lambda points: progress.update(task, completed=points),
            )
        fewer = f" ({self.points} were asked for)" if len(cloud) < self.points else ""
        console().print(f"{len(cloud)} points{fewer} are in {self.out} and {npz}.", highlight=False, soft_wrap=True)
        return 0

    def _options(self, frame: "CaptureFrame") -> Any:
        import numpy as np

        from f3rm_ext.export.cloud import CloudOptions

        infinity = (np.inf,) * 3
        low, high = np.asarray(self.crop_min or [-x for x in infinity]), np.asarray(self.crop_max or infinity)

        def inside(points: np.ndarray) -> np.ndarray:
            at = points.astype(np.float64)
            at = frame.to_capture(at) if self.frame == "capture" else at
            return ((at >= low) & (at <= high)).all(axis=1)

        return CloudOptions(
            points=self.points,
            accumulation=self.accumulation,
            density=self.density,
            inside=inside if self.crop_min or self.crop_max else None,
            voxel=self.voxel * (frame.scale if self.frame == "capture" else 1.0),
            depth=self.depth,
            select=self.threshold if self.select else None,
        )

    def _provenance(self, record: dict[str, object], head: "QueryHead", frame: "CaptureFrame") -> dict[str, object]:
        return {
            **record,
            "feature": head.name,
            "extractor": head.extractor,
            "frame": self.frame,
            **frame.describe(),
            "accumulation": self.accumulation,
            "density": self.density,
            "crop_min": self.crop_min,
            "crop_max": self.crop_max,
            "voxel": self.voxel,
            "depth": self.depth,
            "selected": self.select,
            "space": self.space,
        }


@dataclass(kw_only=True)
class Splats:
    """Writes the Gaussians of a run of sugar-ext for other viewers and programs.

    Formats go by the names: .ply is that of 3D Gaussian splatting and exact, .compressed.ply is for SuperSplat and
    gsplat, .spz is Niantic's, .splat is for antimatter15's viewer and has no spherical harmonics. Coordinates are those
    of the scene (cameras within about ±1). The file says which checkpoint it is of and how to draw it: with
    SplatRenderMode: mip, anti-aliasing (gsplat's rasterize_mode antialiased) has to be on to see what was trained. A
    file that is there is replaced only if it says that it is one of ours.

    Typical calls:
      f3rm-ext export splats --load-config .../config.yml --out room.ply
      f3rm-ext export splats --load-config .../config.yml --out room.spz
      f3rm-ext export splats --load-config .../config.yml --out room.compressed.ply
    """

    load_config: Path
    """config.yml of the run."""
    out: Annotated[Path, tyro.conf.arg(aliases=["--output"])]
    """File to write: .ply, .compressed.ply, .spz or .splat."""
    fused: bool = True
    """Put the 3D filter into sizes and opacities, so that viewers that know nothing of it show the right picture.
    Without, the file holds the Gaussians as they are optimised: to train on with --pipeline.model.start-from; elsewhere
    they look too thin."""
    bad_values: Literal["error", "drop"] = "error"
    """At values that are NaN or infinite: error stops, drop leaves those Gaussians out."""
    spz_axes: Literal["rub", "ply"] = "rub"
    """Axes in .spz files: rub (right, up, back) as the format demands, ply as in PLY files, which SuperSplat and other
    tools of PlayCanvas expect."""

    def main(self) -> int:
        """Exports. Returns the exit code."""
        from f3rm_ext.splat.export import export_run, load_splat_run
        from f3rm_ext.splat.files.formats import format_to_write, require_replaceable
        from f3rm_ext.utils.console import console

        kind = format_to_write(self.out)
        require_replaceable(self.out)
        run = load_splat_run(self.load_config)
        made = export_run(run, self.out, self.fused, self.bad_values, self.spz_axes)
        lines = list(made.notices)
        if run.model.config.mip.filter_3d and not self.fused:
            lines.append("The 3D filter is not in the file, so other viewers show another picture than this run.")
        if kind == "splat" and made.render_mode == "mip":
            lines.append("The format cannot record that the splats need anti-aliasing (SplatRenderMode: mip).")
        size_mib = self.out.stat().st_size / 2**20
        lines.append(f"{made.count} Gaussians (SH degree {made.sh_degree}, {size_mib:.1f} MiB) are in {self.out}.")
        for line in lines:
            console().print(line, highlight=False, markup=False, soft_wrap=True)
        return 0


@dataclass(kw_only=True)
class Convert:
    """Writes the splats of a file in another format, and says what was lost.

    Formats go by the names: .ply is that of 3D Gaussian splatting and exact, .compressed.ply is for SuperSplat and
    gsplat, .spz is Niantic's, .splat is for antimatter15's viewer and has no spherical harmonics. All but the last keep
    render mode and origin of the splats. A file that is there is replaced only if it says that it is one of ours.

    Typical calls:
      f3rm-ext export convert scene.ply scene.spz
      f3rm-ext export convert scene.spz scene.ply
      f3rm-ext export convert scene.ply small.compressed.ply --sh-degree 1
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """File to read; its format is found from what is in it."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """File to write: .ply, .compressed.ply, .spz or .splat."""
    sh_degree: Literal[0, 1, 2, 3] | None = None
    """Lower the degree of the spherical harmonics to this; by default it stays, as far as the format can."""
    bad_values: Literal["error", "drop"] = "error"
    """At values that are NaN or infinite: error stops, drop leaves those Gaussians out. For drop an infinite opacity
    alone is no reason, it becomes a finite one that looks the same."""
    spz_axes: Literal["rub", "ply"] = "rub"
    """Axes in .spz files: rub (right, up, back) as the format demands, ply as in PLY files, which SuperSplat and other
    tools of PlayCanvas expect."""

    def main(self) -> int:
        """Converts. Returns the exit code."""
        from f3rm_ext.splat.files import convert_splats
        from f3rm_ext.utils.console import console

        made = convert_splats(self.source, self.out, self.sh_degree, self.bad_values, self.spz_axes)
        size_mib = self.out.stat().st_size / 2**20
        lines = [
            *made.source.notices,
            *made.result.notices,
            *(made.lost or ["Nothing was lost."]),
            f"{made.result.count} Gaussians (SH degree {made.result.sh_degree}, {size_mib:.1f} MiB) are in {self.out}.",
        ]
        for line in lines:
            console().print(line, highlight=False, markup=False, soft_wrap=True)
        return 0


ExportCommand = Union[  # noqa: UP007 - tyro reads the annotations of a Union's members
    Annotated[Features, tyro.conf.subcommand("features")],
    Annotated[Splats, tyro.conf.subcommand("splats")],
    Annotated[Convert, tyro.conf.subcommand("convert")],
]

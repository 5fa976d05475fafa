"""``f3rm-ext export``: the scene as files that other programs read."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.options import Length, Share
from f3rm_ext.query.options import QueryInputs, QueryOptions, QuerySpec, parse_queries
from f3rm_ext.scripts.common import (
    FrameOption,
    OutArg,
    SplatBudgetOptions,
    Vector,
    check_crop,
    check_suffix,
    require_own_file,
)
from f3rm_ext.scripts.export_mesh import Mesh, RefinedMesh
from f3rm_ext.scripts.export_page import Page
from f3rm_ext.scripts.export_part import Part
from f3rm_ext.scripts.export_texture import Texture
from f3rm_ext.utils.console import image_progress, say
from f3rm_ext.utils.ranges import Count, Range, check_ranges

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from f3rm_ext.capture.frame import CaptureFrame
    from f3rm_ext.export.cloud import CloudOptions
    from f3rm_ext.export.splats import SplatRun
    from f3rm_ext.query.queryable import QueryHead
    from f3rm_ext.splat.files import SplatInfo
    from f3rm_ext.splat.files.pruning import Choice
    from f3rm_ext.splat.files.scores import GaussianScores
    from f3rm_ext.splat.gaussians import Gaussians

COMMAND = "export features"


@dataclass(kw_only=True)
class Features(QueryOptions, FrameOption):
    """Writes a point cloud of the scene with its features, and with the scores of queries if any are given.

    The points lie on the surfaces that the training cameras see, and have the features of the field there. The PLY
    file has x y z, nx ny nz (normals), red green blue, pca_red pca_green pca_blue (features as colours), accumulation,
    density, and for each query relevancy_NAME or cosine_NAME; with several queries also label, the number of the query
    that fits best (-1: none). The NPZ file of the same name has the same as arrays, and the features as float16. Both
    name the checkpoint and the queries they come from.

    Typical calls:
      f3rm-ext export features --load-config .../config.yml --out room.ply
      f3rm-ext export features --load-config .../config.yml --out mug.ply --text "blue mug" --select
      f3rm-ext export features --load-config .../config.yml --out table.ply --crop-min -1 -1 0 --crop-max 1 1 0.5
    """

    out: Annotated[Path, OutArg]
    """The .ply file to write; the features go to the .npz file beside it."""
    points: Count = 200_000
    """Number of points at most, 1 or more."""
    accumulation: Share = 0.8
    """Lowest opacity along the ray that sees a point, 0 to 1."""
    density: Length = 0.0
    """Lowest density at a point, per scene unit; 0 takes all points."""
    depth: Literal["median", "expected"] = "median"
    """Where a point lies along its ray: the median depth is sharper at edges, the expected depth smoother on walls."""
    crop_min: Vector | None = None
    """Lowest x, y and z of the points, in the coordinates of --frame."""
    crop_max: Vector | None = None
    """Highest x, y and z of the points, in the coordinates of --frame."""
    voxel: Length = 0.0
    """Keep one point in each cube of this side, in units of --frame; 0 keeps all points."""
    select: bool = False
    """Take only points where a query reaches --threshold."""
    space: Literal["distilled", "full", "none"] = "distilled"
    """Features in the NPZ file: as they were distilled (PCA codes, if there are any), in the full space of the
    extractor, or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_suffix(self.out, ".ply")
        check_crop(self.crop_min, self.crop_max)
        if self.select and not (self.text or self.exemplar or self.vector):
            raise ConfigError(
                "--select takes what a query finds, but there is no query: give --text, --exemplar or --vector."
            )

    def main(self) -> int:
        from f3rm_ext.export.cloud import estimate_normals, gather_points
        from f3rm_ext.export.features import FeatureCloud, write_features
        from f3rm_ext.mesh.semantics.mesh_run import open_run_or_mesh
        from f3rm_ext.query.builders import encode_queries
        from f3rm_ext.query.queryable import get_head
        from f3rm_ext.query.writer import provenance

        for path in (self.out, self.out.with_suffix(".npz")):
            require_own_file(path, f"f3rm-ext {COMMAND}")
        run = open_run_or_mesh(self.load_config, self.mesh, self.data)
        head = get_head(run.model.query_heads(), self.feature)
        queries = encode_queries(parse_queries(self), run)
        frame = run.frame
        with image_progress("points") as progress:
            task = progress.add_task("Points", total=self.points)
            cloud = gather_points(
                run.model,
                run.cameras("train"),
                self._cloud_options(frame),
                queries,
                lambda points: progress.update(task, completed=points),
            )
            progress.update(task, total=len(cloud))
            normals = estimate_normals(cloud.positions, cloud.seen_from)
            feature_cloud = FeatureCloud(
                cloud, normals, frame if self.frame == "capture" else None, queries, self.threshold
            )
            task = progress.add_task("Features", total=len(cloud))
            npz = write_features(
                self.out,
                run.model,
                head,
                feature_cloud,
                self._provenance(provenance(COMMAND, run, queries, self.threshold), head, frame),
                self.space,
                lambda points: progress.update(task, completed=points),
            )
        fewer = f" (fewer than the {self.points} of --points)" if len(cloud) < self.points else ""
        say(f"{len(cloud)} points{fewer} are in {self.out} and {npz}.")
        return 0

    def _cloud_options(self, frame: "CaptureFrame") -> "CloudOptions":
        import numpy as np

        from f3rm_ext.export.cloud import CloudOptions
        from f3rm_ext.mesh.mesh_files import box_mask

        def inside(points: np.ndarray) -> np.ndarray:
            places = points.astype(np.float64)
            places = frame.to_capture(places) if self.frame == "capture" else places
            return box_mask(places, self.crop_min, self.crop_max)

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
class SpzOptions:
    """Options of files in .spz."""

    spz_axes: Literal["rub", "ply"] = "rub"
    """Axes in .spz files: rub (right, up, back), as the format demands, or ply, as in PLY files, which some programs
    expect, such as version 3 of PlayCanvas' splat-transform."""
    spz_version: Literal[3, 4] = 3
    """Version of .spz to write: 3, which every reader of .spz knows, or 4, which is smaller, but which viewers without
    zstd, such as Spark, do not open."""


@dataclass(kw_only=True)
class Splats(SplatBudgetOptions, QueryInputs, SpzOptions):
    """Writes the Gaussians of a run of sugar-ext for other viewers and programs.

    The name of the file chooses its format: .ply is the exact format of 3D Gaussian splatting, .compressed.ply is for
    SuperSplat and gsplat, .spz is Niantic's, .sog is PlayCanvas', .splat is for antimatter15's viewer and has no
    spherical harmonics, .glb is glTF with KHR_gaussian_splatting (y up), .usda is OpenUSD with
    ParticleField3DGaussianSplat. Coordinates are those of the scene (cameras within about ±1). The file names its
    checkpoint and says how to render it: where it says SplatRenderMode: mip, viewers show what was trained only with
    anti-aliasing (gsplat's rasterize_mode antialiased). Queries, if you give any, put their scores on the Gaussians,
    and a label: the number of the query that fits best (-1: none). .ply has them as columns, .glb and .usda as
    attributes; beside other formats there is NAME.queries.npz. What `f3rm-ext splats confidence` has measured goes into
    these three formats as score_confidence. Queries need a feature on the Gaussians, which
    `f3rm-ext features lift` adds to a finished run. An existing file is replaced only if this program wrote it.

    Typical calls:
      f3rm-ext export splats --load-config .../config.yml --out room.ply
      f3rm-ext export splats --load-config .../config.yml --out room.spz
      f3rm-ext export splats --load-config .../config.yml --out room.ply --text "blue mug" plant
      f3rm-ext export splats --load-config .../config.yml --out room.compressed.ply
      f3rm-ext export splats --load-config .../config.yml --out room.spz --max-mb 5
    """

    load_config: Path
    """config.yml of the run."""
    out: Annotated[Path, OutArg]
    """File to write: .ply, .compressed.ply, .spz, .sog, .splat, .glb or .usda."""
    fused: bool = True
    """Put the 3D filter into sizes and opacities, so that other viewers show the right picture. Without it, the file
    holds the Gaussians as they are optimised: right for training on with --pipeline.model.start-from, too thin in
    viewers."""
    bad_values: Literal["error", "drop"] = "error"
    """What to do about values that are NaN or infinite: error stops, drop leaves those Gaussians out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_budget()

    def main(self) -> int:
        from f3rm_ext.export.splats import export_run, load_splat_run
        from f3rm_ext.splat.files.formats import SCORED, format_to_write, require_replaceable
        from f3rm_ext.splat.files.pruning import export_size

        kind = format_to_write(self.out, self.spz_version)
        queries = parse_queries(self)
        require_replaceable(self.out, bool(queries))
        run = load_splat_run(self.load_config)
        scores = self._scores(run, queries) if queries else None
        if run.model.confidence is not None and kind in SCORED:
            scores = _add_confidence(scores, run.model.confidence)
        splats = run.splats(self.fused)
        if self.sh_degree is not None:
            splats = splats.to_sh_degree(min(self.sh_degree, splats.sh_degree))

        def write(splats: "Gaussians", out: Path, scores: "GaussianScores | None" = None) -> "SplatInfo":
            options = (self.fused, self.bad_values, self.spz_axes, self.spz_version)
            return export_run(run, out, *options, scores, splats)

        def size(rows: "Int[Tensor, ' kept']", degree: int) -> int:
            part = None if scores is None else scores.take(rows)
            return export_size(
                splats[rows].to_sh_degree(degree), self.out, lambda splats, out: write(splats, out, part)
            )

        kept = self.reduce(run, size, self.out, self.bad_values)
        if kept is None:
            made = write(splats, self.out, scores)
        else:
            made = write(kept.apply(splats), self.out, None if scores is None else scores.take(kept.rows))
        lines = list(made.notices)
        if run.model.config.mip.filter_3d and not self.fused:
            lines.append("The 3D filter is not in the file, so other viewers show a different picture from this run.")
        if kind == "splat" and made.render_mode == "mip":
            lines.append("The format cannot record that the splats need anti-aliasing (SplatRenderMode: mip).")
        size_mib = self.out.stat().st_size / 2**20
        lines.append(f"{made.count} Gaussians (SH degree {made.sh_degree}, {size_mib:.1f} MiB) are in {self.out}.")
        say(*lines)
        return 0

    def _scores(self, run: "SplatRun", queries: list[QuerySpec]) -> "GaussianScores":
        from f3rm_ext.export.questions import score_gaussians
        from f3rm_ext.query.builders import encode_queries
        from f3rm_ext.splat.files.scores import GaussianScores

        encoded = encode_queries(queries, run)
        return GaussianScores.of_queries(
            {query.name: score_gaussians(run.model, query) for query in encoded}, self.threshold
        )


def _add_confidence(scores: "GaussianScores | None", confidence: "Tensor") -> "GaussianScores":
    import numpy as np

    from f3rm_ext.query.relevancy import OTHER
    from f3rm_ext.splat.files.scores import GaussianScores

    count = len(confidence)
    scores = scores or GaussianScores((), np.empty((count, 0), np.float32), np.full(count, OTHER, np.int32))
    return scores.add("confidence", confidence.float().cpu().numpy())


@dataclass(kw_only=True)
class Convert(SpzOptions):
    """Writes the splats of a file in another format, and says what was lost.

    The name of the file chooses its format: .ply is the exact format of 3D Gaussian splatting, .compressed.ply is for
    SuperSplat and gsplat, .spz is Niantic's, .sog is PlayCanvas', .splat is for antimatter15's viewer and has no
    spherical harmonics, .glb is glTF with KHR_gaussian_splatting (y up), .usda is OpenUSD; the last two cannot be
    read. All but .splat keep the render mode and the origin of the splats. Scores of queries go along, see
    `f3rm-ext export splats --help`. An existing file is replaced only if this program wrote it.

    Typical calls:
      f3rm-ext export convert scene.ply scene.spz
      f3rm-ext export convert scene.spz scene.ply
      f3rm-ext export convert scene.ply small.compressed.ply --sh-degree 1
      f3rm-ext export convert scene.ply small.spz --max-mb 5
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """File to read: any of the formats below, .ksplat, or the meta.json of an unbundled SOG. Its content tells its
    format."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """File to write: .ply, .compressed.ply, .spz, .sog, .splat, .glb or .usda."""
    sh_degree: Literal[0, 1, 2, 3] | None = None
    """Lower the spherical harmonics to this degree; by default the degree stays, as far as the format allows."""
    max_mb: Annotated[float | None, Range(0.001)] = None
    """Largest size of the file, MB, 0.001 or more: leaves out the Gaussians that are smallest and most transparent.
    `f3rm-ext export splats` prunes by what the training views of a run see, which keeps more of the picture."""
    max_loss_db: float | None = None
    """An option of `f3rm-ext export splats` only, whose run has photos to measure a loss on."""
    bad_values: Literal["error", "drop"] = "error"
    """What to do about values that are NaN or infinite: error stops, drop leaves those Gaussians out. With drop, a
    Gaussian whose opacity alone is infinite stays, with a finite opacity that looks the same."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.max_loss_db is not None:
            raise ConfigError(
                "A file has no photos to measure --max-loss-db on: give the run to `f3rm-ext export splats "
                "--load-config .../config.yml --max-loss-db`, or a --max-mb."
            )

    def main(self) -> int:
        from f3rm_ext.splat.files import convert_splats

        made = convert_splats(
            self.source, self.out, self.sh_degree, self.bad_values, self.spz_axes, self.spz_version, self.max_mb
        )
        size_mib = self.out.stat().st_size / 2**20
        lines = [
            *made.source.notices,
            *([] if made.choice is None else [_tell_choice(made.choice)]),
            *made.result.notices,
            *(made.lost or ["Nothing was lost."]),
            f"{made.result.count} Gaussians (SH degree {made.result.sh_degree}, {size_mib:.1f} MiB) are in {self.out}.",
        ]
        say(*lines)
        return 0


def _tell_choice(choice: "Choice") -> str:
    if len(choice.rows) == choice.total:
        return f"{choice}."
    return (
        f"{choice}: the largest and most opaque ones. `f3rm-ext export splats --load-config .../config.yml --max-mb` "
        "prunes by what the views of a run see, which keeps more of the picture."
    )


ExportCommand = Features | Splats | Convert | Page | Mesh | Texture | RefinedMesh | Part

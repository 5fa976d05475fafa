"""``f3rm-ext export mesh`` and ``refined-mesh``: a triangle mesh of the scene."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.mesh.options import ExtractionOptions
from f3rm_ext.scripts.common import FrameOption, MeshOutput, Vector, check_crop, measured_cost
from f3rm_ext.utils.console import image_progress, note, show_stages
from f3rm_ext.utils.ranges import Positive, Range, check_ranges

if TYPE_CHECKING:
    import trimesh

    from f3rm_ext.mesh.scenes import SurfaceScene

COMMAND, REFINED_COMMAND = "f3rm-ext export mesh", "f3rm-ext export refined-mesh"


@dataclass(kw_only=True)
class Mesh(FrameOption, MeshOutput):
    """Writes a triangle mesh of the scene with colours at its vertices.

    tsdf renders depth from the training cameras, keeps the pixels on which several views agree, and fuses them; it
    works for fields and splats. level-set is SuGaR's method: points where the density of the Gaussians rises to a
    level, joined by Poisson reconstruction; for splats, slower. poisson-centres joins the centres of the Gaussians, as
    a baseline.

    The name of the file chooses its format: .ply, .obj or .glb. An existing file is replaced only if this command wrote
    it. The file says in which frame it is and which axis points up.

    Typical calls:
      f3rm-ext export mesh --load-config .../config.yml --out room.ply
      f3rm-ext export mesh --load-config .../config.yml --out room.glb --vertices 200000
      f3rm-ext export mesh --load-config .../config.yml --out room.obj --method level-set --level 0.3
      f3rm-ext export mesh --splats point_cloud.ply --data garden --out garden.ply
    """

    load_config: Path | None = None
    """config.yml of a run of f3rm-ext or sugar-ext."""
    splats: Path | None = None
    """Splats in a file instead of a run: .ply, .spz, .sog, .splat, SuGaR's .pt, or a folder of 3DGS or SuGaR; with
    --data."""
    data: Path | None = None
    """Capture of the splats (transforms.json or COLMAP's sparse/0); its training cameras are used."""
    splats_frame: Literal["auto", "scene", "capture"] = "auto"
    """Frame of the splats: scene, as `f3rm-ext export splats` writes them, or capture, as 3DGS and SuGaR do. auto takes
    capture for folders and SuGaR's files, else scene."""
    depth: Literal["auto", "median", "mean", "planes"] = "auto"
    """Where the surface is along a ray, tsdf and level-set: where half of the weight is reached, at the mean of all
    weights, or on the planes of the Gaussians at which the ray stops. auto takes planes for runs of planar, else
    median."""
    stereo_width: Annotated[int, Range(0)] = 0
    """Width of the photos whose stereo replaces rendered depth where it is sure, pixels, 32 or more; tsdf. 320 is a
    good value: about 3 s per photo. 0 takes rendered depth alone."""
    resolution_scale: Positive = 1.0
    """Factor on the width and height of the rendered views, above 0; tsdf and level-set."""
    extraction: Annotated[ExtractionOptions, tyro.conf.arg(name="")] = field(default_factory=ExtractionOptions)
    """Options of the algorithm that finds the surface."""
    crop_min: Vector | None = None
    """Lowest x, y and z of the mesh, in the coordinates of --frame."""
    crop_max: Vector | None = None
    """Highest x, y and z of the mesh, in the coordinates of --frame."""

    def __post_init__(self) -> None:
        if (self.load_config is None) == (self.splats is None):
            raise ConfigError("A mesh is made of a run or of splats in a file: give either --load-config or --splats.")
        if self.splats is not None and self.data is None:
            raise ConfigError("Splats in a file come without cameras: add their capture with --data.")
        if self.splats is None and self.data is not None:
            raise ConfigError("--data belongs to --splats: a run knows its capture, so leave it out.")
        check_ranges(self)
        if 0 < self.stereo_width < 32:
            raise ConfigError(f"--stereo-width is {self.stereo_width}: give 0, or 32 or more.")
        if self.stereo_width and self.extraction.method != "tsdf":
            raise ConfigError(
                f"--stereo-width only works with --method tsdf, but --method is {self.extraction.method}: leave one of "
                "them out."
            )
        check_crop(self.crop_min, self.crop_max)

    def main(self) -> int:
        from f3rm_ext.mesh.extraction import extract_mesh
        from f3rm_ext.mesh.mesh_files import require_output
        from f3rm_ext.utils.open3d_library import open3d

        require_output(self.out)
        open3d()  # before minutes of rendering
        scene = self._open()
        unit = scene.frame.scale if self.frame == "capture" else 1.0
        lengths = {name: getattr(self.extraction, name) * unit for name in ("voxel", "close_holes")}
        options = replace(self.extraction, **lengths)
        with measured_cost() as cost, image_progress("steps") as progress:
            extraction = extract_mesh(scene, options, show_stages(progress))
        mesh = self._in_frame(extraction.mesh, scene)
        record = {
            "made_by": COMMAND,
            **scene.origin,
            **asdict(options),
            **extraction.facts,
            "frame": self.frame,
            **scene.frame.describe(),
            "crop_min": self.crop_min,
            "crop_max": self.crop_max,
            **cost,
        }
        self.write(mesh, f"{len(mesh.vertices)} vertices and {len(mesh.faces)} triangles", record)
        wider = extraction.facts.get("voxel_pixels")
        if not options.voxel and isinstance(wider, float) and wider > 1:
            note(
                f"Voxels are {wider:.1f} times as wide as pixels, so that there are not many more than a million "
                "vertices; --voxel sets their width."
            )
        if options.vertices and len(mesh.vertices) < 0.98 * options.vertices:
            note(f"The surface has fewer vertices than the {options.vertices} of --vertices.")
        return 0

    def _open(self) -> "SurfaceScene":
        from f3rm_ext.compat import default_device_type
        from f3rm_ext.mesh.scenes import open_splat_scene, run_scene
        from f3rm_ext.query.run import load_run

        depth = None if self.depth == "auto" else self.depth
        if self.load_config is not None:
            return run_scene(load_run(self.load_config), self.resolution_scale, depth, self.stereo_width)
        assert self.splats is not None and self.data is not None
        return open_splat_scene(
            self.splats,
            self.data,
            self.splats_frame,
            self.resolution_scale,
            depth,
            default_device_type(),
            self.stereo_width,
        )

    def _in_frame(self, mesh: "trimesh.Trimesh", scene: "SurfaceScene") -> "trimesh.Trimesh":
        """Brings a mesh of the scene frame to that of the file, and crops it."""
        import numpy as np

        from f3rm_ext.mesh.cleaning import select_faces
        from f3rm_ext.mesh.mesh_files import box_mask

        if self.frame == "capture":
            mesh = mesh.copy()
            mesh.vertices = scene.frame.to_capture(np.asarray(mesh.vertices))
        inside = box_mask(np.asarray(mesh.vertices), self.crop_min, self.crop_max)
        mesh = select_faces(mesh, inside[mesh.faces].all(axis=1))
        if not len(mesh.faces):
            raise MeshError(
                f"No triangle lies in the crop box: choose it in the coordinates of the {self.frame}, or leave it out."
            )
        return mesh


@dataclass(kw_only=True)
class RefinedMesh(FrameOption, MeshOutput):
    """Writes the mesh of a run of sugar-ext-refine, with the colours of the Gaussians at its vertices.

    The name of the file chooses its format: .ply, .obj or .glb. An existing file is replaced only if a command of
    f3rm-ext wrote it. The file says in which frame it is and which axis points up.

    Typical calls:
      f3rm-ext export refined-mesh --load-config .../config.yml --out room.ply
      f3rm-ext export refined-mesh --load-config .../config.yml --out room.glb
    """

    load_config: Path
    """config.yml of the run."""

    def main(self) -> int:
        import numpy as np

        from f3rm_ext.export.splats import load_splat_run
        from f3rm_ext.mesh.bound.gaussians import refined_mesh
        from f3rm_ext.mesh.bound.model import BoundModel
        from f3rm_ext.mesh.mesh_files import require_output

        require_output(self.out)
        run = load_splat_run(self.load_config)
        if not isinstance(run.model, BoundModel):
            raise ConfigError(
                f"{self.load_config} is of the method {run.config.method_name}, which has no mesh: give a run of "
                "sugar-ext-refine, or make a mesh with `f3rm-ext export mesh`."
            )
        mesh = refined_mesh(run.model.bound)
        frame = run.frame
        if self.frame == "capture":
            mesh.vertices = frame.to_capture(np.asarray(mesh.vertices))
        record = {"made_by": REFINED_COMMAND, **run.describe(), "frame": self.frame, **frame.describe()}
        self.write(mesh, f"{len(mesh.vertices)} vertices and {len(mesh.faces)} triangles", record)
        return 0

"""``f3rm-ext export refined-mesh``: the mesh of a run of sugar-ext-refine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from f3rm_ext.errors import ConfigError

COMMAND = "f3rm-ext export refined-mesh"


@dataclass(kw_only=True)
class RefinedMesh:
    """Writes the mesh of a run of sugar-ext-refine, with the colours of the Gaussians at its vertices.

    The name of the file chooses its format: .ply, .obj or .glb. An existing file is replaced only if a command of
    f3rm-ext wrote it. The file says in which frame it is and which axis points up.

    Typical calls:
      f3rm-ext export refined-mesh --load-config .../config.yml --out room.ply
      f3rm-ext export refined-mesh --load-config .../config.yml --out room.glb
    """

    load_config: Path
    """config.yml of the run."""
    out: Path
    """File to write: .ply, .obj or .glb."""
    frame: Literal["capture", "scene"] = "capture"
    """Coordinates of the file: those of the capture, in the units of transforms.json, or those of the scene as the
    model sees it, with cameras within about ±1."""
    up: Literal["auto", "z", "y"] = "auto"
    """Axis of the file that takes the frame's z axis. auto is y for .glb, whose readers expect it, else z, which leaves
    the coordinates as they are."""

    def main(self) -> int:
        """Writes the mesh. Returns the exit code."""
        import numpy as np

        from f3rm_ext.capture.frame import CaptureFrame
        from f3rm_ext.export.splats import load_splat_run
        from f3rm_ext.mesh.bound.gaussians import refined_mesh
        from f3rm_ext.mesh.bound.model import BoundModel
        from f3rm_ext.mesh.mesh_files import axis_up, require_output, write_mesh
        from f3rm_ext.utils.console import console

        require_output(self.out)
        run = load_splat_run(self.load_config)
        if not isinstance(run.model, BoundModel):
            raise ConfigError(
                f"{self.load_config} is of the method {run.config.method_name}, which has no mesh: give a run of "
                "sugar-ext-refine, or make a mesh with `f3rm-ext export mesh`."
            )
        mesh = refined_mesh(run.model.bound)
        outputs = run.manager.train_dataparser_outputs
        frame = CaptureFrame.of_outputs(outputs, Path(run.manager.dataparser.config.data))
        if self.frame == "capture":
            mesh.vertices = frame.to_capture(np.asarray(mesh.vertices))
        up = axis_up(self.out, self.up)
        record = {"made_by": COMMAND, **run.describe(), "frame": self.frame, **frame.describe()}
        write_mesh(self.out, mesh, record, up)
        console().print(
            f"{len(mesh.vertices)} vertices and {len(mesh.faces)} triangles are in {self.out} (frame of the "
            f"{self.frame}, {up} up).",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 0

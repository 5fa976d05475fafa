"""``f3rm-ext export refined-mesh``: the mesh of a run of sugar-ext-refine."""

from dataclasses import dataclass
from pathlib import Path

from f3rm_ext.errors import ConfigError
from f3rm_ext.scripts.common import FrameOption, MeshOutput

COMMAND = "f3rm-ext export refined-mesh"


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
        """Writes the mesh. Returns the exit code."""
        import numpy as np

        from f3rm_ext.capture.frame import CaptureFrame
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
        outputs = run.manager.train_dataparser_outputs
        frame = CaptureFrame.of_outputs(outputs, Path(run.manager.dataparser.config.data))
        if self.frame == "capture":
            mesh.vertices = frame.to_capture(np.asarray(mesh.vertices))
        record = {"made_by": COMMAND, **run.describe(), "frame": self.frame, **frame.describe()}
        self.write(mesh, f"{len(mesh.vertices)} vertices and {len(mesh.faces)} triangles", record)
        return 0

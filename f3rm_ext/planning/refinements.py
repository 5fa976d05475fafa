"""What a refinement begins with: its mesh, divided where splats are dense, and the splats that are free of it."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.mesh.bound.start import read_start_mesh
from f3rm_ext.mesh.bound.subdivision import with_detail
from f3rm_ext.splat.start_from import read_start
from f3rm_ext.utils.console import messages_to_stderr


@dataclass(frozen=True)
class RefinementStart:
    """Sizes of what a refinement begins with."""

    vertices: int
    """Of the mesh, with those that dividing triangles adds."""
    triangles: int
    """Of the mesh, those that are divided counted as their parts."""
    free: int = 0
    """Gaussians that belong to no triangle."""

    @classmethod
    def of_options(cls, model: Any, data: Path, outputs: DataparserOutputs) -> "RefinementStart":
        """Counts what a run with splats to start from begins with, as the run itself does.

        Args:
            model: options of the refinement, with a mesh and splats.
            data: the capture.
            outputs: of its dataparser, for the training images.

        Raises:
            MeshError: the mesh cannot be read.
            UserError: the splats cannot be read.
        """
        with messages_to_stderr():
            splats = read_start(model.start_from, model.start_iteration).in_scene(outputs, model.start_frame)
            mesh = read_start_mesh(model.mesh, model.mesh_frame, lambda: CaptureFrame.of_outputs(outputs, data))
        centres = splats.gaussians.means.detach().float().cpu()
        cameras = outputs.cameras.camera_to_worlds[:, :3, 3].float()
        mesh, far = with_detail(mesh, centres, cameras, model.free_beyond, model.gaussians_per_triangle)
        return cls(len(mesh.vertices), len(mesh.faces), int(far.sum()))


@functools.cache
def plain_start(path: Path) -> RefinementStart:
    """Counts a mesh as it is, without splats to start from.

    Raises:
        MeshError: it cannot be read.
    """

    def unused() -> CaptureFrame:
        raise AssertionError("the numbers are the same in both frames")

    mesh = read_start_mesh(path, "scene", unused)
    return RefinementStart(len(mesh.vertices), len(mesh.faces))

"""``f3rm-ext export texture``: colours of a mesh from the photos of its capture."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.mesh.options import TextureOptions

if TYPE_CHECKING:
    import trimesh

    from f3rm_ext.mesh.texture.baking import BakedMesh
    from f3rm_ext.mesh.texture.photos import PhotoSource

COMMAND = "f3rm-ext export texture"
Frame = Literal["auto", "capture", "scene"]


@dataclass(kw_only=True)
class Texture:
    """Colours a mesh from the training photos of its capture, and writes it with a texture or with vertex colours.

    Each texel takes the mean of all photos that see it. Photos that see it sharply and frontally weigh most. Photos see
    nothing behind other parts of the mesh, and masked and transparent pixels count nowhere. Texels that no photo sees
    take the colour of the nearest ones that are seen; the command says how many there are.

    The name of the file chooses its format: .glb and .obj get a texture (.obj as .png and .mtl of the same name), .ply
    gets vertex colours. An existing file is replaced only if this program wrote it. Needs no GPU and no checkpoint.

    Typical calls:
      f3rm-ext export texture --load-config .../config.yml --mesh room.ply --output room.glb
      f3rm-ext export texture --data room --mesh room.ply --output textured.obj --texture-size 4096
      f3rm-ext export texture --data room --mesh room/gt_mesh.ply --output colored.ply
    """

    load_config: Path | None = None
    """config.yml of a run on the capture."""
    data: Path | None = None
    """The capture (transforms.json or COLMAP's sparse/0), instead of a run."""
    mesh: Path
    """The mesh: .ply, .obj, .glb, .stl, or .npz with vertices and faces."""
    out: Annotated[Path, tyro.conf.arg(aliases=["--output"])]
    """File to write: .glb, .obj or .ply."""
    texture: Annotated[TextureOptions, tyro.conf.arg(name="")] = field(default_factory=TextureOptions)
    """How to colour the mesh."""
    frame: Frame = "auto"
    """Coordinates of the mesh: those of the capture, or those of the scene as the model sees it. auto is what the mesh
    file says, else capture. The written file has the same."""
    up: Literal["auto", "z", "y"] = "auto"
    """Axis of the file that takes the frame's z axis. auto is y for .glb, whose readers expect it, else z, which leaves
    the coordinates as they are."""

    def __post_init__(self) -> None:
        if (self.load_config is None) == (self.data is None):
            raise ConfigError("The photos are those of a run or of a capture: give either --load-config or --data.")

    def main(self) -> int:
        """Colours and writes the mesh. Returns the exit code."""
        import torch

        from f3rm_ext.engine.cost import peak_mib, reset_peak
        from f3rm_ext.mesh.mesh_files import axis_up, read_mesh, write_mesh
        from f3rm_ext.mesh.texture.baking import bake_texture, bake_vertices
        from f3rm_ext.utils.console import console, image_progress, note, show_stages

        self._check_output()
        mesh = read_mesh(self.mesh)
        frame = frame_of(self.mesh, self.frame)
        photos = photo_source(self.load_config, self.data).photos("train", frame)
        bake = bake_vertices if self.out.suffix.lower() == ".ply" else bake_texture
        cpu = torch.device("cpu")
        reset_peak(cpu)
        began = time.perf_counter()
        with image_progress("steps") as progress:
            made = bake(mesh, photos, self.texture, show_stages(progress))
        up = axis_up(self.out, self.up)
        record = self._record(made, frame) | {
            "seconds": round(time.perf_counter() - began, 1),
            "peak_mib": round(peak_mib(cpu)),
        }
        self._name_material(made.mesh)
        write_mesh(self.out, made.mesh, record, up)
        size = made.facts.get("texture_px")
        kind = "vertices" if size is None else "texels"
        if made.unseen:
            note(
                f"No photo sees {made.unseen} of {made.places} {kind} ({made.unseen / made.places:.1%}): they have the "
                "colours of the nearest ones that are seen."
            )
        what = "vertex colours" if size is None else f"a texture of {size} × {size} in {made.facts['charts']} charts"
        console().print(
            f"{len(made.mesh.faces)} triangles with {what} are in {self.out} (frame of the {frame}, {up} up; "
            f"{record['seconds']} s, {record['peak_mib']} MiB).",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 0

    def _check_output(self) -> None:
        from f3rm_ext.mesh.mesh_files import require_format, require_replaceable
        from f3rm_ext.utils.output_file import require_writable

        require_format(self.out)
        if self.out.resolve() == self.mesh.resolve():
            raise MeshError(f"--out is the mesh itself, {self.mesh}: choose another name, so that both stay.")
        require_replaceable(self.out, textured=True)
        require_writable(self.out)

    def _name_material(self, mesh: "trimesh.Trimesh") -> None:
        from trimesh.visual.texture import TextureVisuals

        from f3rm_ext.mesh.mesh_files import texture_files

        if isinstance(mesh.visual, TextureVisuals):
            mesh.visual.material.name = texture_files(self.out)[1].stem

    def _record(self, made: "BakedMesh", frame: str) -> dict[str, object]:
        from f3rm_ext.mesh.mesh_files import read_provenance

        kept = {"scene_from_capture", "scene_units_per_capture_unit"}
        said = {key: value for key, value in read_provenance(self.mesh).items() if key in kept}
        return {
            "made_by": COMMAND,
            "mesh": str(self.mesh.resolve()),
            "capture": str((self.load_config or self.data or Path()).resolve()),
            **made.facts,
            "padding": self.texture.padding,
            "balance_exposure": self.texture.balance_exposure,
            "largest_gain": round(float(made.gains.max()), 4),
            "smallest_gain": round(float(made.gains.min()), 4),
            "places": made.places,
            "unseen": made.unseen,
            "frame": frame,
            **said,
        }


def photo_source(load_config: Path | None, data: Path | None) -> "PhotoSource":
    """Returns the photos of a run, or of a capture if there is no run."""
    from f3rm_ext.mesh.texture.photos import open_capture, open_run_capture

    if load_config is not None:
        return open_run_capture(load_config)
    assert data is not None
    return open_capture(data)


def frame_of(mesh: Path, frame: Frame) -> Literal["capture", "scene"]:
    """Returns the frame of a mesh file: the given one, or for auto what the file says, else capture."""
    from f3rm_ext.mesh.mesh_files import read_provenance

    if frame != "auto":
        return frame
    return "scene" if read_provenance(mesh).get("frame") == "scene" else "capture"

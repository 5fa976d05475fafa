"""``f3rm-ext export texture``: colours of a mesh from the photos of its capture."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from f3rm_ext.mesh.options import TextureOptions
from f3rm_ext.scripts.common import MeshOutput, MeshPhotos, measured_cost
from f3rm_ext.utils.console import image_progress, note, show_stages

if TYPE_CHECKING:
    from f3rm_ext.mesh.texture.baking import BakedMesh

COMMAND = "f3rm-ext export texture"


@dataclass(kw_only=True)
class Texture(MeshPhotos, MeshOutput):
    """Colours a mesh from the training photos of its capture, and writes it with a texture or with vertex colours.

    Each texel takes the mean of all photos that see it. Photos that see it sharply and frontally weigh most. Photos see
    nothing behind other parts of the mesh, and masked and transparent pixels count nowhere. Texels that no photo sees
    take the colour of the nearest ones that are seen; the command says how many there are.

    The name of the file chooses its format: .glb and .obj get a texture (.obj as .png and .mtl of the same name), .ply
    gets vertex colours. The file has the frame of the mesh. An existing file is replaced only if this program wrote it.
    Needs no GPU and no checkpoint.

    Typical calls:
      f3rm-ext export texture --load-config .../config.yml --mesh room.ply --output room.glb
      f3rm-ext export texture --data room --mesh room.ply --output textured.obj --texture-size 4096
      f3rm-ext export texture --data room --mesh room/gt_mesh.ply --output colored.ply
    """

    mesh: Path
    """The mesh: .ply, .obj, .glb, .stl, or .npz with vertices and faces."""
    texture: Annotated[TextureOptions, tyro.conf.arg(name="")] = field(default_factory=TextureOptions)
    """Options of the texture."""

    def main(self) -> int:
        from f3rm_ext.mesh.mesh_files import read_mesh, require_output
        from f3rm_ext.mesh.texture.baking import bake_texture, bake_vertices

        self.require_other(self.mesh)
        require_output(self.out, textured=True)
        mesh = read_mesh(self.mesh)
        photos = self.photo_source().photos("train", self.mesh, self.frame)
        bake = bake_vertices if self.out.suffix.lower() == ".ply" else bake_texture
        with measured_cost() as cost, image_progress("steps") as progress:
            made = bake(mesh, photos, self.texture, show_stages(progress))
        size = made.facts.get("texture_px")
        kind = "vertices" if size is None else "texels"
        if made.unseen:
            note(
                f"No photo sees {made.unseen} of {made.places} {kind} ({made.unseen / made.places:.1%}): they have the "
                "colours of the nearest ones that are seen."
            )
        what = "vertex colours" if size is None else f"a texture of {size} × {size} in {made.facts['charts']} charts"
        self.write(made.mesh, f"{len(made.mesh.faces)} triangles with {what}", self._record(made) | cost)
        return 0

    def _record(self, made: "BakedMesh") -> dict[str, object]:
        from f3rm_ext.mesh.mesh_files import find_frame, read_provenance

        kept = {"scene_from_capture", "scene_units_per_capture_unit"}
        transforms = {key: value for key, value in read_provenance(self.mesh).items() if key in kept}
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
            "frame": find_frame(self.mesh, self.frame),
            **transforms,
        }

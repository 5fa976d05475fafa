"""``f3rm-ext export part``: the part of a mesh that a query finds, as a mesh of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.options import Length, Share
from f3rm_ext.query.options import QueryInputs, parse_queries
from f3rm_ext.scripts.common import MeshOutput

if TYPE_CHECKING:
    import trimesh

COMMAND = "f3rm-ext export part"


@dataclass(kw_only=True)
class Part(QueryInputs, MeshOutput):
    """Cuts out the part of a mesh that a query finds, and writes it as a mesh of its own.

    The mesh has features (`f3rm-ext features lift-mesh`). It is cut where the score is --threshold; triangles there are
    split. With a code map (--code-map there), the cut is as fine as the texture. Texture and colours stay, and so do
    coordinates. The name of the file chooses its format: .ply, .obj or .glb; .ply has vertex colours instead of a
    texture. An existing file is replaced only if this program wrote it.

    Typical calls:
      f3rm-ext export part --mesh room.glb --text "blue mug" --out mug.glb
      f3rm-ext export part --mesh room.ply --text chair --negative floor wall --out chair.ply --close-holes 0.5
      f3rm-ext export part --mesh room.ply --exemplar 0001.jpg:250,300,80,80 --out found.obj
    """

    mesh: Path
    """The mesh, with features."""
    data: Path | None = None
    """Where the capture of the mesh is now, for --exemplar; by default where it was when features were lifted."""
    min_part: Share = 0.01
    """Drop connected parts with a smaller share of the found area, 0 to 1; 1 keeps only the largest."""
    close_holes: Length = 0.0
    """Close holes up to this radius in units of the mesh, also the one that the cut leaves; 0 closes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.text) + len(self.exemplar) + len(self.vector) != 1:
            raise ConfigError(
                "A part is what one query finds: give one --text, --exemplar or --vector; `mug | cup` finds either."
            )

    def main(self) -> int:
        from f3rm_ext.mesh.glb_file import texture_side_px
        from f3rm_ext.mesh.mesh_files import require_output, require_replaceable
        from f3rm_ext.mesh.semantics.cutting import clean_part, cut_at_level
        from f3rm_ext.mesh.semantics.mesh_run import open_mesh_run, read_featured_mesh
        from f3rm_ext.mesh.semantics.model import QueryableMesh
        from f3rm_ext.query.builders import encode_queries
        from f3rm_ext.query.run import Photos

        self.require_other(self.mesh)
        require_output(self.out)
        mesh, features = read_featured_mesh(self.mesh)
        require_replaceable(self.out, textured=texture_side_px(mesh) > 0)
        model = QueryableMesh(mesh, features.heads, features.maps)
        # Texts and vectors need no photos, so the capture may be gone.
        photos = open_mesh_run(self.mesh, self.data) if self.exemplar else Photos(model, None)  # type: ignore[arg-type]
        (query,) = encode_queries(parse_queries(self), photos)
        part = cut_at_level(*model.score(query), self.threshold)
        part = clean_part(part, self.min_part, self.close_holes)
        share = 100 * part.area / mesh.area
        if self.out.suffix.lower() == ".ply":
            _color_vertices(part)
        kept = ("frame", "scene_from_capture", "scene_units_per_capture_unit", "extractors")
        record = {
            "made_by": COMMAND,
            "mesh": str(self.mesh.resolve()),
            "query": query.describe(),
            "threshold": self.threshold,
            "min_part": self.min_part,
            "close_holes": self.close_holes,
            **{key: value for key, value in features.provenance.items() if key in kept},
        }
        self.write(part, f"{len(part.faces)} triangles with {share:.2g} % of the mesh's area", record)
        return 0


def _color_vertices(part: "trimesh.Trimesh") -> None:
    """Replaces a texture, which PLY files cannot hold, by vertex colours."""
    import numpy as np
    from trimesh.visual.color import ColorVisuals

    from f3rm_ext.mesh.texture.atlas import vertex_texels
    from f3rm_ext.mesh.texture.rendering import SurfaceColors, get_texture

    if get_texture(part) is not None:
        corners = vertex_texels(part)
        colors = SurfaceColors(part)(corners.faces, corners.weights)
        part.visual = ColorVisuals(part, vertex_colors=np.rint(colors).astype(np.uint8))

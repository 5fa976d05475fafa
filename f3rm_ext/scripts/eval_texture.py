"""``f3rm-ext eval texture``: how well pictures of a coloured mesh fit photos."""

import json
import math
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from f3rm_ext.scripts.common import MeshPhotos, OutArg, check_suffix, require_own_file, write_json
from f3rm_ext.utils.console import image_progress, say

COMMAND = "f3rm-ext eval texture"


@dataclass
class EvalTexture(MeshPhotos):
    """Renders a coloured mesh from the cameras of a capture and compares the pictures with its photos.

    The mesh is shown as it is, without shading: with its texture, or with its vertex colours. Pixels without mesh are
    black, so that holes cost PSNR; the PSNR of the pixels that the mesh covers, and their share, stand beside it.
    Masked pixels do not count.

    Typical calls:
      f3rm-ext eval texture room.glb --data room
      f3rm-ext eval texture room.glb --load-config .../config.yml --out scores.json --pictures pictures
    """

    mesh: tyro.conf.Positional[Path]
    """Mesh with a texture (.glb, .obj) or vertex colours (.ply, .glb, .obj)."""
    views: Literal["test", "train"] = "test"
    """Photos to compare with: the held-out ones, or those of training."""
    out: Annotated[Path | None, OutArg] = None
    """JSON file for the metrics; by default none is written."""
    pictures: Path | None = None
    """Folder for pictures: each rendering beside its photo. By default none are written."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_suffix(self.out, ".json")

    def main(self) -> int:
        import numpy as np

        from f3rm_ext.mesh.mesh_files import read_mesh
        from f3rm_ext.mesh.texture.rendering import MeshRenderer, score_photo
        from f3rm_ext.model_components.masks import grey_out_bytes
        from f3rm_ext.utils.output_file import require_writable, write_file
        from f3rm_ext.utils.output_folder import png_bytes
        from f3rm_ext.utils.provenance import require_ours

        if self.out is not None:
            require_own_file(self.out, COMMAND)
        if self.pictures is not None:
            require_writable(self.pictures / "any", "--pictures")
        renderer = MeshRenderer(read_mesh(self.mesh), str(self.mesh))
        photos = self.photo_source().photos(self.views, self.mesh, self.frame)
        sign, scores = {"made_by": COMMAND}, []
        pictures = [self.pictures / f"{self.views}-{index:04d}.png" for index in range(len(photos)) if self.pictures]
        for path in pictures:
            require_ours(path, COMMAND, "--pictures")
        with image_progress("views") as progress:
            task = progress.add_task("Views", total=len(photos))
            for index, camera in enumerate(photos.cameras):
                photo, made = photos.read(index), renderer.render(camera)
                scores.append(score_photo(made, photo))
                if pictures:
                    both = np.concatenate([np.rint(made.colors).astype(np.uint8), photo.colors], axis=1)
                    if photo.valid is not None:
                        both = grey_out_bytes(both, np.tile(photo.valid, 2))
                    write_file(pictures[index], png_bytes(both, json.dumps(sign)), "--pictures")
                progress.update(task, completed=index + 1)
        values = np.array([astuple(score) for score in scores])
        psnr, covered, coverage = (
            float(np.nanmean(column)) if np.isfinite(column).any() else math.nan for column in values.T
        )
        if self.out is not None:
            record = {
                **sign,
                "mesh": str(self.mesh.resolve()),
                "views": self.views,
                "psnr": psnr,
                "psnr_covered": covered,
                "coverage": coverage,
                "photos": [asdict(score) for score in scores],
            }
            write_json(self.out, record)
        say(
            f"PSNR of {len(scores)} photos ({self.views}): {psnr:.2f} dB; {covered:.2f} dB on the {coverage:.1%} of "
            "the pixels that the mesh covers."
        )
        return 0

"""``f3rm-ext eval texture``: how well pictures of a coloured mesh fit photos."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.scripts.export_texture import Frame, frame_of, photo_source


@dataclass
class EvalTexture:
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
    load_config: Path | None = None
    """config.yml of a run on the capture."""
    data: Path | None = None
    """The capture (transforms.json or COLMAP's sparse/0), instead of a run."""
    views: Literal["test", "train"] = "test"
    """Photos to compare with: the held-out ones, or those of training."""
    frame: Frame = "auto"
    """Coordinates of the mesh: those of the capture, or those of the scene as the model sees it. auto is what the mesh
    file says, else capture."""
    out: Path | None = None
    """JSON file for the metrics; by default none is written."""
    pictures: Path | None = None
    """Folder for pictures: each rendering beside its photo. By default none are written."""

    def __post_init__(self) -> None:
        if (self.load_config is None) == (self.data is None):
            raise ConfigError("The photos are those of a run or of a capture: give either --load-config or --data.")
        if self.out is not None and self.out.suffix.lower() != ".json":
            raise ConfigError(f"--out is {self.out}, but metrics are written as JSON: give a name that ends in .json.")

    def main(self) -> int:
        """Renders, compares, prints the means and writes the metrics. Returns the exit code."""
        import numpy as np

        from f3rm_ext.mesh.mesh_files import read_mesh
        from f3rm_ext.mesh.texture.rendering import MeshRenderer, score_photo
        from f3rm_ext.utils.console import console, image_progress
        from f3rm_ext.utils.output_file import replace_file, require_writable
        from f3rm_ext.utils.output_folder import png_bytes
        from f3rm_ext.utils.provenance import require_ours

        if self.out is not None:
            require_ours(self.out, "f3rm-ext eval texture")
            require_writable(self.out)
        if self.pictures is not None:
            require_writable(self.pictures / "any", "--pictures")
        renderer = MeshRenderer(read_mesh(self.mesh), str(self.mesh))
        photos = photo_source(self.load_config, self.data).photos(self.views, frame_of(self.mesh, self.frame))
        sign, scores = {"made_by": "f3rm-ext eval texture"}, []
        pictures = [self.pictures / f"{self.views}-{index:04d}.png" for index in range(len(photos)) if self.pictures]
        for path in pictures:
            require_ours(path, sign["made_by"], "--pictures")
        with image_progress("views") as progress:
            task = progress.add_task("Views", total=len(photos))
            for index, camera in enumerate(photos.cameras):
                photo, made = photos.read(index), renderer.render(camera)
                scores.append(score_photo(made, photo))
                if pictures:
                    both = np.concatenate([np.rint(made.colors).astype(np.uint8), photo.colors], axis=1)
                    with replace_file(pictures[index], "--pictures") as stream:
                        stream.write(png_bytes(both, json.dumps(sign)))
                progress.update(task, completed=index + 1)
        psnr, covered, coverage = (
            float(np.nanmean([getattr(score, name) for score in scores]))
            for name in ("psnr", "psnr_covered", "coverage")
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
            with replace_file(self.out) as stream:
                stream.write((json.dumps(record, indent=1) + "\n").encode())
        console().print(
            f"PSNR of {len(scores)} photos ({self.views}): {psnr:.2f} dB; {covered:.2f} dB on the {coverage:.1%} of "
            "the pixels that the mesh covers.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 0

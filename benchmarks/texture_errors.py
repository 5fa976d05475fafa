r"""Where pictures of a coloured mesh are wrong: in holes, at edges of objects, on wrong depth, or on right depth.

    python benchmarks/texture_errors.py --data room --meshes textured=room.glb colours=room.ply

Renders each mesh, textured or with colours at its vertices, from the held-out cameras of a capture with depth images,
as `f3rm-ext eval-texture` does. A pixel is in a *hole* where its ray meets no mesh; at an *edge* within three pixels of
where the true depth jumps by 5 %; on *wrong depth* where the mesh is off by more than 2 %. Rows are written to
results/texture_errors.json, which keeps those of other captures and meshes.
"""

import datetime
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy.ndimage import maximum_filter, minimum_filter

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.mesh.mesh_files import read_mesh
from f3rm_ext.mesh.texture.photos import open_capture
from f3rm_ext.mesh.texture.rendering import MeshRenderer, score_photo
from f3rm_ext.mesh.texture.visibility import Occluder

HERE = Path(__file__).parent
JUMP = 1.05
"""Ratio of neighbouring depths at an edge."""
NEAR_PX = 5
"""Side of the square around an edge."""
OFF = 0.02
"""Share of the depth from which on a mesh is wrong."""
FEW = 6
"""Objects named in a row."""


def edges(depth: np.ndarray) -> np.ndarray:
    """Pixels near jumps of a depth image."""
    return maximum_filter(maximum_filter(depth, 3) / np.maximum(minimum_filter(depth, 3), 1e-6) > JUMP, NEAR_PX)


@dataclass
class TextureErrors:
    """Divides the squared error of coloured meshes by place."""

    data: Path
    """A capture with transforms.json, held-out photos, and depth images."""
    meshes: tuple[str, ...]
    """Meshes as NAME=FILE, in the frame of the capture."""
    out: Path = HERE / "results" / "texture_errors.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Renders and measures."""
        for named in self.meshes:
            name, file = named.split("=", 1)
            row = {"mesh": name, **self._measure(Path(file))}
            print(row, flush=True)
            captures = json.loads(self.out.read_text())["captures"] if self.out.exists() else {}
            others = [one for one in captures.get(self.data.name, []) if one["mesh"] != name]
            captures[self.data.name] = [*others, row]
            report = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "captures": captures}
            self.out.write_text(json.dumps(report, indent=1) + "\n")

    def _measure(self, file: Path) -> dict[str, Any]:
        mesh, source, truth = read_mesh(file), open_capture(self.data), CaptureGroundTruth(self.data)
        renderer, occluder, photos = MeshRenderer(mesh, file.name), Occluder(mesh), source.photos("test", "capture")
        files = source.parser.get_dataparser_outputs("test").image_filenames
        errors: dict[str, float] = {}
        pixels: dict[str, int] = {}
        things: dict[str, float] = {}
        scores = []
        for index, camera in enumerate(photos.cameras):
            photo = photos.read(index)
            picture = renderer.render(camera)
            scores.append(score_photo(picture, photo))
            error = np.square(picture.colors - photo.colors).mean(axis=2)
            depth = truth.depth_m(files[index], camera.height, camera.width)
            if depth is None:
                raise SystemExit(f"{files[index]} has no depth image, so its edges are unknown.")
            columns, rows = np.arange(camera.width) + 0.5, np.arange(camera.height) + 0.5
            places = np.stack(np.broadcast_arrays(columns, rows[:, None]), axis=-1)
            found = occluder.cast(camera.rays(places))["t_hit"]
            hole, edge = ~np.isfinite(found), edges(depth)
            wrong = ~hole & (np.abs(np.where(hole, 0, found) - depth) > OFF * depth)
            for place, mask in {
                "holes": hole,
                "edges": ~hole & edge,
                "wrong depth": wrong & ~edge,
                "right depth": ~hole & ~edge & ~wrong,
            }.items():
                errors[place] = errors.get(place, 0.0) + float(error[mask].sum())
                pixels[place] = pixels.get(place, 0) + int(mask.sum())
            names = truth.labels(files[index], camera.height, camera.width)
            if names is not None:
                for label in np.unique(names):
                    thing = truth.names[label]
                    things[thing] = things.get(thing, 0.0) + float(error[names == label].sum())
        total, count = sum(errors.values()), sum(pixels.values())
        largest = sorted(things.items(), key=lambda item: -item[1])[:FEW]
        return {
            "vertices": len(mesh.vertices),
            "psnr": float(np.mean([score.psnr for score in scores])),
            "psnr_covered": float(np.mean([score.psnr_covered for score in scores])),
            "coverage": float(np.mean([score.coverage for score in scores])),
            "errors": {place: error / total for place, error in errors.items()},
            "pixels": {place: number / count for place, number in pixels.items()},
            "things": {thing: error / total for thing, error in largest},
        }


if __name__ == "__main__":
    tyro.cli(TextureErrors).main()

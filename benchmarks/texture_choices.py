r"""What a texture loses: ways to blend photos, on meshes more or less wrong, and on which objects the errors are.

    python benchmarks/texture_choices.py --data room --meshes true=room/gt_mesh.ply trained=room-mesh.ply

Each mesh is cut into charts and looked at from all training photos once; then each way to blend colours it, and the
held-out photos are compared with its renderings. *mean* is what `f3rm-ext export texture` does, but for exposures.
Where the capture has label images, a row also says which share of the squared error is on which objects. Rows are
written to results/texture_choices.json, which keeps those of other captures and meshes.
"""

import datetime
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
import tyro
from PIL import Image
from trimesh.visual.material import PBRMaterial
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.surface.mesh_files import read_mesh
from f3rm_ext.surface.texture.atlas import texture_texels, unwrap
from f3rm_ext.surface.texture.baking import texel_areas
from f3rm_ext.surface.texture.photos import Photos, open_capture
from f3rm_ext.surface.texture.rendering import MeshRenderer, score_photo
from f3rm_ext.surface.texture.seams import fill_outward, level_seams
from f3rm_ext.surface.texture.visibility import Occluder, PhotoLookup, Places, Sighting

HERE = Path(__file__).parent
WAYS = {
    "mean": "weighted mean",
    "equal": "mean of all photos that see a texel off edges, with equal weights",
    "square": "mean with the squares of the weights",
    "best": "the photo of the largest weight",
    "agreeing": "mean of the photos that agree with it (scale 20 of 255), found in four rounds",
}
AGREEMENT, ROUNDS = 20.0, 4
FEW = 6
"""Classes named in a row."""


def blended(sightings: list[Sighting], count: int, way: str) -> tuple[np.ndarray, np.ndarray]:
    """Colours of texels, and which ones are seen."""
    if way == "best":
        best, colors = np.zeros(count, np.float32), np.zeros((count, 3), np.float32)
        for seen in sightings:
            better = seen.weights > best[seen.which]
            best[seen.which[better]], colors[seen.which[better]] = seen.weights[better], seen.colors[better]
        return colors, best > 0
    middle = None
    for _ in range(ROUNDS if way == "agreeing" else 1):
        sums, total = np.zeros((count, 3)), np.zeros(count)
        for seen in sightings:
            weights = seen.weights.astype(np.float64)
            if way == "equal":
                weights = np.where(weights > 1e-3, 1.0, 1e-4)
            elif way == "square":
                weights = weights**2
            if middle is not None:
                apart = np.square(seen.colors - middle[seen.which]).mean(axis=1)
                weights = weights * np.exp(-apart / (2 * AGREEMENT**2))
            sums[seen.which] += weights[:, None] * seen.colors
            total[seen.which] += weights
        middle = sums / np.maximum(total, 1e-300)[:, None]
    assert middle is not None
    return middle.astype(np.float32), np.asarray(total > 0)


@dataclass
class TextureChoices:
    """Compares ways to blend photos."""

    data: Path
    """A capture with transforms.json and held-out photos."""
    meshes: tuple[str, ...]
    """Meshes as NAME=FILE, in the frame of the capture."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Ways to blend."""
    texture_size: int = 2048
    """Side of the texture, pixels."""
    out: Path = HERE / "results" / "texture_choices.json"
    """Where the figures are written."""

    def __post_init__(self) -> None:
        self._source = open_capture(self.data)

    def main(self) -> None:
        """Textures and measures."""
        train, held_out = (self._source.photos(split, "capture") for split in ("train", "test"))
        for named in self.meshes:
            name, file = named.split("=", 1)
            mesh = read_mesh(Path(file))
            vertices = len(mesh.vertices)
            atlas = unwrap(mesh, self.texture_size, 4)
            texels, areas = texture_texels(atlas), texel_areas(atlas)
            corners = np.asarray(atlas.mesh.vertices, np.float32)[atlas.mesh.faces[texels.faces]]
            b, c = texels.weights.T[..., None]
            points = corners[:, 0] * (1 - b - c) + corners[:, 1] * b + corners[:, 2] * c
            normals = np.asarray(atlas.mesh.face_normals, np.float32)[texels.faces]
            places, occluder = Places(points, normals, areas[texels.faces]), Occluder(atlas.mesh)
            looked = [
                PhotoLookup(camera, train.read(index), occluder).see(places)
                for index, camera in enumerate(train.cameras)
            ]
            for way in self.ways:
                colors, seen = blended(looked, len(texels), way)
                colors[~seen] = colors[seen].mean(axis=0)
                level_seams(atlas, texels, colors)
                visual = TextureVisuals(
                    atlas.mesh.visual.uv,  # type: ignore[union-attr]
                    PBRMaterial(baseColorTexture=Image.fromarray(fill_outward(texels, colors, atlas.size_px))),
                )
                made = trimesh.Trimesh(atlas.mesh.vertices, atlas.mesh.faces, visual=visual, process=False)
                self._write({"mesh": name, "blend": way, "vertices": vertices, **self._score(made, held_out)})

    def _score(self, mesh: trimesh.Trimesh, photos: Photos) -> dict[str, Any]:
        renderer, scores = MeshRenderer(mesh), []
        truth, files = CaptureGroundTruth(self.data), self._source.parser.get_dataparser_outputs("test").image_filenames
        errors: dict[str, float] = {}
        for index, camera in enumerate(photos.cameras):
            photo, made = photos.read(index), renderer.render(camera)
            scores.append(score_photo(made, photo))
            error = np.square(made.colors - photo.colors).mean(axis=2)
            labels = truth.labels(files[index], *error.shape)
            for label in () if labels is None else np.unique(labels):
                name = truth.names[label]
                errors[name] = errors.get(name, 0.0) + float(error[labels == label].sum())
        total = sum(errors.values())
        worst = sorted(errors, key=errors.__getitem__, reverse=True)[:FEW]
        keys = ("psnr", "psnr_covered", "coverage")
        found: dict[str, Any] = {key: float(np.mean([getattr(score, key) for score in scores])) for key in keys}
        return found | ({"errors": {name: errors[name] / total for name in worst}} if total else {})

    def _write(self, row: dict[str, Any]) -> None:
        print(row, flush=True)
        captures = json.loads(self.out.read_text())["captures"] if self.out.exists() else {}
        rows = {(old["mesh"], old["blend"]): old for old in captures.get(self.data.name, ())}
        rows[row["mesh"], row["blend"]] = row
        captures[self.data.name] = list(rows.values())
        report = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "captures": captures}
        self.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(TextureChoices).main()

r"""What a texture loses: ways to blend photos, on meshes more or less wrong, and on which objects the errors are.

    python benchmarks/texture_choices.py --data room --meshes true=room/gt_mesh.ply trained=room-mesh.ply

Each mesh is cut into charts, and random pixels of the held-out photos are looked up in the texture. Only the texels
that they read, and those that cuts join to them, are coloured: by all training photos, in each way to blend. *mean* is
what `f3rm-ext export texture` does, but for exposures and for texels that no photo sees: these take the mean colour.
Where the capture has label images, a row also says which share of the squared error is on which objects. Rows are
written to results/texture_choices.json, which keeps those of other captures and meshes.
"""

import datetime
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from scipy.sparse import csr_matrix

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.mesh.mesh_files import read_mesh
from f3rm_ext.mesh.texture.atlas import Atlas, Texels, texture_texels, unwrap
from f3rm_ext.mesh.texture.baking import texel_areas
from f3rm_ext.mesh.texture.photos import Photo, Photos, open_capture
from f3rm_ext.mesh.texture.rendering import SAMPLES, MeshPicture, interpolated, score_photo
from f3rm_ext.mesh.texture.seams import level_seams, outward, seam_lookups
from f3rm_ext.mesh.texture.visibility import Occluder, PhotoLookup, Places, Sighting, bilinear_corners

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
CHUNK = 1 << 17
"""Texels coloured at once."""
REACH = 4
"""How many samples along a cut are levelled on each side of a texel that is read."""


class View(NamedTuple):
    """Some pixels of a held-out photo."""

    photo: Photo
    """These pixels, as a picture of one row."""
    covered: np.ndarray
    """Which of them the mesh covers wholly, (1, pixels)."""
    names: np.ndarray | None
    """Labels of the objects that they show, (pixels,)."""
    reads: csr_matrix
    """Share of each texel in the colour of each pixel, (pixels, texels)."""


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
    pixels: int = 20_000
    """Pixels of each held-out photo; 0 takes all."""
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
            occluder = Occluder(atlas.mesh)
            texels = texture_texels(atlas)
            views = self._views(atlas, outward(texels, atlas.size_px), occluder, held_out)
            read = np.zeros(atlas.size_px**2, bool)
            for view in views:
                read[view.reads.indices] = True
            cuts = seam_lookups(atlas)
            for _ in range(REACH):
                read[cuts[read[cuts].any(axis=1)]] = True
            chosen = read[texels.places]
            texels = Texels(texels.faces[chosen], texels.weights[chosen], texels.places[chosen])
            views = [view._replace(reads=view.reads[:, texels.places]) for view in views]
            pixels = sum(view.covered.size for view in views)
            for way, colors in self._colors(atlas, texels, occluder, train).items():
                level_seams(atlas, texels, colors)
                row = {"mesh": name, "blend": way, "vertices": vertices, "pixels": pixels}
                self._write(row | self._score(np.rint(colors), views))

    def _views(self, atlas: Atlas, nearest: np.ndarray, occluder: Occluder, photos: Photos) -> list[View]:
        """Looks up pixels of the held-out photos in the texture, as a renderer of the mesh does."""
        truth, files = CaptureGroundTruth(self.data), self._source.parser.get_dataparser_outputs("test").image_filenames
        down, across = np.divmod(np.arange(SAMPLES**2), SAMPLES)
        offsets = (np.stack([across, down], axis=1) + 0.5) / SAMPLES
        pixels, size = atlas.pixels, atlas.size_px
        views = []
        for index, camera in enumerate(photos.cameras):
            count = camera.width * camera.height
            taken = np.arange(count)
            if 0 < self.pixels < count:
                taken = np.sort(np.random.default_rng(index).choice(count, self.pixels, replace=False))
            corners = np.stack([taken % camera.width, taken // camera.width], axis=1)
            hit = occluder.cast(camera.rays(corners[:, None] + offsets))
            on = np.isfinite(hit["t_hit"])
            at = interpolated(pixels, atlas.mesh.faces[hit["primitive_ids"][on]], hit["primitive_uvs"][on])
            around, share = bilinear_corners(at, size, size)
            texel, pixel = nearest.ravel()[around], np.repeat(np.nonzero(on)[0], around.shape[1])
            shape = (len(taken), size * size)
            reads = csr_matrix((share.ravel() / SAMPLES**2, (pixel, texel.ravel())), shape=shape)
            photo = photos.read(index)
            valid = None if photo.valid is None else photo.valid.reshape(1, -1)[:, taken]
            labels = truth.labels(files[index], camera.height, camera.width)
            names = None if labels is None else labels.ravel()[taken]
            views.append(
                View(Photo(photo.colors.reshape(1, -1, 3)[:, taken], valid), on.all(axis=1)[None], names, reads)
            )
        return views

    def _colors(self, atlas: Atlas, texels: Texels, occluder: Occluder, photos: Photos) -> dict[str, np.ndarray]:
        """Colours of texels, by the way to blend."""
        vertices, normals = np.asarray(atlas.mesh.vertices, np.float32), np.asarray(atlas.mesh.face_normals, np.float32)
        points, areas = interpolated(vertices, atlas.mesh.faces[texels.faces], texels.weights), texel_areas(atlas)
        lookups = [PhotoLookup(camera, photos.read(index), occluder) for index, camera in enumerate(photos.cameras)]
        colors = {way: np.zeros((len(texels), 3), np.float32) for way in self.ways}
        seen = {way: np.zeros(len(texels), bool) for way in self.ways}
        for first in range(0, len(texels), CHUNK):
            part = slice(first, first + CHUNK)
            face = texels.faces[part]
            places = Places(points[part], normals[face], areas[face])
            sightings = [lookup.see(places) for lookup in lookups]
            for way in self.ways:
                colors[way][part], seen[way][part] = blended(sightings, len(face), way)
        for way, found in colors.items():
            found[~seen[way]] = found[seen[way]].mean(axis=0)
        return colors

    def _score(self, colors: np.ndarray, views: list[View]) -> dict[str, Any]:
        names, scores = CaptureGroundTruth(self.data).names, []
        errors: dict[str, float] = {}
        for view in views:
            made = MeshPicture((view.reads @ colors)[None], view.covered)
            scores.append(score_photo(made, view.photo))
            error = np.square(made.colors - view.photo.colors).mean(axis=2)[0]
            for label in () if view.names is None else np.unique(view.names):
                errors[names[label]] = errors.get(names[label], 0.0) + float(error[view.names == label].sum())
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

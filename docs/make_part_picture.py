"""Draws what a query finds on a mesh: a photo, the mesh with heat, and the part that was cut out, from the same camera.

python docs/make_part_picture.py CAPTURE HEAT PART PHOTO OUT.jpg

CAPTURE is a folder with transforms.json, HEAT and PART are meshes of `f3rm-ext query` and `f3rm-ext export part` in its
frame, PHOTO is the name of one of its training photos. The part is enlarged.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from f3rm_ext.surface.mesh_files import read_mesh
from f3rm_ext.surface.texture.photos import Camera, open_capture
from f3rm_ext.surface.texture.rendering import MeshRenderer

MARGIN = 1.25
"""Side of the enlarged part's picture over that of the part in it."""


def zoomed(camera: Camera, points: np.ndarray) -> Camera:
    """The camera with a longer lens, whose picture the points just fill."""
    at, _ = camera.project(points)
    low, high = at.min(axis=0), at.max(axis=0)
    factor = float((np.array([camera.width, camera.height]) / (MARGIN * (high - low))).min())
    middle = factor * (camera.middle - (low + high) / 2) + np.array([camera.width, camera.height]) / 2
    return camera._replace(focal=factor * camera.focal, middle=middle)


def on_white(renderer: MeshRenderer, camera: Camera) -> np.ndarray:
    """The mesh before a white background, whose edge pixels stay black without it."""
    made = renderer.render(camera)
    return np.where(made.covered[..., None], made.colors, 255)


def main() -> None:
    """Writes the picture."""
    capture, heat, part = Path(sys.argv[1]), read_mesh(Path(sys.argv[2])), read_mesh(Path(sys.argv[3]))
    source = open_capture(capture)
    names = [Path(name).name for name in source.parser.get_dataparser_outputs("train").image_filenames]
    photos, index = source.photos("train", "capture"), names.index(sys.argv[4])
    camera = photos.cameras[index]
    pictures = [
        photos.read(index).colors,
        on_white(MeshRenderer(heat), camera),
        on_white(MeshRenderer(part), zoomed(camera, np.asarray(part.vertices))),
    ]
    strip = np.concatenate([np.rint(picture).astype(np.uint8) for picture in pictures], axis=1)
    Image.fromarray(strip).save(sys.argv[5], quality=88)


if __name__ == "__main__":
    main()

"""Draws what a query finds on a mesh: the mesh, its heat, and the part that was cut out, seen by the camera of a photo.

python docs/make_part_picture.py CAPTURE MESH HEAT PART PHOTO OUT.jpg

CAPTURE is a folder with transforms.json, and the meshes are in its frame: HEAT and PART are of `f3rm-ext query` and
`f3rm-ext export part`. PHOTO is the name of a training photo. The part is enlarged.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from f3rm_ext.mesh.mesh_files import read_mesh
from f3rm_ext.mesh.texture.photos import Camera, open_capture
from f3rm_ext.mesh.texture.rendering import MeshRenderer

WIDTH_PX = 420
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


def resized(camera: Camera, width: int) -> Camera:
    """The camera with larger or smaller pictures."""
    factor = width / camera.width
    height = round(camera.height * factor)
    return camera._replace(focal=factor * camera.focal, middle=factor * camera.middle, width=width, height=height)


def main() -> None:
    """Writes the picture."""
    capture = Path(sys.argv[1])
    mesh, heat, part = (read_mesh(Path(name)) for name in sys.argv[2:5])
    source = open_capture(capture)
    names = [Path(name).name for name in source.parser.get_dataparser_outputs("train").image_filenames]
    camera = resized(source.photos("train", "capture").cameras[names.index(sys.argv[5])], WIDTH_PX)
    pictures = [
        on_white(MeshRenderer(mesh), camera),
        on_white(MeshRenderer(heat), camera),
        on_white(MeshRenderer(part), zoomed(camera, np.asarray(part.vertices))),
    ]
    strip = np.concatenate([np.rint(picture).astype(np.uint8) for picture in pictures], axis=1)
    Image.fromarray(strip).save(sys.argv[6], quality=88)


if __name__ == "__main__":
    main()

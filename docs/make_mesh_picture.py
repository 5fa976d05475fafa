"""Draws a mesh beside a photo: the photo, the mesh with its colours, and the mesh alone, shaded.

python docs/make_mesh_picture.py CAPTURE MESH PHOTO OUT.jpg

CAPTURE is a folder with transforms.json, MESH in its frame, PHOTO the name of one of its training photos.
"""

import sys
from pathlib import Path

import numpy as np
import open3d as o3d
import torch
from PIL import Image

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import unproject
from f3rm_ext.mesh.mesh_files import read_mesh, vertex_colors
from f3rm_ext.mesh.open3d_library import raycasting_scene

HEIGHT_PX = 360


def main() -> None:
    """Writes the picture."""
    capture, mesh_file, photo, out = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    outputs = CaptureDataParserConfig(data=capture).setup().get_dataparser_outputs("train")
    frame = CaptureFrame.of_outputs(outputs, capture)
    index = [Path(name).name for name in outputs.image_filenames].index(photo)
    cameras = PinholeCameras.of(outputs.cameras)
    width, height = int(cameras.widths[index]), int(cameras.heights[index])
    mesh = read_mesh(mesh_file)
    center = frame.to_capture(cameras.positions[index].double().numpy())
    pixels = torch.arange(width * height)
    ahead = frame.to_capture(unproject(cameras, index, torch.ones(len(pixels)).double(), pixels).numpy()) - center
    scene = raycasting_scene(mesh.vertices, mesh.faces)
    rays = np.concatenate([np.broadcast_to(center, ahead.shape), ahead], axis=1).astype(np.float32)
    hit = scene.cast_rays(o3d.core.Tensor(rays))
    face, found = hit["primitive_ids"].numpy(), np.isfinite(hit["t_hit"].numpy())
    corners = np.asarray(mesh.faces)[np.where(found, face, 0)]
    u, v = hit["primitive_uvs"].numpy().T
    weights = np.stack([1 - u - v, u, v], axis=1)
    colors = vertex_colors(mesh)
    assert colors is not None
    color = (weights[..., None] * colors[corners]).sum(axis=1)
    normal = (weights[..., None] * np.asarray(mesh.vertex_normals)[corners]).sum(axis=1)
    normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-9)
    facing = np.abs((normal * ahead).sum(axis=1) / np.linalg.norm(ahead, axis=1))
    shade = np.repeat(40 + 200 * facing[:, None] ** 0.8, 3, axis=1)
    white = np.full_like(color, 255)
    pictures = [np.where(found[:, None], part, white).reshape(height, width, 3) for part in (color, shade)]
    real = np.asarray(Image.open(outputs.image_filenames[index]).convert("RGB"))
    strip = np.concatenate([np.asarray(part, np.uint8) for part in (real, *pictures)], axis=1)
    image = Image.fromarray(strip)
    image.resize((image.width * HEIGHT_PX // image.height, HEIGHT_PX), Image.Resampling.LANCZOS).save(out, quality=88)


if __name__ == "__main__":
    main()

"""Viewer of cameras, points and matches in the browser, before training."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.errors import CaptureError, ConfigError, reason_of
from f3rm_ext.sfm.capture_writer import ORIENTATION, SPARSE
from f3rm_ext.sfm.database import colmap
from f3rm_ext.sfm.report import scene_axes, thumbnail

HOST = "127.0.0.1"
_THUMBNAIL_PX = 160
_LEAST_SHARED, _MOST_LINES = 30, 300
"""Minimum number of shared points for a line between two cameras, and maximum number of lines."""


def read_model(capture: Path) -> Any:
    """Reads the solved model of a capture. Raises CaptureError if the folder has none."""
    folder = capture / SPARSE
    if not folder.is_dir():
        raise CaptureError(f"{capture} has no {SPARSE.as_posix()}: make the capture with `f3rm-ext sfm process`.")
    try:
        return colmap().Reconstruction(folder)
    except (RuntimeError, ValueError) as error:
        raise CaptureError(f"{folder} cannot be read ({reason_of(error)}): make the capture again.") from error


def count_shared_points(model: Any) -> dict[tuple[int, int], int]:
    """Returns the number of points that both images of a pair see, by their ids."""
    shared: Counter[tuple[int, int]] = Counter()
    for point in model.points3D.values():
        shared.update(itertools.combinations(sorted({element.image_id for element in point.track.elements}), 2))
    return shared


def serve(capture: Path, port: int) -> Any:
    """Starts a viser server that shows the model of a capture, for this machine only. Raises CaptureError if the
    capture has no model or no readable transforms.json, and ConfigError if the port is out of range."""
    import viser
    import viser.transforms

    if not 1 <= port <= 65535:
        raise ConfigError(f"--port is {port}: give a number from 1 to 65535, or leave it out for 7008.")
    model = read_model(capture)
    turn = scene_axes(model, z_is_up=read_transforms(capture)[0].get(ORIENTATION) == "none")  # up becomes z
    centres = {number: turn @ model.image(number).projection_center() for number in model.reg_image_ids()}
    points = list(model.points3D.values())
    xyz = np.array([point.xyz for point in points]).reshape(-1, 3)
    middle = turn @ np.median(xyz, axis=0)
    extent = max(float(np.ptp(np.array(list(centres.values())), axis=0).max()), 1e-6)

    def place(xyz: np.ndarray) -> np.ndarray:
        return ((xyz @ turn.T - middle) * (4 / extent)).astype(np.float32)

    server = viser.ViserServer(host=HOST, port=port, verbose=False)
    rgb = np.array([point.color for point in points], dtype=np.uint8).reshape(-1, 3)
    server.scene.add_point_cloud("/points", place(xyz), rgb, point_size=0.01)
    numbers = sorted(centres, key=lambda number: model.image(number).name)
    images = capture / ("images_undistorted" if (capture / "images_undistorted").is_dir() else "images")
    for number in numbers:
        image, camera = model.image(number), model.camera(model.image(number).camera_id)
        rotation = turn @ image.cam_from_world().rotation.matrix().T
        server.scene.add_camera_frustum(
            f"/cameras/{image.name}",
            fov=float(2 * np.arctan2(camera.height / 2, camera.mean_focal_length())),
            aspect=camera.width / camera.height,
            scale=0.15,
            image=thumbnail(path, _THUMBNAIL_PX) if (path := images / image.name).is_file() else None,
            wxyz=viser.transforms.SO3.from_matrix(rotation).wxyz,
            position=place(image.projection_center()[None])[0],
        )
    shared = count_shared_points(model)
    pairs = [pair for pair in sorted(shared, key=lambda pair: -shared[pair]) if shared[pair] >= _LEAST_SHARED]
    lines = server.gui.add_checkbox(f"Pairs of cameras that share {_LEAST_SHARED} points or more", False)
    handles = [
        server.scene.add_spline_catmull_rom(
            f"/pairs/{a}-{b}",
            place(np.stack([model.image(a).projection_center(), model.image(b).projection_center()])),
            color=(220, 150, 40),
            visible=False,
        )
        for a, b in pairs[:_MOST_LINES]
    ]

    @lines.on_update
    def _(_: Any) -> None:
        for handle in handles:
            handle.visible = lines.value

    return server

"""Cameras to look from: those of a capture, of a run, of an output folder of 3DGS, or one made up for a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import numpy as np
import torch
from jaxtyping import Float

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.capture.images import tell_apart
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import CaptureError
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.mesh_files import require_same_frame
from f3rm_ext.mesh.texture.photos import PhotoSource
from f3rm_ext.preview.content import Content
from f3rm_ext.utils.json_shape import parse_json

CAMERAS_FILE = "cameras.json"
"""Written by 3DGS into its output folder."""
_OVERVIEW_PX = (960, 720)
_OVERVIEW_FOV_RAD = np.radians(50.0)
_FROM = np.array([0.5, -1.0, 0.55])
"""Direction from the content to the camera of an overview."""
_INSIDE = 0.9
"""Share of the points that count for the size of the content."""

_Side = Annotated[int, msgspec.Meta(gt=0)]
_Focal = Annotated[float, msgspec.Meta(gt=0)]
_Vector = tuple[float, float, float]


class _GraphdecoCamera(TypedDict):
    img_name: str
    width: _Side
    height: _Side
    position: _Vector
    rotation: tuple[_Vector, _Vector, _Vector]
    fx: _Focal
    fy: _Focal


class NamedCamera(NamedTuple):
    """A camera to look from."""

    name: str
    """Name of its photo."""
    camera: Camera
    """The camera, in the coordinates of the content."""

    def turn(self, rotation: Float[np.ndarray, "3 3"]) -> "NamedCamera":
        """Returns the camera in rotated coordinates."""
        moved = self.camera._replace(rotation=self.camera.rotation @ rotation.T, center=rotation @ self.camera.center)
        return self._replace(camera=moved)


def source_cameras(
    source: PhotoSource, content: Content, frame: Literal["auto", "capture", "scene"] = "auto"
) -> list[NamedCamera]:
    """Returns the cameras of all photos of a capture, in the order of their paths and in the frame of a content.

    Args:
        frame: that of the content; for auto what its file says, else capture.

    Raises:
        CaptureError: the capture cannot be used.
        MeshError: the content's file says that it is in the scene frame of another capture.
    """
    is_scene = (content.frame if frame == "auto" else frame) == "scene"
    cameras: dict[Path, Camera] = {}
    for split in ("train", "test"):
        outputs = source.parser.get_dataparser_outputs(split)
        capture = CaptureFrame.from_outputs(outputs, source.data)
        if frame == "auto" and is_scene:
            require_same_frame(content.path, content.record, capture)
        views, frames = PinholeCameras.of(outputs.cameras), None if is_scene else capture
        cameras |= {name: Camera.of(views, i, frames) for i, name in enumerate(outputs.image_filenames)}
    paths = sorted(cameras)
    return [NamedCamera(name, cameras[path]) for name, path in zip(tell_apart(paths), paths, strict=True)]


def find_cameras_file(path: Path) -> Path | None:
    """Returns the ``cameras.json`` of the 3DGS output folder in which a file lies, or lies beside; None without one."""
    files = (folder / CAMERAS_FILE for folder in path.absolute().parents[:3])
    return next((file for file in files if file.is_file()), None)


def read_cameras_file(path: Path) -> list[NamedCamera]:
    """Returns the cameras of a ``cameras.json`` of 3DGS, in the coordinates of its point clouds.

    Its rotations are from camera to world, and its cameras look along z, with y down.

    Raises:
        CaptureError: the file cannot be read, or is of another kind.
    """
    try:
        entries = parse_json(path.read_bytes(), list[_GraphdecoCamera])
        return [_graphdeco_camera(entry) for entry in entries]
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path} holds no cameras of 3DGS ({error}): move it away, or give --data.") from error


def _graphdeco_camera(entry: _GraphdecoCamera) -> NamedCamera:
    rotation, center = np.array(entry["rotation"]).T, np.array(entry["position"])
    if not np.isfinite(center).all() or not np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-3):
        raise ValueError(f"the pose of {entry['img_name']} is no rotation and position")
    middle = np.array([entry["width"], entry["height"]]) / 2
    focal = np.array([entry["fx"], entry["fy"]])
    return NamedCamera(
        Path(entry["img_name"]).name, Camera(rotation, center, focal, middle, entry["width"], entry["height"])
    )


def extent_of(places: Float[np.ndarray, "n 3"]) -> tuple[Float[np.ndarray, "3"], float]:
    """Returns the middle of points, and the distance from there within which most of them lie; 1 where that is 0."""
    middle = np.median(places, axis=0)
    return middle, float(np.quantile(np.linalg.norm(places - middle, axis=1), _INSIDE)) or 1.0


def overview(places: Float[np.ndarray, "n 3"]) -> NamedCamera:
    """Returns a camera that sees all but the outermost points from the front and from above; z is up."""
    middle, radius = extent_of(places)
    back = _FROM / np.linalg.norm(_FROM)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    width, height = _OVERVIEW_PX
    focal = height / 2 / np.tan(_OVERVIEW_FOV_RAD / 2)
    center = middle + 1.15 * radius / np.sin(_OVERVIEW_FOV_RAD / 2) * back
    rotation = np.stack([right, np.cross(right, back), -back])
    return NamedCamera(
        "Overview", Camera(rotation, center, np.full(2, focal), np.array([width, height]) / 2, width, height)
    )


def nerfstudio_cameras(cameras: Sequence[NamedCamera]) -> Any:
    """Returns the cameras as nerfstudio has them, OpenGL axes."""
    from nerfstudio.cameras.cameras import Cameras

    poses = [np.column_stack([one.rotation.T * [1.0, -1.0, -1.0], one.center]) for _, one in cameras]
    values = [[*one.focal, *one.middle] for _, one in cameras]
    fx, fy, cx, cy = torch.tensor(np.array(values), dtype=torch.float32).T[..., None]
    sides = torch.tensor([[one.width, one.height] for _, one in cameras])
    return Cameras(
        torch.tensor(np.stack(poses), dtype=torch.float32), fx, fy, cx, cy, width=sides[:, :1], height=sides[:, 1:]
    )

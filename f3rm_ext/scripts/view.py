"""``f3rm-ext view``: files of splats, meshes and points in the browser."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from f3rm_ext.compat import LOCAL_HOST
from f3rm_ext.errors import CaptureError
from f3rm_ext.scripts.common import serve_until_interrupt
from f3rm_ext.utils.console import note, say
from f3rm_ext.utils.ranges import Count, Range, check_ranges

if TYPE_CHECKING:
    from f3rm_ext.preview.cameras import NamedCamera
    from f3rm_ext.preview.content import Content


@dataclass(kw_only=True)
class View:
    """Shows a file of splats, a mesh or points in the browser, whichever program wrote it.

    Splats are read from .ply, .compressed.ply, .spz, .sog, .splat and .ksplat, meshes from .glb, .obj, .ply and .stl
    with their textures, points from .ply. With the cameras of a capture, buttons go from camera to camera; those of
    3DGS are found in the cameras.json of its output folder. Colours of splats are those of SH degree 0, whatever the
    direction. Ctrl-C stops the server. `ns-viewer` shows runs, and asks them.

    Typical calls:
      f3rm-ext view room.spz
      f3rm-ext view room.glb --data room
      f3rm-ext view output/point_cloud/iteration_30000/point_cloud.ply
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File to show; the content of .ply tells whether it is splats, a mesh or points."""
    data: Path | None = None
    """The capture (transforms.json or COLMAP's sparse/0) whose cameras are gone to."""
    frame: Literal["auto", "capture", "scene"] = "auto"
    """Coordinates of the file: those of the capture, or those of the scene as the model sees it. auto is what the file
    says, else capture."""
    up: Literal["auto", "z", "y", "-y"] = "auto"
    """Axis of the file that points up. auto is what the file says; else y for .glb and .obj, z for other meshes and for
    points, and -y for splats, as 3DGS has it."""
    max_gaussians: Count = 3_000_000
    """Most Gaussians that are shown, 1 or more: of more, the largest and most opaque. Each takes 32 bytes of the
    graphics card."""
    bad_values: Literal["error", "drop"] = "error"
    """What to do about values of splats that are NaN or infinite: error stops, drop leaves those Gaussians out."""
    spz_axes: Literal["rub", "ply"] = "rub"
    """Axes in .spz files: rub (right, up, back), as the format demands, or ply, as in PLY files, which some programs
    write, such as version 3 of PlayCanvas' splat-transform."""
    host: str = LOCAL_HOST
    """Address at which the page is served; 0.0.0.0 lets other machines open it."""
    port: Annotated[int, Range(1, 65535)] = 7008
    """Port of the page, 1 to 65535."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def main(self) -> int:
        from f3rm_ext.preview.content import open_content
        from f3rm_ext.preview.server import serve_content

        content = open_content(
            self.file, bad_values=self.bad_values, spz_axes=self.spz_axes, max_gaussians=self.max_gaussians
        )
        cameras, origin = self._cameras(content)
        up = content.up if self.up == "auto" else self.up
        server = serve_content(content, self.file.name, cameras, self.host, self.port, up)
        say(f"{self.file} has {content.summary}; its {up} axis points up here{origin}.", *content.remarks)
        return serve_until_interrupt(server)

    def _cameras(self, content: "Content") -> "tuple[list[NamedCamera], str]":
        """The cameras, and where they are from."""
        from f3rm_ext.mesh.texture.photos import open_capture
        from f3rm_ext.preview.cameras import find_cameras_file, read_cameras_file, source_cameras

        if self.data is not None:
            cameras = source_cameras(open_capture(self.data), content, self.frame)
            frame = content.frame if self.frame == "auto" else self.frame
            return cameras, f"; the {len(cameras)} cameras are those of {self.data}, in the frame of the {frame}"
        file = find_cameras_file(self.file)
        try:
            cameras = [] if file is None else read_cameras_file(file)
        except CaptureError as error:
            note(str(error))
            return [], ""
        return cameras, f"; the {len(cameras)} cameras are those of {file}" if cameras else ""

"""``f3rm-ext sfm points``: dense points for a capture, to begin a run of splats at."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from f3rm_ext.capture.points import STEREO_POINTS
from f3rm_ext.errors import CaptureError, ConfigError, MeshError

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Points:
    """Find dense points of a capture by stereo, and write a copy of the capture that begins with them.

    The photos are compared with their neighbours at a small size. Depth on which they agree is fused to a surface, and
    points are spread over it evenly; the capture's own points stay. Splats that begin at these points find walls and
    other surfaces without strong texture, which short runs otherwise place too near to the cameras.

    Only the training photos are used. The copy links the files of the capture. Exit codes: 0 done, 2 bad input.

    Typical call:
      f3rm-ext sfm points room --out room_dense
    """

    data: tyro.conf.Positional[Path]
    """Folder of a capture, with transforms.json or COLMAP's sparse/0."""
    out: Path
    """Folder of the copy; must not be there yet."""
    points: int = 20_000
    """Points on the surface, 1 or more."""
    width: int = 320
    """Width of the photos that are compared, pixels, 32 or more. Twice as wide takes four times as long and as much
    memory."""
    seed: int = 0
    """Seed of the places of the points."""

    def main(self) -> None:
        """Finds the points and writes the copy."""
        from f3rm_ext.capture.checks import read_transforms
        from f3rm_ext.scripts.sfm_process import StageBars

        self.check()
        if self.out.exists():
            raise CaptureError(f"{self.out} exists already: give another --out, or remove it.")
        meta, folder = read_transforms(self.data)
        bars = StageBars()
        try:
            positions, colors = self._find(bars)
        finally:
            bars.close()
        self._write(meta, folder, positions, colors)
        own = len(positions) - self.points
        print(f"Dense points: {self.points:,}{f', and {own:,} of the capture' if own else ''}.")
        print(f"Train: ns-train sugar-ext --data {self.out}")

    def check(self) -> None:
        """Raises ConfigError if an option is out of its range."""
        if self.points < 1 or self.width < 32:
            raise ConfigError(f"--points is {self.points} and --width {self.width}: use at least 1 and 32.")

    def _find(self, bars: Any) -> "tuple[np.ndarray, np.ndarray]":
        """Returns positions in the frame of the capture, and colours, 0 to 255; the capture's own points are first."""
        import numpy as np
        from trimesh.sample import sample_surface

        from f3rm_ext.capture.dataparser import CaptureDataParserConfig
        from f3rm_ext.capture.frame import CaptureFrame
        from f3rm_ext.capture.points import RGB, XYZ
        from f3rm_ext.surface.extraction import ExtractionOptions, extract_mesh
        from f3rm_ext.surface.scenes import SurfaceScene
        from f3rm_ext.surface.stereo import AGREEING, views_of_photos

        outputs = CaptureDataParserConfig(data=self.data, load_3D_points=True).setup().get_dataparser_outputs("train")
        frame = CaptureFrame.of_outputs(outputs, self.data)
        scene = SurfaceScene(views_of_photos(outputs, self.width), None, frame, {})
        try:
            mesh = extract_mesh(scene, ExtractionOptions(tolerance=AGREEING), bars.show).mesh
        except MeshError as error:
            raise CaptureError(
                f"The photos of {self.data} do not agree on any surface, so there are no dense points: raise --width, "
                "check the poses, or train without dense points."
            ) from error
        places, faces = sample_surface(mesh, self.points, seed=self.seed)[:2]
        colors = np.asarray(mesh.visual.vertex_colors)[mesh.faces[faces]][..., :3].mean(axis=1)  # type: ignore[union-attr]
        if XYZ in outputs.metadata:
            places = np.concatenate([outputs.metadata[XYZ].numpy(), places])
            colors = np.concatenate([outputs.metadata[RGB].numpy(), colors])
        return frame.to_capture(np.asarray(places)), colors

    def _write(self, meta: dict[str, Any], folder: Path, positions: "np.ndarray", colors: "np.ndarray") -> None:
        import numpy as np

        from f3rm_ext.utils.ply import write_ply

        columns = {name: positions[:, i].astype(np.float32) for i, name in enumerate("xyz")}
        columns |= {name: colors[:, i].round().astype(np.uint8) for i, name in enumerate(("red", "green", "blue"))}
        fresh = self.out.with_name(f".{self.out.name}.{os.getpid()}.tmp")
        try:
            fresh.mkdir(parents=True)
            for entry in sorted(folder.iterdir()):
                if entry.name not in ("transforms.json", STEREO_POINTS):
                    (fresh / entry.name).symlink_to(entry.resolve())
            with (fresh / STEREO_POINTS).open("wb") as stream:
                write_ply(stream, columns)
            meta = {**_with_places(meta, folder), "ply_file_path": STEREO_POINTS}
            (fresh / "transforms.json").write_text(json.dumps(meta, indent=1))
            os.rename(fresh, self.out)
        except OSError as error:
            raise ConfigError(
                f"{self.out} cannot be written ({error.strerror or error}): free some space or choose another --out."
            ) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _with_places(value: Any, folder: Path) -> Any:
    """JSON whose paths out of a folder are absolute, so that they hold in a copy elsewhere."""
    if isinstance(value, dict):
        return {name: _with_places(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_places(item, folder) for item in value]
    leads_out = isinstance(value, str) and value.startswith("../")
    return str((folder / value).resolve()) if leads_out else value

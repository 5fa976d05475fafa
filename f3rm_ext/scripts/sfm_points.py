"""``f3rm-ext sfm points``: dense initial points of splats for a capture."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from f3rm_ext.errors import CaptureError
from f3rm_ext.scripts.common import OutArg, print_training
from f3rm_ext.utils.ranges import Range, check_ranges


@dataclass
class Points:
    """Compute dense points of a capture by stereo, and write a copy of the capture with these points.

    Training of splats does this by itself (--dense-points). This command is for viewing the points, for other programs,
    or for another number of points. Photos are matched with their neighbours at a small size, and points are spread
    evenly over the surfaces on which several photos agree. The capture's own points stay.

    Only the training photos are used. The copy links to the files of the capture. The exit code is 0, or 2 for bad
    input.

    Typical call:
      f3rm-ext sfm points room --out room_dense
    """

    data: tyro.conf.Positional[Path]
    """Folder of a capture, with transforms.json or COLMAP's sparse/0."""
    out: Annotated[Path, OutArg]
    """Folder of the copy, which must not exist yet."""
    points: Annotated[int, Range(1, 100_000_000)] = 20_000
    """Maximum number of points to compute, 1 to 100 million."""
    side: Annotated[int, Range(32, 8192)] = 320
    """Longest side of the matched photos, in px, 32 to 8192. Doubling it takes four times as long."""

    def main(self) -> None:
        """Finds the points and writes the copy.

        Raises:
            CaptureError: the capture cannot be used, or its photos do not agree on any point.
            ConfigError: an option is out of its range, or the copy cannot be written.
        """
        from f3rm_ext.capture.checks import read_transforms
        from f3rm_ext.capture.dataparser import CaptureDataParserConfig
        from f3rm_ext.capture.frame import CaptureFrame
        from f3rm_ext.capture.points import RGB, XYZ, drop_unusable_points
        from f3rm_ext.data.stereo.points import seek_points
        from f3rm_ext.utils.output_file import require_writable

        check_ranges(self)
        if os.path.lexists(self.out):
            raise CaptureError(f"--out {self.out} already exists: give another folder, or remove it.")
        require_writable(self.out)
        meta, folder = read_transforms(self.data)
        outputs = CaptureDataParserConfig(data=self.data, load_3D_points=True).setup().get_dataparser_outputs("train")
        drop_unusable_points(outputs.metadata)
        points = seek_points(outputs, self.points, self.side)
        if not len(points.xyz):
            raise CaptureError(
                f"The photos of {self.data} do not agree on any point: raise --side, check the poses, or train without "
                "dense points."
            )
        xyz, rgb = points
        own = outputs.metadata.get(XYZ)
        if own is not None:
            xyz, rgb = np.concatenate([own.numpy(), xyz]), np.concatenate([outputs.metadata[RGB].numpy(), rgb])
        self._write(meta, folder, CaptureFrame.from_outputs(outputs, self.data).to_capture(xyz.astype(np.float64)), rgb)
        also = "" if own is None else f", and {len(own):,} of the capture"
        print(f"Dense points: {len(points.xyz):,}{also}.")
        print_training(self.out, "sugar-ext")

    def _write(self, meta: dict[str, Any], folder: Path, positions: np.ndarray, colors: np.ndarray) -> None:
        from f3rm_ext.capture.checks import ORIGIN_KEY
        from f3rm_ext.capture.points import STEREO_POINTS
        from f3rm_ext.data.stereo.points import DensePoints, encode_ply
        from f3rm_ext.utils.output_file import write_error

        fresh = self.out.with_name(f".{self.out.name}.{os.getpid()}.tmp")
        try:
            fresh.mkdir(parents=True)
            for entry in sorted(folder.iterdir()):
                if entry.name not in ("transforms.json", STEREO_POINTS, fresh.name):
                    (fresh / entry.name).symlink_to(entry.resolve())
            (fresh / STEREO_POINTS).write_bytes(encode_ply(DensePoints(positions.astype(np.float32), colors)))
            meta = {**_absolute_paths(meta, folder), "ply_file_path": STEREO_POINTS}
            if ORIGIN_KEY in meta:  # the copy has a frame of its own, from which float32 tells points apart
                meta["applied_transform"] = np.eye(4)[:3].tolist()
            (fresh / "transforms.json").write_text(json.dumps(meta, indent=1))
            os.rename(fresh, self.out)
        except OSError as error:
            raise write_error(self.out, error) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _absolute_paths(value: Any, folder: Path) -> Any:
    """Returns JSON in which relative paths to outside of a folder are absolute, so that a copy can use them."""
    if isinstance(value, dict):
        return {name: _absolute_paths(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_absolute_paths(item, folder) for item in value]
    leads_out = isinstance(value, str) and value.startswith("../")
    return str((folder / value).resolve()) if leads_out else value

"""From the scene frame, in which a model works, to the frame of the capture, in which its user measures."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.errors import CaptureError

if TYPE_CHECKING:
    from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs


@dataclass(frozen=True)
class CaptureFrame:
    """The map between the frame of transforms.json and the scene frame: scene = scale · (R · capture + t)."""

    rotation: Float[np.ndarray, "3 3"]
    """R, orthonormal."""
    translation: Float[np.ndarray, "3"]
    """t, in units of the capture."""
    scale: float
    """Scene units per unit of the capture."""

    @classmethod
    def of_outputs(cls, outputs: "DataparserOutputs", data: Path) -> "CaptureFrame":
        """The frame of a parsed capture.

        nerfstudio's dataparser counts what ns-process-data did to the poses (``applied_transform`` and
        ``applied_scale`` of transforms.json) as a part of its own transform; that part is taken out again.

        Args:
            outputs: of the dataparser.
            data: the capture.
        """
        matrix = np.asarray(outputs.dataparser_transform, dtype=np.float64)[:3, :4]
        scale = float(outputs.dataparser_scale)
        applied = _applied(data)
        if applied is not None:
            rotation = np.asarray(applied.get("applied_transform", np.eye(4)[:3]), dtype=np.float64)[:3, :4]
            matrix = matrix @ np.linalg.inv(np.vstack([rotation, [0.0, 0.0, 0.0, 1.0]]))
            scale /= float(applied.get("applied_scale", 1.0))
        return cls(rotation=matrix[:, :3], translation=matrix[:, 3], scale=scale)

    def to_capture(self, points: Float[np.ndarray, "*batch 3"]) -> Float[np.ndarray, "*batch 3"]:
        """Points of the scene frame in the frame and units of transforms.json."""
        return (points / self.scale - self.translation) @ self.rotation

    def to_scene(self, points: Float[np.ndarray, "*batch 3"]) -> Float[np.ndarray, "*batch 3"]:
        """Points of transforms.json's frame in the scene frame."""
        return self.scale * (points @ self.rotation.T + self.translation)

    def directions_to_capture(self, directions: Float[np.ndarray, "*batch 3"]) -> Float[np.ndarray, "*batch 3"]:
        """Directions of the scene frame in that of transforms.json."""
        return directions @ self.rotation

    def describe(self) -> dict[str, object]:
        """The map as JSON."""
        matrix = np.column_stack([self.rotation, self.translation])
        return {"scene_from_capture": matrix.tolist(), "scene_units_per_capture_unit": self.scale}


def _applied(data: Path) -> dict[str, Any] | None:
    """What transforms.json says was done to the poses before; None where the capture has no such file."""
    try:
        meta, folder = read_transforms(data)
    except CaptureError:
        return None
    if "applied_transform" not in meta and (folder / "colmap" / "sparse" / "0").exists():
        # What nerfstudio takes it to be in captures that older versions of it made.
        meta = {**meta, "applied_transform": [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, -1, 0]]}
    return {key: meta[key] for key in ("applied_transform", "applied_scale") if key in meta}

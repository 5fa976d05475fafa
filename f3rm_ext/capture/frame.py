"""Between the scene frame, in which a model works, and the capture's frame, in which its user measures."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.errors import CaptureError

if TYPE_CHECKING:
    from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

Y_UP = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
"""Rotation that turns z up into y up, as glTF demands."""


@dataclass(frozen=True)
class CaptureFrame:
    """The map between the frame of transforms.json and the scene frame: scene = scale · (R · capture + t).

    >>> frame = CaptureFrame(rotation=np.eye(3), translation=np.array([1.0, 0.0, 0.0]), scale=0.5)
    >>> frame.to_scene(np.array([3.0, 0.0, 4.0])).tolist()
    [2.0, 0.0, 2.0]
    >>> frame.to_capture(np.array([2.0, 0.0, 2.0])).tolist()
    [3.0, 0.0, 4.0]
    """

    rotation: Float[np.ndarray, "3 3"]
    """R, orthonormal."""
    translation: Float[np.ndarray, "3"]
    """t, in units of the capture."""
    scale: float
    """Scene units per unit of the capture."""

    @classmethod
    def from_outputs(cls, outputs: "DataparserOutputs", data: Path) -> "CaptureFrame":
        """Returns the frame of a parsed capture.

        nerfstudio's dataparser includes in its transform what ns-process-data did to the poses (``applied_transform``
        and ``applied_scale`` of transforms.json). This takes that part out again.
        """
        matrix = np.asarray(outputs.dataparser_transform, dtype=np.float64)[:3, :4]
        scale = float(outputs.dataparser_scale)
        with contextlib.suppress(CaptureError):  # captures of other dataparsers have no such part
            meta, _ = read_transforms(data)
            matrix = matrix @ np.linalg.inv(np.vstack([meta["applied_transform"], [0.0, 0.0, 0.0, 1.0]]))
            scale /= float(meta.get("applied_scale", 1.0))
        return cls(rotation=matrix[:, :3], translation=matrix[:, 3], scale=scale)

    def to_capture(self, points: Float[np.ndarray, "*batch 3"]) -> Float[np.ndarray, "*batch 3"]:
        """Maps points of the scene frame to the frame and units of transforms.json."""
        return (points / self.scale - self.translation) @ self.rotation

    def to_scene(self, points: Float[np.ndarray, "*batch 3"]) -> Float[np.ndarray, "*batch 3"]:
        """Maps points of the frame of transforms.json to the scene frame."""
        return self.scale * (points @ self.rotation.T + self.translation)

    def directions_to_capture(self, directions: Float[np.ndarray, "*batch 3"]) -> Float[np.ndarray, "*batch 3"]:
        """Maps directions of the scene frame to the frame of transforms.json; lengths stay."""
        return directions @ self.rotation

    def describe(self, decimals: int = 15) -> dict[str, object]:
        """Returns the map as JSON, its matrix with as many decimals."""
        matrix = np.column_stack([self.rotation, self.translation]).round(decimals)
        return {"scene_from_capture": matrix.tolist(), "scene_units_per_capture_unit": self.scale}

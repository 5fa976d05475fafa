"""What a file of any program holds: splats, a mesh or points, and which of its axes points up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import trimesh
from jaxtyping import Float, UInt8

from f3rm_ext.capture.checks import FARTHEST
from f3rm_ext.capture.frame import Y_UP
from f3rm_ext.capture.points import read_point_cloud
from f3rm_ext.errors import ConfigError, MeshError, SplatFileError
from f3rm_ext.html.page import plural
from f3rm_ext.mesh.glb_file import encode_glb
from f3rm_ext.mesh.mesh_files import find_up, read_mesh
from f3rm_ext.splat.files.checks import BadValues
from f3rm_ext.splat.files.formats import READABLE, read_splats
from f3rm_ext.splat.files.packing import importance_order
from f3rm_ext.splat.files.ply import DC, POSITION
from f3rm_ext.splat.files.spz import Axes
from f3rm_ext.splat.gaussians import Gaussians, sh_to_rgb
from f3rm_ext.utils.pictures import to_bytes
from f3rm_ext.utils.ply import PlyTables
from f3rm_ext.utils.provenance import MADE_BY, read_provenance

Up = Literal["z", "y", "-y"]
"""Axis that points up."""
Frame = Literal["capture", "scene"]
TURNS: dict[Up, np.ndarray] = {"z": np.eye(3), "y": Y_UP.T, "-y": Y_UP}
"""Rotations that turn each axis into z."""
MESH_SUFFIXES = (".glb", ".obj", ".ply", ".stl")
_PACKAGE = "f3rm-ext"
_Y_UP_SUFFIXES = (".glb", ".obj")
"""Suffixes of files in which other programs write meshes with y up."""
_SAMPLE = 50_000
_FAINT = 0.1
"""Gaussians of a lower opacity do not count for what the view is of."""
_GREY = 200


@dataclass(frozen=True)
class Content:
    """The content of a file, in the coordinates in which its reader gives it."""

    summary: str
    """How much of what, such as ``44404 Gaussians``."""
    places: Float[np.ndarray, "n 3"]
    """Some of its points, from which the view is chosen; for Gaussians that overlap, the ends of their axes."""
    up: Up
    """Axis of the file that points up, as far as the file tells."""
    turned: Up = "z"
    """Axis of the file that its reader has turned into z already."""
    path: Path = Path()
    record: Mapping[str, Any] = field(default_factory=dict)
    """The record of its origin that the file holds, such as its command and its frame; empty without one."""
    remarks: tuple[str, ...] = ()
    """Sentences on what is not shown as the file has it."""

    @property
    def frame(self) -> Frame:
        """Whether it lies in the frame of the capture or in that of the scene, as far as the file tells."""
        return "scene" if self.record.get("frame") == "scene" else "capture"

    def turn_up(self, up: Up | None = None) -> Float[np.ndarray, "3 3"]:
        """Returns the rotation of the content that makes an axis of the file, :attr:`up` by default, point along z."""
        return TURNS[up or self.up] @ TURNS[self.turned].T


@dataclass(frozen=True)
class SplatContent(Content):
    """Splats."""

    gaussians: Gaussians = field(kw_only=True)
    """Gaussians on the CPU, with colours of SH degree 0."""


@dataclass(frozen=True)
class MeshContent(Content):
    """A mesh."""

    mesh: trimesh.Trimesh = field(kw_only=True)
    is_other_glb: bool = field(kw_only=True)
    """Whether the file is a GLB file of another program."""

    def glb(self) -> bytes:
        """Returns the mesh as a GLB file: that of another program as it is."""
        return self.path.read_bytes() if self.is_other_glb else encode_glb(self.mesh)

    def glb_rotation(self) -> Float[np.ndarray, "3 3"]:
        """Returns the rotation from the GLB file to the content."""
        return TURNS[self.turned if self.is_other_glb else "z"]


@dataclass(frozen=True)
class PointContent(Content):
    """Points without faces."""

    positions: Float[np.ndarray, "n 3"] = field(kw_only=True)
    """Finite."""
    colors: UInt8[np.ndarray, "n 3"] = field(kw_only=True)


def open_content(
    path: Path, *, bad_values: BadValues = "error", spz_axes: Axes = "rub", max_gaussians: int | None = None
) -> Content:
    """Reads a file. A PLY file is recognised by its header, others by the ends of their names and their first bytes.

    Args:
        max_gaussians: of more Gaussians, those that are largest and most opaque are kept.

    Raises:
        ConfigError: there is no such file, it is empty, or its name belongs to no format.
        SplatFileError, MeshError: it is damaged.
    """
    suffix = path.suffix.lower()
    if not path.exists():
        raise ConfigError(f"There is no file {path}: give a file of splats, a mesh or points.")
    if path.is_file() and path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty: copy or export it again.")
    if suffix == ".ply" and path.is_file():
        tables = _open_ply(path)
        vertex = tables.tables.get("vertex")
        if vertex is not None and not {DC[0], "scale_0", "packed_position"} & vertex.kinds.keys():
            has_faces = any(tables.tables[name].count for name in ("face", "tristrips") if name in tables.tables)
            return _read_mesh(path) if has_faces else _read_points(path, tables)
    elif suffix in MESH_SUFFIXES and path.is_file():
        return _read_mesh(path)
    return _read_splats(path, bad_values, spz_axes, max_gaussians)


def _open_ply(path: Path) -> PlyTables:
    """The header of a PLY file, all of whose counts are possible: every row takes a byte or more."""
    tables = PlyTables.open(path)
    size = path.stat().st_size
    for table in tables.tables.values():
        if table.count > size:
            raise MeshError(
                f"{path} claims {table.count} rows of its element {table.name}, but has only {size} bytes: copy or "
                "export it again."
            )
    return tables


def _read_splats(path: Path, bad_values: BadValues, spz_axes: Axes, most: int | None) -> SplatContent:
    try:
        gaussians, info = read_splats(path, bad_values, spz_axes)
    except SplatFileError as error:
        if path.is_file() and not path.name.lower().endswith(READABLE):
            known = ", ".join(dict.fromkeys((*READABLE, *MESH_SUFFIXES)))
            raise ConfigError(f"{path} is neither splats nor a mesh that can be read: give one of {known}.") from error
        raise
    gaussians, remarks, count = gaussians.to_sh_degree(0), list(info.notices), len(gaussians)
    if most is not None and count > most:
        gaussians = gaussians[importance_order(gaussians)[:most]]
        remarks.append(
            f"Only the {most} largest and most opaque of {count} Gaussians are shown; --max-gaussians sets the number."
        )
    if info.sh_degree:
        remarks.append("Colours are those of SH degree 0: what higher degrees add for each direction is not shown.")
    if info.render_mode == "mip":
        remarks.append("The splats were trained with anti-aliasing, which the viewer lacks: small ones look bold.")
    said = {key: value for key, _, value in (comment.partition(": ") for comment in info.comments)}
    is_z_up = said.get(MADE_BY, "").startswith(_PACKAGE) or said.get("Vertical Axis") == "z"  # the latter of ns-export
    return SplatContent(
        plural(count, "Gaussian"),
        _sample(_outline(gaussians)),
        "z" if is_z_up else "-y",
        path=path,
        record=said,
        remarks=tuple(remarks),
        gaussians=gaussians,
    )


def _outline(gaussians: Gaussians) -> Float[np.ndarray, "n 3"]:
    """Returns the centres; where these lie closer together than Gaussians are large, the ends of two standard
    deviations along their axes."""
    opaque = gaussians[gaussians.alphas() > _FAINT]
    shown = opaque if len(opaque) else gaussians
    means, sizes = shown.means.double(), shown.sizes().double()
    apart = (means - means.median(dim=0).values).norm(dim=1)
    if apart.median() < sizes.amax(dim=1).median():
        axes = 2 * (shown.rotations().double() * sizes[:, None]).mT
        means = torch.cat([means[:, None] + axes, means[:, None] - axes]).flatten(0, 1)
    return means.numpy()


def splat_colors(gaussians: Gaussians) -> UInt8[np.ndarray, "gaussians 3"]:
    """Returns the colours of SH degree 0."""
    return to_bytes(sh_to_rgb(gaussians.features_dc).clamp(0, 1).numpy())


def _read_mesh(path: Path) -> MeshContent:
    is_glb = path.suffix.lower() == ".glb"
    mesh, record = read_mesh(path), read_provenance(path)
    ours = str(record.get(MADE_BY, "")).startswith(_PACKAGE)
    turned: Up = find_up(path)
    up: Up = turned if ours else "y" if path.suffix.lower() in _Y_UP_SUFFIXES else "z"
    return MeshContent(
        plural(len(mesh.faces), "triangle"),
        _sample(np.asarray(mesh.vertices)),
        up,
        turned,
        path=path,
        record=record,
        mesh=mesh,
        is_other_glb=is_glb and not ours,
    )


def _read_points(path: Path, tables: PlyTables) -> PointContent:
    table = tables.tables["vertex"]
    if not set(POSITION) <= set(table.kinds) or not table.count:
        raise MeshError(f"{path} has no points: its element vertex needs x, y and z and one row or more.")
    positions, colors = read_point_cloud(path, _GREY)
    finite = (np.abs(positions) <= FARTHEST).all(axis=1)
    if not finite.any():
        raise MeshError(f"{path} has no point whose coordinates are numbers up to {FARTHEST:g}: export it again.")
    left = int((~finite).sum())
    return PointContent(
        plural(table.count, "point"),
        _sample(positions[finite]),
        "z",
        path=path,
        record=read_provenance(path),
        remarks=(f"{left} points are left out, whose coordinates are NaN or too large.",) * bool(left),
        positions=positions[finite],
        colors=colors[finite],
    )


def _sample(places: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
    return np.asarray(places[:: max(1, len(places) // _SAMPLE)], np.float64)

"""Files of meshes: PLY, OBJ and GLB with vertex colours; also reads points and NPZ files of truths."""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import trimesh
from trimesh.exchange.obj import export_obj
from trimesh.visual.color import ColorVisuals

from f3rm_ext.capture.checks import FARTHEST
from f3rm_ext.capture.frame import Y_UP, CaptureFrame
from f3rm_ext.errors import MeshError, reason_of
from f3rm_ext.mesh.glb_file import encode_mesh, load_scene, read_generator, texture_place
from f3rm_ext.utils.json_shape import parse_json
from f3rm_ext.utils.output_file import replace_file, require_writable
from f3rm_ext.utils.provenance import comment_lines, read_provenance, require_ours, sign_png

SUFFIXES = (".ply", ".obj", ".glb")
MAKERS = (
    "f3rm-ext export mesh",
    "f3rm-ext export texture",
    "f3rm-ext export refined-mesh",
    "f3rm-ext export part",
    "f3rm-ext query",
)
"""Commands whose files may be replaced; others are kept."""
Frame = Literal["capture", "scene"]
Up = Literal["z", "y"]
_SAME_FRAME = 1e-4
"""By how much entries of two transforms may differ: files round them."""
Corner = tuple[float, float, float] | None
_Y_UP = np.eye(4)
_Y_UP[:3, :3] = Y_UP


@dataclass(frozen=True)
class SurfacePoints:
    """Points on a surface."""

    positions: np.ndarray
    """(points, 3), float64."""
    normals: np.ndarray | None
    """(points, 3), unit vectors, float64; None where they are not known."""

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, which: np.ndarray) -> "SurfacePoints":
        """Returns some of the points, by index or mask."""
        return SurfacePoints(self.positions[which], None if self.normals is None else self.normals[which])


def box_mask(points: np.ndarray, low: Corner, high: Corner) -> np.ndarray:
    """Returns which points (points, 3) lie in a box; None for no limit."""
    return ((points >= (low or (-np.inf,) * 3)) & (points <= (high or (np.inf,) * 3))).all(axis=1)


def vertex_colors(mesh: trimesh.Trimesh) -> np.ndarray | None:
    """Returns the colours of a mesh's vertices, (vertices, 3) uint8; None where it has none."""
    visual = mesh.visual
    if isinstance(visual, ColorVisuals) and visual.kind == "vertex":
        return np.asarray(visual.vertex_colors)[:, :3]
    return None


def find_frame(
    path: Path, frame: Literal["auto"] | Frame, find_capture: Callable[[], CaptureFrame] | None = None
) -> Frame:
    """Returns the frame of a mesh file: the given one, or for auto what the file says, else capture.

    Args:
        find_capture: gives the map between the frames; called where the file has one.

    Raises:
        MeshError: the file says that it is in the scene frame of another capture.
    """
    if frame != "auto":
        return frame
    record = read_provenance(path)
    if record.get("frame") != "scene":
        return "capture"
    if find_capture is not None and "scene_from_capture" in record:
        require_same_frame(path, record, find_capture())
    return "scene"


def require_same_frame(path: Path, record: Mapping[str, Any], capture: CaptureFrame) -> None:
    """Raises MeshError where the provenance of a file has another map between frames."""
    if not same_frame(record, capture):
        raise MeshError(
            f"{path} is in the scene frame of another capture, or of this one with other options of its dataparser: "
            "give the run that it was made of with --load-config, or a file in the frame of the capture."
        )


def same_frame(record: Mapping[str, Any], capture: CaptureFrame) -> bool:
    """Returns whether a provenance has this map between frames, or none."""
    if "scene_from_capture" not in record:
        return True
    own: dict[str, Any] = capture.describe()
    for key in ("scene_from_capture", "scene_units_per_capture_unit"):
        entry, expected = record.get(key), np.asarray(own[key])
        try:  # entries of PLY and OBJ files are text
            values = np.array(parse_json(entry, Any) if isinstance(entry, str) else entry, dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            return False
        if values.shape != expected.shape or not np.allclose(values, expected, atol=_SAME_FRAME):
            return False
    return True


def require_format(path: Path) -> None:
    """Raises MeshError unless the name ends in one of :data:`SUFFIXES`."""
    if path.suffix.lower() not in SUFFIXES:
        raise MeshError(f"--out is {path}, but meshes are written as {', '.join(SUFFIXES)}: choose such a name.")


def require_replaceable(path: Path, *, textured: bool = False) -> None:
    """Raises ConfigError where :func:`write_mesh` would replace a file that no command of :data:`MAKERS` wrote."""
    side_files = texture_files(path) if textured and path.suffix.lower() == ".obj" else ()
    for file in (path, *side_files):
        require_ours(file, MAKERS)


def texture_files(path: Path) -> tuple[Path, Path]:
    """Returns the .mtl and the .png beside an OBJ file. Names in MTL files end at a space."""
    return path.with_suffix(".mtl"), path.with_name(path.stem.replace(" ", "_") + ".png")


def require_output(path: Path, *, textured: bool = False) -> None:
    """Raises MeshError or ConfigError unless :func:`write_mesh` may write a file of this name and can."""
    require_format(path)
    require_replaceable(path, textured=textured)
    require_writable(path)


def axis_up(path: Path, up: Literal["auto", "z", "y"]) -> Up:
    """Returns the axis that points up in a file; auto is y for .glb, whose readers expect it, else z."""
    return ("y" if path.suffix.lower() == ".glb" else "z") if up == "auto" else up


def find_up(path: Path) -> Up:
    """Returns the axis that points up in a mesh file: what the file says of itself, else y for .glb and .gltf, as glTF
    demands, and z for others. Trimesh, which makes the meshes of :mod:`f3rm_ext.api`, leaves coordinates as they are.
    """
    said = read_provenance(path).get("up")
    if said is not None or path.suffix.lower() not in (".glb", ".gltf"):
        return "y" if said == "y" else "z"
    return "z" if "trimesh" in read_generator(path) else "y"


def write_mesh(path: Path, mesh: trimesh.Trimesh, provenance: Mapping[str, object], up: Up = "z") -> None:
    """Writes a mesh with its vertex colours or its texture in the format that the name's suffix chooses.

    OBJ gets an .mtl and a .png of the same name for a texture, see :func:`texture_files`.

    Args:
        path: ends in one of :data:`SUFFIXES`. A file of that name remains whole until the new one is.
        mesh: z up; triangles. The material of its texture gets the name of the file.
        provenance: goes into the file's comments (PLY, OBJ) or its asset's extras (GLB).
        up: axis that points up in the file; y is what glTF viewers expect.

    Raises:
        MeshError: the suffix is unknown.
        ConfigError: the file cannot be written.
    """
    require_format(path)
    record, kind = {**provenance, "up": up}, path.suffix.lower()
    attribute, material = texture_place(mesh)
    if attribute:
        # trimesh names the picture of an OBJ file after the material, and writes it in the format of its own file.
        material.name = texture_files(path)[1].stem
        if kind == ".obj":
            image = getattr(material, attribute)
            setattr(material, attribute, image.convert("RGBA" if "A" in image.mode else "RGB"))
    if up == "y":
        mesh = mesh.copy()
        mesh.apply_transform(_Y_UP)
    side_files: dict[str, bytes] = {}
    if kind == ".ply":
        body: bytes = mesh.export(file_type="ply")  # type: ignore[assignment]
        first, rest = body.split(b"comment ", 1)
        lines = "".join(f"comment {line}\n" for line in comment_lines(record))
        body = first + lines.encode() + b"comment " + rest
    elif kind == ".obj":
        header = "\n# ".join(comment_lines(record))
        library = path.with_suffix(".mtl").name
        text, side_files = export_obj(mesh, header=header, return_texture=True, mtl_name=library)  # type: ignore[misc]
        side_files = {
            # trimesh's grey of .4 would darken the texture where programs multiply the two.
            name: sign_png(data, record) if name.endswith(".png") else re.sub(rb"(?m)^Kd .*$", b"Kd 1 1 1", data)
            for name, data in side_files.items()
        }
        body = text.encode(errors="backslashreplace")  # type: ignore[union-attr]
    else:
        body = encode_mesh(mesh, record)
    # The files beside take their names before the one that refers to them.
    with contextlib.ExitStack() as stack:
        for name, data in {path.name: body, **side_files}.items():
            stack.enter_context(replace_file(path.with_name(name))).write(data)


def read_mesh(path: Path) -> trimesh.Trimesh:
    """Reads a mesh, z up: PLY, OBJ, GLB, STL …, or NPZ with ``vertices`` and ``faces``.

    Raises MeshError as :func:`read_surface`, and where there are no faces.
    """
    surface = read_surface(path)
    if not isinstance(surface, trimesh.Trimesh):
        raise MeshError(f"{path} has points but no faces, so it is no mesh: give a mesh.")
    return surface


def read_surface(path: Path) -> trimesh.Trimesh | SurfacePoints:
    """Reads a mesh, or points with or without normals: PLY, or NPZ with ``points`` and perhaps ``normals``.

    Raises:
        MeshError: there is no such file, it cannot be read, or it has neither faces nor points.
    """
    if not path.is_file():
        raise MeshError(f"There is no file {path}: give a mesh (.ply, .obj, .glb, .npz) or points (.ply, .npz).")
    try:
        surface = _load_npz(path) if path.suffix.lower() == ".npz" else _load_with_trimesh(path)
    except MeshError:
        raise
    except Exception as error:  # the readers raise whatever comes
        raise MeshError(
            f"{path} cannot be read ({type(error).__name__}: {reason_of(error)}): it may be damaged or of a format "
            "that is not supported, so write it again as .ply."
        ) from error
    is_mesh = isinstance(surface, trimesh.Trimesh)
    places = np.asarray(surface.vertices if is_mesh else surface.positions)
    if not len(places):
        raise MeshError(f"{path} holds no points and no faces: choose another file.")
    if not (np.abs(places) <= FARTHEST).all():
        raise MeshError(f"{path} has vertices that are NaN, infinite or beyond {FARTHEST:g}: remove them first.")
    faces = np.asarray(surface.faces) if is_mesh else np.zeros((0, 3), int)
    if faces.size and not (0 <= faces.min() and faces.max() < len(places)):
        raise MeshError(
            f"{path} has triangles with corners from {faces.min()} to {faces.max()}, but its vertices are 0 to "
            f"{len(places) - 1}: write it again."
        )
    return surface


def _load_npz(path: Path) -> trimesh.Trimesh | SurfacePoints:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        if "faces" in archive:
            vertices, faces = archive["vertices"], archive["faces"]
            if faces.dtype.kind not in "iu" or faces.shape[1:] != (3,) or vertices.shape[1:] != (3,):
                raise MeshError(
                    f"{path} has vertices of shape {vertices.shape} and faces of shape {faces.shape} ({faces.dtype}): "
                    "write (n, 3) coordinates and (m, 3) whole numbers."
                )
            return trimesh.Trimesh(vertices.astype(np.float64), faces.astype(np.int64), process=False)
        if "points" not in archive:
            raise MeshError(
                f"{path} has the arrays {', '.join(archive.files)}: give one with vertices and faces, or with points."
            )
        return surface_points(archive["points"], archive["normals"] if "normals" in archive else None)


def _load_with_trimesh(path: Path) -> trimesh.Trimesh | SurfacePoints:
    is_glb = path.suffix.lower() == ".glb"
    surface = load_scene(path) if is_glb else trimesh.load(path, process=False, maintain_order=True)
    if isinstance(surface, trimesh.Scene):
        meshes = [part for part in surface.dump() if isinstance(part, trimesh.Trimesh)]
        surface = trimesh.util.concatenate(meshes) if meshes else trimesh.Trimesh()
    if isinstance(surface, trimesh.Trimesh) and len(surface.faces):
        if find_up(path) == "y":
            surface.apply_transform(np.linalg.inv(_Y_UP))
        return surface
    normals = None
    columns = surface.metadata.get("_ply_raw", {}).get("vertex", {}).get("data")
    if columns is not None and {"nx", "ny", "nz"} <= set(getattr(columns, "dtype", np.dtype([])).names or columns):
        normals = np.stack([np.asarray(columns[name]).reshape(-1) for name in ("nx", "ny", "nz")], axis=1)
    return surface_points(np.asarray(getattr(surface, "vertices", np.zeros((0, 3)))), normals)


def surface_points(positions: np.ndarray, normals: np.ndarray | None) -> SurfacePoints:
    """Returns points whose normals are made unit vectors; without, where all are zero, as in files of splats.

    Raises ValueError where shapes are not (points, 3).
    """
    if positions.shape[1:] != (3,) or (normals is not None and normals.shape != positions.shape):
        raise ValueError(f"points of shape {positions.shape}")
    if normals is not None:
        normals = np.nan_to_num(normals.astype(np.float64))
        normals = normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    return SurfacePoints(positions.astype(np.float64), None if normals is None or not normals.any() else normals)

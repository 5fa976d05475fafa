"""Texture coordinates of a mesh by xatlas, and the place on the surface of every texel."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import trimesh
from jaxtyping import Float, Int
from scipy.ndimage import binary_dilation
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import ConfigError, MeshError, reason_of
from f3rm_ext.mesh.box_contraction import BoxContraction
from f3rm_ext.utils.open3d_library import RayCaster

LARGEST_PX = 8192
"""Longest side of a texture."""
_ROWS_AT_ONCE = 256
_GROWN = 1.3
"""By how much the charts must exceed a texture of free size for its side to be doubled."""
PIECE_FACES = 5000
"""Triangles that are cut into charts together. The time of xatlas grows with the square of the charts of a piece."""
_LONGEST_BOUNDARY = 200.0
"""Longest boundary of a chart, in sides of squares as large as the median triangle. xatlas looks at all of a chart's
boundary for each triangle that it adds: without a limit, charts of trained meshes take three times as long."""
_SMALLER, _SMALLEST_SCALE = 0.98, 0.2
"""Largest factor on the scale of the charts at each new try to fit them, and the smallest scale."""


@dataclass(frozen=True)
class Texels:
    """Places on a surface to be coloured."""

    faces: Int[np.ndarray, " texels"]
    """Triangle of each."""
    weights: Float[np.ndarray, "texels 2"]
    """Barycentric weights of the triangle's second and third corner."""
    places: Int[np.ndarray, " texels"]
    """Indices in the flattened texture."""

    def __len__(self) -> int:
        return len(self.faces)


@dataclass(frozen=True)
class Atlas:
    """A mesh with texture coordinates: vertices are doubled where charts meet."""

    mesh: trimesh.Trimesh
    """Its ``visual`` holds the coordinates; v points up, as in OBJ."""
    source: Int[np.ndarray, " verts"]
    """For each vertex, the one of the mesh before it was cut into charts."""
    size_px: int
    """Side of the texture."""
    charts: int

    @property
    def pixels(self) -> Float[np.ndarray, "verts 2"]:
        """Column and row of the vertices in the texture; the centre of the first texel is at 0.5."""
        visual = self.mesh.visual
        assert isinstance(visual, TextureVisuals)
        return to_pixels(visual.uv, self.size_px, self.size_px)


def to_pixels(uv: Float[np.ndarray, "n 2"], width: int, height: int) -> Float[np.ndarray, "n 2"]:
    """Returns columns and rows in a picture from texture coordinates whose v points up."""
    return np.stack([uv[:, 0] * width, (1 - uv[:, 1]) * height], axis=1)


def unwrap(
    mesh: trimesh.Trimesh,
    size_px: int,
    padding_px: int,
    grow: bool = False,
    space: BoxContraction | None = None,
) -> Atlas:
    """Cuts a mesh into charts and lays them out in a square texture.

    Args:
        mesh: triangles; vertices at the same place are joined.
        grow: double the side until the charts fit, up to :data:`LARGEST_PX`.
        space: give charts the sizes that they have in contracted space; by default those in the scene.

    Raises:
        MeshError: the charts do not fit.
        ConfigError: xatlas is not installed.
    """
    mesh = weld(mesh)
    packed = _new_atlas()
    # xatlas leaves out triangles with an area below 1e-7, whatever the units.
    sized = mesh if space is None else contract_mesh(mesh, space)
    enlarged = ((sized.vertices - sized.bounds[0]) / np.sqrt(np.median(sized.area_faces))).astype(np.float32)
    corners = []
    for piece in pieces(mesh, PIECE_FACES):
        used, faces = np.unique(mesh.faces[piece], return_inverse=True)
        packed.add_mesh(enlarged[used], faces.reshape(-1, 3).astype(np.uint32))
        corners.append(used)
    _pack(packed, size_px, padding_px)
    source, faces, uv = _join(packed, corners)
    # xatlas only aims at the size. The charts are packed once more, as small as they must be to fit.
    side = max(packed.width, packed.height)
    while grow and side > _GROWN * size_px and size_px < LARGEST_PX:
        size_px *= 2
    charts, places = packed.chart_count, uv * np.array([packed.width, packed.height], np.float32)
    scale, smallest = size_px / side, _SMALLEST_SCALE * size_px / side
    while side > size_px:
        if scale < smallest:
            raise MeshError(
                f"The mesh falls into {charts} charts, which do not fit into a texture of {size_px} × {size_px} with a "
                f"padding of {padding_px}: raise --texture-size, lower --padding, or simplify the mesh with "
                "`f3rm-ext export mesh --vertices`."
            )
        packed = _new_atlas()
        packed.add_uv_mesh(places, faces)
        _pack(packed, size_px, padding_px, scale)
        uv = packed[0][2]
        side = max(packed.width, packed.height)
        scale *= min(_SMALLER, size_px / side)
    uv = uv.astype(np.float64) * np.array([packed.width, packed.height]) / size_px
    cut = trimesh.Trimesh(mesh.vertices[source], faces.astype(np.int64), process=False)
    cut.visual = TextureVisuals(uv=np.stack([uv[:, 0], 1 - uv[:, 1]], axis=1))
    return Atlas(cut, source.astype(np.int64), size_px, int(charts))


def pieces(mesh: trimesh.Trimesh, most_faces: int) -> list[Int[np.ndarray, " faces"]]:
    """Divides faces by their places, with cuts across the longest side of what is divided, into equal parts."""
    centers, parts, queue = mesh.triangles_center, [], [np.arange(len(mesh.faces))]
    while queue:
        faces = queue.pop()
        if len(faces) <= most_faces:
            parts.append(np.sort(faces))
            continue
        axis = np.ptp(centers[faces], axis=0).argmax()
        queue.extend(np.array_split(faces[np.argsort(centers[faces, axis], kind="stable")], 2))
    return parts


def contract_mesh(mesh: trimesh.Trimesh, space: BoxContraction) -> trimesh.Trimesh:
    """Returns the triangles in contracted space, where the innermost box has the size that it has in the scene."""
    return trimesh.Trimesh(space.contract(np.asarray(mesh.vertices)) * space.radius, mesh.faces, process=False)


def weld(mesh: trimesh.Trimesh) -> trimesh.Trimesh:
    """Returns the mesh with vertices at the same place joined, and without triangles that have no area."""
    mesh = trimesh.Trimesh(mesh.vertices, mesh.faces, process=False)
    mesh.merge_vertices()
    mesh.update_faces(mesh.area_faces > 0)
    mesh.remove_unreferenced_vertices()
    if not len(mesh.faces):
        raise MeshError("All triangles of the mesh have no area: give another mesh.")
    return mesh


def vertex_texels(mesh: trimesh.Trimesh) -> Texels:
    """Returns one place for each vertex, to colour vertices without a texture."""
    faces, vertices = np.zeros(len(mesh.vertices), np.int32), np.arange(len(mesh.vertices))
    for corner in range(3):
        faces[mesh.faces[:, corner]] = np.arange(len(mesh.faces))
    is_corner = mesh.faces[faces] == vertices[:, None]
    return Texels(faces, is_corner[:, 1:].astype(np.float32), vertices)


def texture_texels(atlas: Atlas) -> Texels:
    """Returns the texels on the charts, and those beside them that bilinear lookups on the charts read.

    A texel beside a chart has the place on the chart that is nearest to it.
    """
    size, pixels = atlas.size_px, atlas.pixels
    flat = np.concatenate([pixels, np.zeros((len(pixels), 1))], axis=1).astype(np.float32)
    caster = RayCaster(flat, atlas.mesh.faces)
    face = np.full((size, size), -1, np.int32)
    weights = np.zeros((size, size, 2), np.float32)
    columns = np.arange(size, dtype=np.float32) + 0.5
    for first in range(0, size, _ROWS_AT_ONCE):
        rows = np.arange(first, min(first + _ROWS_AT_ONCE, size), dtype=np.float32) + 0.5
        above = np.stack(np.broadcast_arrays(columns, rows[:, None], np.float32(1)), axis=-1)
        hit = caster.cast(above, np.array([0.0, 0.0, -1.0]))
        block = slice(first, first + len(rows))
        face[block] = np.where(np.isfinite(hit["t_hit"]), hit["primitive_ids"].astype(np.int64), -1)
        weights[block] = hit["primitive_uvs"]
    margin = _margin_texels(face >= 0, atlas)
    rows, columns = np.nonzero(margin)
    for part in np.array_split(np.arange(len(rows)), max(1, len(rows) // 500_000)):
        nearest = caster.nearest(np.stack([columns[part] + 0.5, rows[part] + 0.5, np.zeros(len(part))], axis=1))
        face[rows[part], columns[part]], weights[rows[part], columns[part]] = nearest[:2]
    places = np.flatnonzero(face.reshape(-1) >= 0)
    return Texels(face.reshape(-1)[places], weights.reshape(-1, 2)[places], places)


def samples_along(
    lengths: Float[np.ndarray, " edges"],
) -> tuple[Int[np.ndarray, " samples"], Float[np.ndarray, "samples 1"]]:
    """Returns samples about a texel apart along edges: the edge of each, and where it lies on it, from 0 to 1."""
    counts = np.ceil(lengths).astype(int) + 1
    edge = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts)
    return edge, ((step + 0.5) / counts[edge])[:, None]


def _pack(atlas: Any, size_px: int, padding_px: int, texels_per_unit: float = 0.0) -> None:
    """Cuts what was added into charts, unless it has some, and packs them.

    Without a scale, xatlas guesses the one that fits; with a scale, the texture has the size that this takes.
    """
    options = _xatlas().PackOptions()
    options.padding, options.bilinear = padding_px, True
    options.resolution, options.texels_per_unit = 0 if texels_per_unit else size_px, texels_per_unit
    charts = _xatlas().ChartOptions()
    charts.max_boundary_length = _LONGEST_BOUNDARY
    atlas.generate(charts, options, False)


def _join(packed: Any, corners: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources of the vertices, faces and texture coordinates of all pieces together."""
    sources, faces, uvs, count = [], [], [], 0
    for index, used in enumerate(corners):
        source, piece, uv = packed[index]
        sources.append(used[source])
        faces.append(piece + np.uint32(count))
        uvs.append(uv)
        count += len(source)
    return np.concatenate(sources), np.concatenate(faces), np.concatenate(uvs)


def _margin_texels(inside: np.ndarray, atlas: Atlas) -> np.ndarray:
    """Texels that are not on a chart but next to one; charts may be too thin to have texels."""
    touched, edges = inside.copy(), atlas.mesh.edges_sorted
    rims = edges[trimesh.grouping.group_rows(edges, require_count=1)]
    begin, end = np.moveaxis(atlas.pixels[rims], 1, 0)
    edge, share = samples_along(np.linalg.norm(end - begin, axis=1))
    points = begin[edge] * (1 - share) + end[edge] * share
    column, row = np.clip(np.floor(points).astype(int), 0, len(inside) - 1).T
    touched[row, column] = True
    return binary_dilation(touched, np.ones((5, 5), bool)) & ~inside


def _new_atlas() -> Any:
    """Returns an empty atlas of xatlas, which is never destroyed.

    The destructor signals and joins the threads of the atlas. A thread that is about to sleep misses the signal, and
    the destructor then waits for ever, holding the GIL. What stays is idle threads, and the memory of the charts.
    """
    atlas = _xatlas().Atlas()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(atlas))
    return atlas


def _xatlas() -> Any:
    try:
        import xatlas
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"xatlas cannot be imported ({reason_of(error)}), and textures need it: `pip install xatlas`."
        ) from error
    return xatlas

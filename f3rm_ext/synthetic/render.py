"""Rendering: traces mirror-like reflections and looks up all other light."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from f3rm_ext.synthetic.lighting import Hits, sun_reaches
from f3rm_ext.synthetic.materials import MaterialTable
from f3rm_ext.synthetic.mesh import Mesh
from f3rm_ext.synthetic.patterns import pattern_colors
from f3rm_ext.utils.open3d_library import RayCaster
from f3rm_ext.utils.pictures import to_bytes, to_srgb

_PIXELS = 1 << 18
"""Pixels rendered at once."""
_SUN_WIDTH = 0.007
"""Diameter of the sun, radians."""


class LitScene(NamedTuple):
    """Everything that a view is rendered from."""

    caster: RayCaster
    mesh: Mesh
    materials: MaterialTable
    light: np.ndarray
    """(verts, 3) float64: irradiance / π without the sun's direct light."""
    sun_light: np.ndarray
    """(verts, 3) float64: the sun's direct light, as reflections show it."""
    sun: np.ndarray
    """(5, 3) float64, see :class:`~f3rm_ext.synthetic.lighting.Lights`."""


class View(NamedTuple):
    """What one camera sees; all arrays are (h, w, …)."""

    rgb: np.ndarray
    """uint8 sRGB, supersampled."""
    depth: np.ndarray
    """float64 metres along the optical axis (z-depth) at pixel centres; 0 where nothing is hit."""
    normals: np.ndarray
    """float64 (h, w, 3): unit normals at pixel centres, world frame, towards the camera; 0 where nothing is hit."""
    labels: np.ndarray
    """uint8 object ids at pixel centres; 0 where nothing is hit."""


def _shading_normals(mesh: Mesh, hits: Hits) -> Float[np.ndarray, "hits 3"]:
    """Smooth unit normals at hits, turned towards where the rays came from."""
    normals = hits.interpolate(mesh, mesh.normals)
    return normals / (np.linalg.norm(normals, axis=1) * np.where(hits.front, 1, -1))[:, None]


def _radiance(
    scene: LitScene,
    origin: Float[np.ndarray, "3"],
    directions: Float[np.ndarray, "rays 3"],
    bounces: int,
    tilt: tuple[float, float],
    rng: np.random.Generator,
) -> Float[np.ndarray, "rays 3"]:
    """Linear RGB that arrives along rays (unit directions)."""
    mesh, surface = scene.mesh, scene.materials.surface
    arriving, through = np.zeros(directions.shape), np.ones(directions.shape)
    origins, left = np.broadcast_to(origin, directions.shape), np.arange(len(directions))
    for bounce in range(bounces + 1):
        hits = Hits.cast(scene.caster, origins, directions)
        left, through, directions = left[hits.rays], through[hits.rays], directions[hits.rays]
        materials = mesh.material[hits.faces]
        gloss, metal, roughness, emission = surface[materials].T[..., None]
        colors = pattern_colors(scene.materials, materials, hits.interpolate(mesh, mesh.coords))
        normals = _shading_normals(mesh, hits)
        points = origins[hits.rays] + hits.distance * directions + 1e-4 * normals
        light = hits.interpolate(mesh, scene.light)
        if bounce:
            light += hits.interpolate(mesh, scene.sun_light)
        else:
            facing = normals @ scene.sun[0]
            lit = np.flatnonzero(facing > 0)
            # Start above the facets: their smooth normals may face a sun that the facets turn away from.
            lit = lit[sun_reaches(scene.caster, scene.sun, points[lit] + 0.002 * normals[lit], tilt)]
            light[lit] += (facing[lit] * np.minimum(1, 6 * facing[lit]))[:, None] * scene.sun[1]
        cosine = (directions * normals).sum(axis=1, keepdims=True)
        # Fresnel's reflection by Schlick (1994), less of it on rough surfaces.
        grazing = (1 - np.maximum(0, -cosine)) ** 5 * (1 - np.minimum(1, 3 * roughness))
        mirror = np.where(metal > 0, colors, gloss)
        mirror = np.where((gloss > 0) & (emission == 0), mirror + (1 - mirror) * grazing, 0)
        scattered = np.where((metal > 0) & (gloss > 0), bounce == bounces, 1 - mirror)
        arriving[left] += through * colors * np.where(emission > 0, emission, scattered * light)
        through = through * mirror
        go = np.flatnonzero(through.max(axis=1) >= 0.01)
        left, through, roughness = left[go], through[go], roughness[go]
        directions = directions[go] - 2 * cosine[go] * normals[go]
        directions += roughness * rng.uniform(-1, 1, directions.shape)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        origins = points[go]
    return arriving


def _film(x: np.ndarray) -> np.ndarray:
    """Narkowicz's fit (2015) of the ACES film curve: linear radiance to linear display value in 0-1."""
    return np.clip(x * (2.51 * x + 0.03) / (x * (2.43 * x + 0.59) + 0.14), 0, 1)


def render(
    scene: LitScene,
    c2w: np.ndarray,
    width_px: int,
    height_px: int,
    focal_px: float,
    samples: int = 2,
    bounces: int = 2,
) -> View:
    """Renders one view of the scene.

    Args:
        c2w: (3 or 4, 4) camera to world, OpenGL convention, metres.
        height_px: Image height; the principal point is the middle of the image.
    """
    count = height_px * width_px
    view = View(np.zeros((count, 3), np.uint8), np.zeros(count), np.zeros((count, 3)), np.zeros(count, np.uint8))
    origin, offsets = c2w[:3, 3], (np.arange(samples) + 0.5) / samples
    for pixels in np.array_split(np.arange(count), count // _PIXELS + 1):
        row, column = np.divmod(pixels, width_px)

        def rays(across: float, down: float, row: np.ndarray = row, column: np.ndarray = column) -> np.ndarray:
            """Directions of length 1 along the optical axis."""
            x, y = (column + across - 0.5 * width_px) / focal_px, (row + down - 0.5 * height_px) / focal_px
            return np.stack([x, -y, -np.ones_like(x)], axis=1) @ c2w[:3, :3].T

        hits = Hits.cast(scene.caster, origin, rays(0.5, 0.5))
        covered = pixels[hits.rays]
        view.depth[covered], view.labels[covered] = hits.distance[:, 0], scene.mesh.label[hits.faces]
        view.normals[covered] = _shading_normals(scene.mesh, hits)
        total = np.zeros((len(pixels), 3))
        for number, (down, across) in enumerate((y, x) for y in offsets for x in offsets):
            directions = rays(across, down)
            directions /= np.linalg.norm(directions, axis=1, keepdims=True)
            # Each sample of a pixel sees another part of the sun, the same part in every pixel.
            tilt = _SUN_WIDTH * (across - 0.5), _SUN_WIDTH * (down - 0.5)
            rng = np.random.default_rng([int(pixels[0]), number])
            total += _film(_radiance(scene, origin, directions, bounces, tilt, rng))
        view.rgb[pixels] = to_bytes(to_srgb(total / samples**2))
    return View(*(values.reshape(height_px, width_px, *values.shape[1:]) for values in view))

"""The rendering kernel: one thread per row. It traces mirror-like reflections and looks up all other light."""

import math
from typing import NamedTuple, no_type_check

import numpy as np
from numba import njit, prange

from f3rm_ext.synthetic.kernels import FAST, STACK_SIZE, Tree, cast
from f3rm_ext.synthetic.lighting import Geometry, sun_reaches
from f3rm_ext.synthetic.materials import MaterialTable
from f3rm_ext.synthetic.patterns import _hash, pattern_color


class LitScene(NamedTuple):
    """Everything that a view is rendered from."""

    tree: Tree
    geometry: Geometry
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


@no_type_check
@njit(cache=True)
def material_color(materials, m, x, y, z):
    """Colour of material m at texture coordinates (x, y, z), linear RGB."""
    c, p = materials.colors[m], materials.params[m]
    return pattern_color(
        materials.pattern[m],
        x,
        y,
        z,
        (c[0, 0], c[0, 1], c[0, 2]),
        (c[1, 0], c[1, 1], c[1, 2]),
        (c[2, 0], c[2, 1], c[2, 2]),
        p[0],
        p[1],
        p[2],
        p[3],
    )


@no_type_check
@njit(cache=True, parallel=True)
def _vertex_colors(materials, vertex_material, coords, out):
    for i in prange(coords.shape[0]):
        r, g, b = material_color(materials, vertex_material[i], coords[i, 0], coords[i, 1], coords[i, 2])
        out[i, 0], out[i, 1], out[i, 2] = r, g, b


def vertex_colors(materials: MaterialTable, vertex_material: np.ndarray, coords: np.ndarray) -> np.ndarray:
    """Returns the albedo (or emitted colour) of each vertex, linear RGB (verts, 3)."""
    out = np.empty((len(coords), 3))
    _vertex_colors(materials, vertex_material, coords, out)
    return np.clip(out, 0.0, 1.0)


@no_type_check
@njit(cache=True, fastmath=FAST, error_model="numpy")
def _shading_normal(tree, geometry, hit, bu, bv, dx, dy, dz):
    """Smooth unit normal at a hit, turned towards where the ray came from."""
    i0, i1, i2 = geometry.corners[hit, 0], geometry.corners[hit, 1], geometry.corners[hit, 2]
    bw = 1.0 - bu - bv
    n = geometry.normals
    nx = bw * n[i0, 0] + bu * n[i1, 0] + bv * n[i2, 0]
    ny = bw * n[i0, 1] + bu * n[i1, 1] + bv * n[i2, 1]
    nz = bw * n[i0, 2] + bu * n[i1, 2] + bv * n[i2, 2]
    scale = 1.0 / math.sqrt(nx * nx + ny * ny + nz * nz)
    e = tree.triangles[hit]
    facing = (e[4] * e[8] - e[5] * e[7]) * dx + (e[5] * e[6] - e[3] * e[8]) * dy + (e[3] * e[7] - e[4] * e[6]) * dz
    if facing > 0.0:
        scale = -scale
    return nx * scale, ny * scale, nz * scale


@no_type_check
@njit(cache=True, fastmath=FAST, error_model="numpy")
def _radiance(
    tree, geometry, materials, light, sun_light, sun, ox, oy, oz, dx, dy, dz, bounces, seed, tilt_u, tilt_v, stack
):
    """Linear RGB that arrives along a ray (unit direction)."""
    tr, tg, tb = 1.0, 1.0, 1.0
    r, g, b = 0.0, 0.0, 0.0
    for bounce in range(bounces + 1):
        t, hit, bu, bv = cast(tree, ox, oy, oz, dx, dy, dz, 1e9, False, stack)
        if hit < 0:
            break
        i0, i1, i2 = geometry.corners[hit, 0], geometry.corners[hit, 1], geometry.corners[hit, 2]
        bw = 1.0 - bu - bv
        q = geometry.coords
        m = geometry.material[hit]
        cr, cg, cb = material_color(
            materials,
            m,
            bw * q[i0, 0] + bu * q[i1, 0] + bv * q[i2, 0],
            bw * q[i0, 1] + bu * q[i1, 1] + bv * q[i2, 1],
            bw * q[i0, 2] + bu * q[i1, 2] + bv * q[i2, 2],
        )
        gloss, metal = materials.surface[m, 0], materials.surface[m, 1]
        roughness, emission = materials.surface[m, 2], materials.surface[m, 3]
        if emission > 0.0:
            r += tr * cr * emission
            g += tg * cg * emission
            b += tb * cb * emission
            break
        nx, ny, nz = _shading_normal(tree, geometry, hit, bu, bv, dx, dy, dz)
        ox += t * dx + 1e-4 * nx
        oy += t * dy + 1e-4 * ny
        oz += t * dz + 1e-4 * nz
        e = light
        er = bw * e[i0, 0] + bu * e[i1, 0] + bv * e[i2, 0]
        eg = bw * e[i0, 1] + bu * e[i1, 1] + bv * e[i2, 1]
        eb = bw * e[i0, 2] + bu * e[i1, 2] + bv * e[i2, 2]
        if bounce > 0:
            s = sun_light
            er += bw * s[i0, 0] + bu * s[i1, 0] + bv * s[i2, 0]
            eg += bw * s[i0, 1] + bu * s[i1, 1] + bv * s[i2, 1]
            eb += bw * s[i0, 2] + bu * s[i1, 2] + bv * s[i2, 2]
        elif sun[1, 0] > 0.0:
            facing = nx * sun[0, 0] + ny * sun[0, 1] + nz * sun[0, 2]
            if facing > 0.0:
                # Start above the facets: their smooth normals may face a sun that the facets turn away from.
                lift = 0.002
                if sun_reaches(tree, sun, ox + lift * nx, oy + lift * ny, oz + lift * nz, tilt_u, tilt_v, stack):
                    facing *= min(1.0, 6.0 * facing)
                    er += sun[1, 0] * facing
                    eg += sun[1, 1] * facing
                    eb += sun[1, 2] * facing
        if gloss <= 0.0:
            r += tr * cr * er
            g += tg * cg * eg
            b += tb * cb * eb
            break
        cosine = max(0.0, -(dx * nx + dy * ny + dz * nz))
        grazing = (1.0 - cosine) ** 5 * (1.0 - min(1.0, 3.0 * roughness))
        if metal > 0.0:
            if bounce == bounces:
                r += tr * cr * er
                g += tg * cg * eg
                b += tb * cb * eb
                break
            fr, fg, fb = cr + (1.0 - cr) * grazing, cg + (1.0 - cg) * grazing, cb + (1.0 - cb) * grazing
        else:
            fr = gloss + (1.0 - gloss) * grazing
            fg, fb = fr, fr
            r += tr * (1.0 - fr) * cr * er
            g += tg * (1.0 - fg) * cg * eg
            b += tb * (1.0 - fb) * cb * eb
        tr, tg, tb = tr * fr, tg * fg, tb * fb
        if max(tr, tg, tb) < 0.01:
            break
        turned = 2.0 * (dx * nx + dy * ny + dz * nz)
        dx, dy, dz = dx - turned * nx, dy - turned * ny, dz - turned * nz
        if roughness > 0.0:
            dx += roughness * (2.0 * _hash(seed, bounce, 11) - 1.0)
            dy += roughness * (2.0 * _hash(seed, bounce, 12) - 1.0)
            dz += roughness * (2.0 * _hash(seed, bounce, 13) - 1.0)
            scale = 1.0 / math.sqrt(dx * dx + dy * dy + dz * dz)
            dx, dy, dz = dx * scale, dy * scale, dz * scale
    return r, g, b


@no_type_check
@njit(cache=True, fastmath=FAST)
def _film(x):
    """Narkowicz's fit (2015) of the ACES film curve: linear radiance to linear display value in 0-1."""
    return min(1.0, max(0.0, x * (2.51 * x + 0.03) / (x * (2.43 * x + 0.59) + 0.14)))


@no_type_check
@njit(cache=True, fastmath=FAST)
def _encode(x):
    """Linear display value to sRGB, 0-255."""
    x = 12.92 * x if x <= 0.0031308 else 1.055 * x ** (1.0 / 2.4) - 0.055
    return int(255.0 * x + 0.5)


@no_type_check
@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _render(
    tree, geometry, materials, light, sun_light, sun, c2w, focal, side, bounces, exposure, rgb, depth, normals, labels
):
    height, width = labels.shape
    for row in prange(height):
        stack = np.empty(STACK_SIZE, np.int32)
        for col in range(width):
            red, green, blue = 0.0, 0.0, 0.0
            for sample in range(side * side + 1):
                centre = sample == side * side
                x, y = col + 0.5, row + 0.5
                if not centre:
                    x = col + (sample % side + 0.5) / side
                    y = row + (sample // side + 0.5) / side
                # OpenGL camera: x right, y up, looking along -z.
                px, py = (x - 0.5 * width) / focal, -(y - 0.5 * height) / focal
                scale = 1.0 if centre else 1.0 / math.sqrt(px * px + py * py + 1.0)
                dx = scale * (c2w[0, 0] * px + c2w[0, 1] * py - c2w[0, 2])
                dy = scale * (c2w[1, 0] * px + c2w[1, 1] * py - c2w[1, 2])
                dz = scale * (c2w[2, 0] * px + c2w[2, 1] * py - c2w[2, 2])
                ox, oy, oz = c2w[0, 3], c2w[1, 3], c2w[2, 3]
                if centre:
                    t, hit, bu, bv = cast(tree, ox, oy, oz, dx, dy, dz, 1e9, False, stack)
                    if hit < 0:
                        depth[row, col] = 0.0
                        labels[row, col] = 0
                        normals[row, col, :] = 0.0
                        continue
                    # The direction has length 1 along the optical axis: t is the z-depth.
                    depth[row, col] = t
                    labels[row, col] = geometry.label[hit]
                    nx, ny, nz = _shading_normal(tree, geometry, hit, bu, bv, dx, dy, dz)
                    normals[row, col, 0], normals[row, col, 1], normals[row, col, 2] = nx, ny, nz
                else:
                    # The sun is 0.4° wide: each sample of a pixel sees another part, the same part in every pixel.
                    number = (row * width + col) * side * side + sample
                    tilt_u = 0.007 * ((sample % side + 0.5) / side - 0.5)
                    tilt_v = 0.007 * ((sample // side + 0.5) / side - 0.5)
                    r, g, b = _radiance(
                        tree,
                        geometry,
                        materials,
                        light,
                        sun_light,
                        sun,
                        ox,
                        oy,
                        oz,
                        dx,
                        dy,
                        dz,
                        bounces,
                        number,
                        tilt_u,
                        tilt_v,
                        stack,
                    )
                    red += _film(exposure * r)
                    green += _film(exposure * g)
                    blue += _film(exposure * b)
            share = 1.0 / (side * side)
            rgb[row, col, 0] = _encode(red * share)
            rgb[row, col, 1] = _encode(green * share)
            rgb[row, col, 2] = _encode(blue * share)


def render(
    scene: LitScene,
    c2w: np.ndarray,
    width_px: int,
    height_px: int,
    focal_px: float,
    samples: int = 2,
    bounces: int = 2,
    exposure: float = 1.0,
) -> View:
    """Renders one view of the scene.

    Args:
        scene: The lit scene.
        c2w: (3 or 4, 4) camera to world, OpenGL convention, metres.
        width_px: Image width.
        height_px: Image height; the principal point is the middle of the image.
        focal_px: Focal length of both axes.
        samples: Colour samples along each side of a pixel.
        bounces: Number of reflections that a ray is followed through.
        exposure: Factor on radiance before the film curve.
    """
    view = View(
        rgb=np.zeros((height_px, width_px, 3), np.uint8),
        depth=np.zeros((height_px, width_px)),
        normals=np.zeros((height_px, width_px, 3)),
        labels=np.zeros((height_px, width_px), np.uint8),
    )
    pose = np.ascontiguousarray(c2w[:3, :4], np.float64)
    _render(*scene, pose, float(focal_px), samples, bounces, float(exposure), *view)
    return view

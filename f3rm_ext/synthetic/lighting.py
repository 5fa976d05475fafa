"""Light that does not depend on the viewpoint, computed once at every vertex of the scene.

Direct light comes from points on the area lights and from the sun through the window, each tested with a shadow ray.
Light that bounced off other surfaces is gathered over the hemisphere, for two bounces. The stored value is
irradiance / π, so that a matt surface of albedo a sends out a times this value. Because views only look these values
up, they are free of noise and a surface has the same colour in every view.
"""

import math
from typing import NamedTuple, no_type_check

import numpy as np
from numba import njit, prange

from f3rm_ext.synthetic.kernels import FAST, STACK_SIZE, Tree, cast
from f3rm_ext.synthetic.patterns import _hash

OFFSET = 1e-3
"""Distance above a surface at which rays start, metres."""
_BLOCK = 128


class Lights(NamedTuple):
    """Points that represent the area lights, and the sun."""

    points: np.ndarray
    """(lights, 3) float64, metres."""
    normals: np.ndarray
    """(lights, 3) float64: each point shines into the half-space its normal points to."""
    power: np.ndarray
    """(lights, 3) float64: radiance x area that the point represents, linear RGB."""
    sun: np.ndarray
    """(5, 3) float64: unit direction to the sun; irradiance / π of a surface facing it; centre and two half-sides of
    the pane that it shines through. An irradiance of 0 means that there is no sun."""


class Geometry(NamedTuple):
    """The mesh as the kernels read it, with faces in the order of the tree's triangles."""

    corners: np.ndarray
    """(faces, 3) int32 vertex indices."""
    vertices: np.ndarray
    """(verts, 3) float64."""
    normals: np.ndarray
    """(verts, 3) float64."""
    coords: np.ndarray
    """(verts, 3) float64."""
    material: np.ndarray
    """(faces,) int32."""
    label: np.ndarray
    """(faces,) uint8."""


@no_type_check
@njit(cache=True, fastmath=FAST, error_model="numpy")
def sun_reaches(tree, sun, x, y, z, tilt_u, tilt_v, stack):
    """Tells whether the sun's ray to (x, y, z) passes through the pane and nothing blocks it.

    ``tilt_u`` and ``tilt_v`` tilt the ray along the pane's sides by these slopes, for a sun that is not a point.
    """
    ux, uy, uz = sun[3, 0], sun[3, 1], sun[3, 2]
    vx, vy, vz = sun[4, 0], sun[4, 1], sun[4, 2]
    uu = ux * ux + uy * uy + uz * uz
    vv = vx * vx + vy * vy + vz * vz
    su, sv = tilt_u / math.sqrt(uu), tilt_v / math.sqrt(vv)
    dx = sun[0, 0] + su * ux + sv * vx
    dy = sun[0, 1] + su * uy + sv * vy
    dz = sun[0, 2] + su * uz + sv * vz
    nx, ny, nz = uy * vz - uz * vy, uz * vx - ux * vz, ux * vy - uy * vx
    cx, cy, cz = sun[2, 0] - x, sun[2, 1] - y, sun[2, 2] - z
    along = dx * nx + dy * ny + dz * nz
    if abs(along) < 1e-12:
        return False
    t = (cx * nx + cy * ny + cz * nz) / along
    if t <= 0.0:
        return False
    hx, hy, hz = dx * t - cx, dy * t - cy, dz * t - cz
    if abs(hx * ux + hy * uy + hz * uz) > uu or abs(hx * vx + hy * vy + hz * vz) > vv:
        return False
    return cast(tree, x, y, z, dx, dy, dz, t - 0.002, True, stack)[1] < 0


@no_type_check
@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _direct(tree, vertices, normals, points, light_normals, power, sun, area_light, sun_light):
    count = vertices.shape[0]
    for block in prange((count + _BLOCK - 1) // _BLOCK):
        stack = np.empty(STACK_SIZE, np.int32)
        for i in range(block * _BLOCK, min(count, (block + 1) * _BLOCK)):
            nx, ny, nz = normals[i, 0], normals[i, 1], normals[i, 2]
            x = vertices[i, 0] + OFFSET * nx
            y = vertices[i, 1] + OFFSET * ny
            z = vertices[i, 2] + OFFSET * nz
            r, g, b = 0.0, 0.0, 0.0
            for k in range(points.shape[0]):
                dx, dy, dz = points[k, 0] - x, points[k, 1] - y, points[k, 2] - z
                facing = dx * nx + dy * ny + dz * nz
                leaving = -(dx * light_normals[k, 0] + dy * light_normals[k, 1] + dz * light_normals[k, 2])
                if facing <= 0.0 or leaving <= 0.0:
                    continue
                d2 = dx * dx + dy * dy + dz * dz
                if cast(tree, x, y, z, dx, dy, dz, 0.999, True, stack)[1] >= 0:
                    continue
                d2 = max(d2, 0.01)
                form = facing * leaving / (d2 * d2 * math.pi)
                r += power[k, 0] * form
                g += power[k, 1] * form
                b += power[k, 2] * form
            area_light[i, 0], area_light[i, 1], area_light[i, 2] = r, g, b
            facing = nx * sun[0, 0] + ny * sun[0, 1] + nz * sun[0, 2]
            lit = facing > 0.0 and sun[1, 0] > 0.0 and sun_reaches(tree, sun, x, y, z, 0.0, 0.0, stack)
            for k in range(3):
                sun_light[i, k] = sun[1, k] * facing if lit else 0.0


@no_type_check
@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _gather(tree, corners, vertices, normals, sent, rays, arriving):
    """Computes the cosine-weighted mean of the light that other surfaces send towards each vertex."""
    count = vertices.shape[0]
    for block in prange((count + _BLOCK - 1) // _BLOCK):
        stack = np.empty(STACK_SIZE, np.int32)
        for i in range(block * _BLOCK, min(count, (block + 1) * _BLOCK)):
            nx, ny, nz = normals[i, 0], normals[i, 1], normals[i, 2]
            x = vertices[i, 0] + OFFSET * nx
            y = vertices[i, 1] + OFFSET * ny
            z = vertices[i, 2] + OFFSET * nz
            # Tangent frame of Duff et al., "Building an Orthonormal Basis, Revisited", 2017.
            sign = 1.0 if nz >= 0.0 else -1.0
            a = -1.0 / (sign + nz)
            c = nx * ny * a
            turn, lift = _hash(i, 1, 0), _hash(i, 2, 0)
            r, g, b = 0.0, 0.0, 0.0
            for k in range(rays):
                # The R2 sequence (Roberts, 2018), shifted for each vertex.
                u = (turn + 0.7548776662466927 * (k + 1)) % 1.0
                v = (lift + 0.5698402909980532 * (k + 1)) % 1.0
                radius = math.sqrt(v)
                p = radius * math.cos(6.283185307179586 * u)
                q = radius * math.sin(6.283185307179586 * u)
                h = math.sqrt(1.0 - v)
                dx = p * (1.0 + sign * nx * nx * a) + q * c + h * nx
                dy = p * sign * c + q * (sign + ny * ny * a) + h * ny
                dz = -p * sign * nx - q * ny + h * nz
                _, hit, bu, bv = cast(tree, x, y, z, dx, dy, dz, 1e9, False, stack)
                if hit < 0:
                    continue
                e = tree.triangles[hit]
                facing = (
                    (e[4] * e[8] - e[5] * e[7]) * dx
                    + (e[5] * e[6] - e[3] * e[8]) * dy
                    + (e[3] * e[7] - e[4] * e[6]) * dz
                )
                if facing > 0.0:  # a back face
                    continue
                i0, i1, i2 = corners[hit, 0], corners[hit, 1], corners[hit, 2]
                bw = 1.0 - bu - bv
                r += bw * sent[i0, 0] + bu * sent[i1, 0] + bv * sent[i2, 0]
                g += bw * sent[i0, 1] + bu * sent[i1, 1] + bv * sent[i2, 1]
                b += bw * sent[i0, 2] + bu * sent[i1, 2] + bv * sent[i2, 2]
            arriving[i, 0], arriving[i, 1], arriving[i, 2] = r / rays, g / rays, b / rays


def _smooth(values: np.ndarray, faces: np.ndarray, times: int) -> np.ndarray:
    """Averages each vertex's value with those of its neighbours, several times."""
    from scipy.sparse import coo_matrix, diags

    edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    edges = np.concatenate([edges, edges[:, ::-1]])
    size = len(values)
    links = coo_matrix((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(size, size)).tocsr()
    links.data[:] = 1.0
    mean = diags(1.0 / np.maximum(np.asarray(links.sum(axis=1)).ravel(), 1.0)) @ links
    for _ in range(times):
        values = 0.5 * values + 0.5 * (mean @ values)
    return values


def bake(
    tree: Tree,
    geometry: Geometry,
    lights: Lights,
    albedo: np.ndarray,
    glows: np.ndarray,
    rays: int,
    bounces: int = 2,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the light at each vertex as irradiance / π, linear RGB.

    Args:
        tree: Hierarchy over the scene's triangles.
        geometry: The scene.
        lights: Light sources.
        albedo: (verts, 3) linear RGB at each vertex.
        glows: (verts,) bool: vertices of surfaces that emit light; they reflect none.
        rays: Rays per vertex and bounce that gather bounced light.
        bounces: Number of bounces before light arrives.

    Returns:
        Light without the sun's direct light (verts, 3), and the sun's direct light (verts, 3).
    """
    vertices, normals = geometry.vertices, geometry.normals
    area_light = np.empty_like(vertices)
    sun_light = np.empty_like(vertices)
    _direct(tree, vertices, normals, lights.points, lights.normals, lights.power, lights.sun, area_light, sun_light)
    reflects = np.where(glows[:, None], 0.0, albedo)
    bounced = np.zeros_like(area_light)
    for _ in range(bounces):
        arriving = np.empty_like(area_light)
        sent = reflects * (area_light + sun_light + bounced)
        _gather(tree, geometry.corners, vertices, normals, sent, rays, arriving)
        bounced = _smooth(arriving, geometry.corners, 4)
    return area_light + bounced, sun_light

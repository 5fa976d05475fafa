"""Light that does not depend on the viewpoint, computed once at every vertex of the scene.

Direct light comes from points on the area lights and from the sun through the window, each tested with a shadow ray.
Light that bounced off other surfaces is gathered over the hemisphere, for two bounces. The stored value is
irradiance / π, so that a matt surface of albedo a sends out a times this value. Because views only look these values
up, they are free of noise and a surface has the same colour in every view.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.sparse import coo_matrix, diags

from f3rm_ext.synthetic.mesh import Mesh
from f3rm_ext.utils.open3d_library import RayCaster

OFFSET = 1e-3
"""Distance above a surface at which rays start, metres."""
_NEAR = 1e-4
"""Where shadow rays begin, as a share of their length: a vertex in a corner lies on the other wall too."""
_BOUNCES = 2
_PANE = 2e-3
"""Distance before the window's pane at which rays to the sun end, metres: the pane is a triangle too."""


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
    the pane that it shines through."""


class Hits(NamedTuple):
    """Nearest intersections of rays with the scene."""

    rays: Int[np.ndarray, " hits"]
    """Rays that meet it."""
    distance: Float[np.ndarray, "hits 1"]
    """Distances of the intersections, in lengths of the rays' directions."""
    faces: Int[np.ndarray, " hits"]
    """The triangle."""
    weights: Float[np.ndarray, "hits 3"]
    """Barycentric weights of its corners."""
    front: Bool[np.ndarray, " hits"]
    """Whether it is met from outside."""

    @classmethod
    def cast(
        cls, caster: RayCaster, origins: Float[np.ndarray, "*#rays 3"], directions: Float[np.ndarray, "rays 3"]
    ) -> "Hits":
        """Casts rays."""
        hit = caster.cast(origins, directions)
        rays = np.flatnonzero(np.isfinite(hit["t_hit"]))
        uv = hit["primitive_uvs"][rays].astype(np.float64)
        return cls(
            rays,
            hit["t_hit"][rays, None].astype(np.float64),
            hit["primitive_ids"][rays].astype(np.int64),
            np.concatenate([1 - uv.sum(axis=1, keepdims=True), uv], axis=1),
            (hit["primitive_normals"][rays] * directions[rays]).sum(axis=1) <= 0,
        )

    def interpolate(self, mesh: Mesh, values: Float[np.ndarray, "verts 3"]) -> Float[np.ndarray, "hits 3"]:
        """Returns values of the vertices at the hits."""
        return np.einsum("hc,hck->hk", self.weights, values[mesh.faces[self.faces]])


def sun_reaches(
    caster: RayCaster, sun: np.ndarray, points: Float[np.ndarray, "n 3"], tilt: tuple[float, float] = (0.0, 0.0)
) -> Bool[np.ndarray, " n"]:
    """Tells whether the sun's rays to points pass through the pane and nothing blocks them.

    Args:
        points: metres.
        tilt: slopes of the rays along the pane's sides, for a sun that is not a point.
    """
    direction, _, center, *sides = sun
    direction = direction + sum(slope * side / np.linalg.norm(side) for slope, side in zip(tilt, sides, strict=True))
    normal = np.cross(*sides)
    away = center - points
    distance = away @ normal / (direction @ normal)
    crossing = distance[:, None] * direction - away
    through = distance > 0
    for side in sides:
        through &= np.abs(crossing @ side) <= side @ side
    which = np.flatnonzero(through)
    blocked = caster.occluded(points[which], (distance[which, None] - _PANE) * direction, _NEAR)
    through[which[blocked]] = False
    return through


def _direct(caster: RayCaster, mesh: Mesh, lights: Lights) -> tuple[np.ndarray, np.ndarray]:
    """Light from the area lights and from the sun at each vertex (verts, 3)."""
    starts, area_light = mesh.vertices + OFFSET * mesh.normals, np.zeros(mesh.vertices.shape)
    for point, normal, power in zip(lights.points, lights.normals, lights.power, strict=True):
        towards = point - starts
        form = np.maximum((towards * mesh.normals).sum(axis=1), 0) * np.maximum(-(towards @ normal), 0)
        lit = np.flatnonzero(form)
        lit = lit[~caster.occluded(starts[lit], towards[lit], _NEAR, 0.999)]
        # A point stands for a part of a lamp: below 10 cm it would be brighter than that part.
        squared = np.maximum(np.square(towards[lit]).sum(axis=1), 0.01)
        area_light[lit] += (form[lit] / (np.pi * squared**2))[:, None] * power
    facing = mesh.normals @ lights.sun[0]
    lit = np.flatnonzero(facing > 0)
    lit = lit[sun_reaches(caster, lights.sun, starts[lit])]
    sun_light = np.zeros(mesh.vertices.shape)
    sun_light[lit] = facing[lit, None] * lights.sun[1]
    return area_light, sun_light


def _gather(caster: RayCaster, mesh: Mesh, sent: np.ndarray, rays: int) -> np.ndarray:
    """Computes the cosine-weighted mean of the light that other surfaces send towards each vertex."""
    starts, arriving = mesh.vertices + OFFSET * mesh.normals, np.zeros(mesh.vertices.shape)
    # Tangent frame of Duff et al., "Building an Orthonormal Basis, Revisited", 2017.
    nx, ny, nz = mesh.normals.T
    sign = np.where(nz >= 0, 1.0, -1.0)
    a = -1 / (sign + nz)
    first = np.stack([1 + sign * nx * nx * a, sign * nx * ny * a, -sign * nx], axis=1)
    second = np.stack([nx * ny * a, sign + ny * ny * a, -ny], axis=1)
    turn, lift = np.random.default_rng(0).random((2, len(starts)))
    for k in range(1, rays + 1):
        # The R2 sequence (Roberts, 2018), shifted for each vertex.
        angle, square = 2 * np.pi * (turn + 0.7548776662466927 * k), (lift + 0.5698402909980532 * k) % 1
        x, y, z = np.sqrt(square) * np.cos(angle), np.sqrt(square) * np.sin(angle), np.sqrt(1 - square)
        directions = x[:, None] * first + y[:, None] * second + z[:, None] * mesh.normals
        hits = Hits.cast(caster, starts, directions)
        arriving[hits.rays] += hits.front[:, None] * hits.interpolate(mesh, sent)
    return arriving / rays


def _smooth(values: np.ndarray, faces: np.ndarray, times: int) -> np.ndarray:
    """Averages each vertex's value with those of its neighbours, several times."""
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
    caster: RayCaster, mesh: Mesh, lights: Lights, albedo: np.ndarray, glows: np.ndarray, rays: int
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the light at each vertex as irradiance / π, linear RGB.

    Args:
        albedo: (verts, 3) linear RGB at each vertex.
        glows: (verts,) bool: vertices of surfaces that emit light; they reflect none.
        rays: Rays per vertex and bounce that gather bounced light.

    Returns:
        Light without the sun's direct light (verts, 3), and the sun's direct light (verts, 3).
    """
    area_light, sun_light = _direct(caster, mesh, lights)
    reflects = np.where(glows[:, None], 0.0, albedo)
    bounced = np.zeros_like(area_light)
    for _ in range(_BOUNCES):
        bounced = _smooth(_gather(caster, mesh, reflects * (area_light + sun_light + bounced), rays), mesh.faces, 4)
    return area_light + bounced, sun_light

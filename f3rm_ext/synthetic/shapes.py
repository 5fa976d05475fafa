"""Shapes: functions that return a :class:`Mesh` in its own frame, standing on z = 0 unless said otherwise.

Texture coordinates are positions in metres in that frame unless said otherwise. Meshes are fine enough to look smooth
from a metre away and to carry soft shadows at their vertices.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from f3rm_ext.synthetic.mesh import Mesh, Real, join_meshes


def patch(points: Float[np.ndarray, "us vs 3"], closed_v: bool = False) -> Mesh:
    """Returns a surface through a grid of points, where ∂u x ∂v points outwards.

    With ``closed_v`` the last column coincides with the first. A row may shrink to a point (a pole); its empty
    triangles are left out.
    """
    us, vs = points.shape[:2]
    along_u = np.gradient(points, axis=0)
    if closed_v:
        around = points[:, :-1]
        along_v = (np.roll(around, -1, axis=1) - np.roll(around, 1, axis=1)) / 2
        along_v = np.concatenate([along_v, along_v[:, :1]], axis=1)
    else:
        along_v = np.gradient(points, axis=1)
    normals = np.cross(along_u, along_v)
    length = np.linalg.norm(normals, axis=-1, keepdims=True)
    for row, inner in ((0, 1), (us - 1, us - 2)):
        if length[row].max() < 1e-12:
            mean = normals[inner].mean(axis=0)
            normals[row] = mean
            length[row] = np.linalg.norm(mean)
    normals = normals / np.maximum(length, 1e-300)
    index = np.arange(us * vs).reshape(us, vs)
    a, b, c, d = (i.ravel() for i in (index[:-1, :-1], index[1:, :-1], index[1:, 1:], index[:-1, 1:]))
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])
    vertices = points.reshape(-1, 3).astype(np.float64)
    corners = vertices[faces]
    area = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1)
    return Mesh(vertices, normals.reshape(-1, 3), faces[area > 1e-14].astype(np.int32), vertices.copy())


def rectangle(width: Real, depth: Real, spacing: Real) -> Mesh:
    """Returns a rectangle that faces up, centred on the origin, with texture coordinates (x, y, 0)."""
    us, vs = (max(2, int(np.ceil(side / spacing)) + 1) for side in (width, depth))
    x, y = np.meshgrid(np.linspace(-width / 2, width / 2, us), np.linspace(-depth / 2, depth / 2, vs), indexing="ij")
    return patch(np.stack([x, y, np.zeros_like(x)], axis=-1))


def resample(profile: Sequence[tuple[Real, Real]], spacing: Real) -> Float[np.ndarray, "n 2"]:
    """Returns points along a polyline, at most ``spacing`` apart, with all its corners.

    >>> resample([(0, 0), (1, 0)], spacing=0.5).tolist()
    [[0.0, 0.0], [0.5, 0.0], [1.0, 0.0]]
    """
    points = [np.asarray(profile[0], float)]
    for start, end in itertools.pairwise(np.asarray(profile, float)):
        steps = max(1, int(np.ceil(np.linalg.norm(end - start) / spacing)))
        points.extend(start + (end - start) * i / steps for i in range(1, steps + 1))
    return np.array(points)


def smooth_curve(profile: Sequence[tuple[Real, Real]], points: int) -> Float[np.ndarray, "points 2"]:
    """Returns points of a cubic spline through the given points, evenly spaced in its centripetal parameter."""
    from scipy.interpolate import CubicSpline

    knots = np.asarray(profile, float)
    parameters = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(knots, axis=0), axis=1) ** 0.5)])
    return CubicSpline(parameters, knots)(np.linspace(0, parameters[-1], points))


def revolve(profile: np.ndarray, around: int = 64) -> Mesh:
    """Returns the surface swept by a profile of (radius, z) that turns about z.

    The outside must be on the right of the profile (so an outer wall goes upwards). The surface is smooth along the
    profile; join several for sharp edges. Texture coordinates: (angle / 2π, length along the profile in metres, z).
    """
    profile = np.asarray(profile, float)
    angle = np.linspace(0, 2 * np.pi, around + 1)
    radius, height = profile[:, 0, None], profile[:, 1, None]
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle), height + 0 * angle], axis=-1)
    # ∂u goes up the profile and ∂v around, so that the outward normal is ∂v x ∂u: mirror the angle.
    mesh = patch(points[:, ::-1], closed_v=True)
    length = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(profile, axis=0), axis=1))])
    turns = np.broadcast_to(angle[::-1] / (2 * np.pi), points.shape[:2])
    coords = np.stack([turns, np.broadcast_to(length[:, None], turns.shape), points[..., 2]], axis=-1)
    return mesh.texture(coords.reshape(-1, 3))


def lathe(*profiles: np.ndarray, around: int = 64) -> Mesh:
    """Returns several surfaces of revolution with sharp edges between them."""
    return join_meshes([revolve(profile, around) for profile in profiles])


def cylinder(radius: Real, height: Real, spacing: Real = 0.02, bevel: Real = 0.003, around: int = 64) -> Mesh:
    """Returns a closed cylinder with a narrow bevel. Texture coordinates are positions."""
    side = resample([(radius, bevel), (radius, height - bevel)], spacing)
    rim = [(radius - bevel * (1 - np.cos(a)), height - bevel * (1 - np.sin(a))) for a in np.linspace(0, np.pi / 2, 4)]
    foot = [(r, height - z) for r, z in rim[::-1]]
    top = resample([(radius - bevel, height), (0.0, height)], spacing)
    bottom = resample([(0.0, 0.0), (radius - bevel, 0.0)], 4 * spacing)
    mesh = lathe(bottom, np.concatenate([foot, side, rim]), top, around=around)
    return mesh.texture(mesh.vertices)


def torus(ring: Real, tube: Real, around: int = 96, across: int = 32) -> Mesh:
    """Returns a torus that lies on z = 0.

    Texture coordinates: (angle around / 2π, angle across / 2π with 0.25 on top, 0).
    """
    across_angle = np.linspace(0, 2 * np.pi, across + 1)
    profile = np.stack([ring + tube * np.cos(across_angle), tube + tube * np.sin(across_angle)], axis=-1)
    mesh = revolve(profile, around)
    # The profile is closed, and both its ends lie on the equator.
    outwards = mesh.vertices[: around + 1, :2] / np.linalg.norm(mesh.vertices[: around + 1, :2], axis=1, keepdims=True)
    for row in (slice(0, around + 1), slice(across * (around + 1), None)):
        mesh.normals[row, :2] = outwards
        mesh.normals[row, 2] = 0
    turns = mesh.coords[:, 0]
    return mesh.texture(
        np.stack([turns, np.repeat(across_angle / (2 * np.pi), around + 1), np.zeros_like(turns)], axis=-1)
    )


def sphere(radius: Real, around: int = 64) -> Mesh:
    """Returns a sphere that stands on z = 0, with texture coordinates relative to its centre."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, around // 2 + 1)
    profile = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    profile[[0, -1], 0] = 0
    mesh = revolve(profile, around)
    exact = mesh.vertices / radius
    mesh = mesh.texture(mesh.vertices).place(z=radius)
    mesh.normals[:] = exact
    return mesh


def tube(
    path: Float[np.ndarray, "n 3"], radius: Real | Float[np.ndarray, "n"], around: int = 12, caps: bool = True
) -> Mesh:
    """Returns a round tube along a path; with ``caps`` its ends are closed."""
    path = np.asarray(path, float)
    radii = np.broadcast_to(np.asarray(radius, float), len(path))
    tangent = np.gradient(path, axis=0)
    tangent /= np.linalg.norm(tangent, axis=1, keepdims=True)
    side = np.cross(tangent[0], [0.0, 0.0, 1.0] if abs(tangent[0, 2]) < 0.9 else [1.0, 0.0, 0.0])
    frame = np.empty((len(path), 2, 3))
    for i, t in enumerate(tangent):  # parallel transport: no twist
        side = side - t * (side @ t)
        side = side / np.linalg.norm(side)
        frame[i] = side, np.cross(t, side)
    angle = np.linspace(0, 2 * np.pi, around + 1)[::-1]
    ring = np.cos(angle)[:, None] * frame[:, None, 0] + np.sin(angle)[:, None] * frame[:, None, 1]
    points = path[:, None] + radii[:, None, None] * ring
    mesh = patch(points, closed_v=True)
    if not caps:
        return mesh
    ends = []
    for end, inside_out in ((0, True), (-1, False)):
        cap = np.stack([np.broadcast_to(path[end], points[end].shape), points[end]])
        ends.append(patch(cap if inside_out else cap[::-1], closed_v=True))
    return join_meshes([mesh, *ends])


def rounded_box(width: Real, depth: Real, height: Real, bevel: Real, spacing: Real = 0.03) -> Mesh:
    """Returns a box with rounded edges. Texture coordinates are positions from its centre in half-sides (±1)."""
    half = np.array([width, depth, height]) / 2
    bevel = min(bevel, 0.999 * half.min())
    sides = []
    for axis in range(3):
        u_axis, v_axis = (axis + 1) % 3, (axis + 2) % 3
        grids = []
        for other in (u_axis, v_axis):
            flat = half[other] - bevel
            steps = max(2, int(np.ceil(2 * flat / spacing)) + 1)
            arc = np.linspace(0, np.pi / 4, 5)[1:]
            # Up to 45° of the round edge belongs to this side.
            grids.append(
                np.concatenate(
                    [-flat - bevel * np.tan(arc[::-1]), np.linspace(-flat, flat, steps), flat + bevel * np.tan(arc)]
                )
            )
        u, v = np.meshgrid(*grids, indexing="ij")
        for sign in (1.0, -1.0):
            cube = np.empty(u.shape + (3,))
            cube[..., axis], cube[..., u_axis], cube[..., v_axis] = sign * half[axis], u, v
            core = np.clip(cube, -(half - bevel), half - bevel)
            out = cube - core
            out /= np.linalg.norm(out, axis=-1, keepdims=True)
            points = core + bevel * out
            mesh = patch(points if sign > 0 else points.transpose(1, 0, 2))
            mesh.normals[:] = (out if sign > 0 else out.transpose(1, 0, 2)).reshape(-1, 3)
            sides.append(mesh)
    mesh = join_meshes(sides)
    return mesh.texture(mesh.vertices / half).place(z=half[2])


def thick_sheet(points: Float[np.ndarray, "us vs 3"], thickness: Real) -> Mesh:
    """Returns a sheet with two sides, ``thickness`` apart, and an open rim; texture coordinates (u, v, 0) in 0-1."""
    front = patch(points)
    u, v = np.meshgrid(*(np.linspace(0, 1, n) for n in points.shape[:2]), indexing="ij")
    front = front.texture(np.stack([u, v, 0 * u], axis=-1).reshape(-1, 3))
    shift = front.normals * thickness / 2
    back = Mesh(front.vertices - shift, -front.normals, front.faces[:, ::-1].copy(), front.coords)
    return join_meshes([Mesh(front.vertices + shift, front.normals, front.faces, front.coords), back])


def isosurface(
    distance: Callable[[np.ndarray], np.ndarray], low: Sequence[Real], high: Sequence[Real], spacing: Real
) -> Mesh:
    """Returns the zero set of a distance function in a box, by marching cubes.

    Args:
        distance: Maps points (…, 3) to distances (…), negative inside.
    """
    from skimage.measure import marching_cubes

    axes = [np.arange(a, b + spacing, spacing) for a, b in zip(low, high, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    vertices, faces, _, _ = marching_cubes(distance(grid), 0.0, spacing=(spacing,) * 3, gradient_direction="ascent")
    vertices = vertices.astype(np.float64) + np.asarray(low, float)
    step = spacing / 4
    normals = np.stack(
        [distance(vertices + step * axis) - distance(vertices - step * axis) for axis in np.eye(3)], axis=-1
    )
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    corners = vertices[faces]
    crossed = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    wrong = (crossed * normals[faces].mean(axis=1)).sum(axis=1) < 0
    faces[wrong] = faces[wrong][:, ::-1]
    faces = faces[np.linalg.norm(crossed, axis=1) > 1e-12]
    return Mesh(vertices, normals, faces.astype(np.int32), vertices.copy())


def box(width: Real, depth: Real, height: Real, spacing: Real = 0.05) -> Mesh:
    """Returns a box with sharp edges. Texture coordinates are positions."""
    sides = []
    for (w, d, h), turns in (
        ((width, depth, height), ((0, 0), (180, 0))),
        ((width, height, depth), ((90, 0), (90, 180))),
        ((depth, height, width), ((90, 90), (90, 270))),
    ):
        for tilt, turn in turns:
            sides.append(rectangle(w, d, spacing).place(z=h / 2).place(turn_deg=turn, tilt_deg=tilt))
    mesh = join_meshes(sides).place(z=height / 2)
    return mesh.texture(mesh.vertices)

"""Ray casting kernels: a bounding volume hierarchy over triangles, built and walked in numba.

Everything here is deterministic: each result depends on its own ray alone, never on the order of threads. The hierarchy
is a binary tree split by the binned surface area heuristic (Wald, "On fast Construction of SAH-based Bounding Volume
Hierarchies", 2007). Rays and triangles are intersected as by Möller and Trumbore (1997). The kernels are tested against
:func:`cast_brute_force`, a few lines of numpy.
"""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit, prange

LEAF_SIZE = 4
STACK_SIZE = 64
MISS = -1
_BINS = 16
# All of fast math except "no infinities" and "no NaNs": the slab test divides by zero on purpose.
FAST = {"contract", "afn", "reassoc", "nsz", "arcp"}


class Tree(NamedTuple):
    """A hierarchy over the triangles of one mesh; triangles are in the order of its leaves."""

    bounds: np.ndarray
    """(nodes, 6) float32: least corner, then greatest corner."""
    first: np.ndarray
    """(nodes,) int32: first triangle of a leaf, or left child of an inner node (the right one follows it)."""
    count: np.ndarray
    """(nodes,) int32: triangles in the leaf, 0 for an inner node."""
    triangles: np.ndarray
    """(faces, 9) float32: corner 0, edge to corner 1, edge to corner 2."""
    order: np.ndarray
    """(faces,) int32: face of the mesh that each of ``triangles`` is."""


@no_type_check
@njit(cache=True)
def _split(lo, hi, centres, order, begin, end):
    """Returns the best axis and centre value to split order[begin:end] at; axis -1 if a leaf is cheaper."""
    best_cost = np.inf
    best_axis = -1
    best_value = 0.0
    counts = np.zeros(_BINS, np.int64)
    boxes = np.empty((_BINS, 6), np.float64)
    right_area = np.empty(_BINS, np.float64)
    for axis in range(3):
        least = np.inf
        most = -np.inf
        for i in range(begin, end):
            c = centres[order[i], axis]
            least = min(least, c)
            most = max(most, c)
        if most - least < 1e-9:
            continue
        scale = _BINS / (most - least)
        counts[:] = 0
        boxes[:, :3] = np.inf
        boxes[:, 3:] = -np.inf
        for i in range(begin, end):
            face = order[i]
            b = min(_BINS - 1, int((centres[face, axis] - least) * scale))
            counts[b] += 1
            for k in range(3):
                boxes[b, k] = min(boxes[b, k], lo[face, k])
                boxes[b, 3 + k] = max(boxes[b, 3 + k], hi[face, k])
        box = np.array([np.inf, np.inf, np.inf, -np.inf, -np.inf, -np.inf])
        number = 0
        for b in range(_BINS - 1, 0, -1):
            number += counts[b]
            for k in range(3):
                box[k] = min(box[k], boxes[b, k])
                box[3 + k] = max(box[3 + k], boxes[b, 3 + k])
            dx, dy, dz = box[3] - box[0], box[4] - box[1], box[5] - box[2]
            right_area[b] = (dx * dy + dy * dz + dz * dx) * number if number > 0 else 0.0
        box[:3] = np.inf
        box[3:] = -np.inf
        number = 0
        for b in range(1, _BINS):
            number += counts[b - 1]
            for k in range(3):
                box[k] = min(box[k], boxes[b - 1, k])
                box[3 + k] = max(box[3 + k], boxes[b - 1, 3 + k])
            if number == 0 or number == end - begin:
                continue
            dx, dy, dz = box[3] - box[0], box[4] - box[1], box[5] - box[2]
            cost = (dx * dy + dy * dz + dz * dx) * number + right_area[b]
            if cost < best_cost:
                best_cost = cost
                best_axis = axis
                best_value = least + b / scale
    return best_axis, best_value


@no_type_check
@njit(cache=True)
def _build(corners):
    faces = corners.shape[0]
    lo = np.empty((faces, 3), np.float64)
    hi = np.empty((faces, 3), np.float64)
    for f in range(faces):
        for k in range(3):
            lo[f, k] = min(corners[f, 0, k], corners[f, 1, k], corners[f, 2, k])
            hi[f, k] = max(corners[f, 0, k], corners[f, 1, k], corners[f, 2, k])
    centres = 0.5 * (lo + hi)
    order = np.arange(faces).astype(np.int32)
    bounds = np.empty((2 * faces, 6), np.float32)
    first = np.zeros(2 * faces, np.int32)
    count = np.zeros(2 * faces, np.int32)
    todo = np.empty((256, 3), np.int64)
    todo[0] = np.array([0, 0, faces])
    left_to_do = 1
    nodes = 1
    while left_to_do > 0:
        left_to_do -= 1
        node, begin, end = todo[left_to_do]
        for k in range(3):
            least = np.inf
            most = -np.inf
            for i in range(begin, end):
                least = min(least, lo[order[i], k])
                most = max(most, hi[order[i], k])
            bounds[node, k] = least - 1e-6
            bounds[node, 3 + k] = most + 1e-6
        middle = begin
        if end - begin > LEAF_SIZE and left_to_do < 250:
            axis, value = _split(lo, hi, centres, order, begin, end)
            if axis >= 0:
                j = end - 1
                while middle <= j:
                    if centres[order[middle], axis] < value:
                        middle += 1
                    else:
                        order[middle], order[j] = order[j], order[middle]
                        j -= 1
        if middle == begin or middle == end:
            first[node] = begin
            count[node] = end - begin
            continue
        first[node] = nodes
        todo[left_to_do] = np.array([nodes, begin, middle])
        todo[left_to_do + 1] = np.array([nodes + 1, middle, end])
        left_to_do += 2
        nodes += 2
    return bounds[:nodes].copy(), first[:nodes].copy(), count[:nodes].copy(), order


def build_tree(vertices: np.ndarray, faces: np.ndarray) -> Tree:
    """Builds the hierarchy over a mesh: vertices (V, 3) in any unit, faces (F, 3) of vertex indices, F ≥ 1."""
    corners = vertices.astype(np.float32)[faces]
    bounds, first, count, order = _build(corners)
    corners = corners[order]
    triangles = np.concatenate(
        [corners[:, 0], corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]], axis=1
    ).astype(np.float32)
    return Tree(bounds, first, count, np.ascontiguousarray(triangles), order)


@no_type_check
@njit(cache=True, fastmath=FAST, error_model="numpy", inline="never")
def cast(tree, ox, oy, oz, dx, dy, dz, far, any_hit, stack):
    """Finds the first triangle that a ray meets before ``far``; with ``any_hit``, any such triangle.

    Returns (t, index into ``tree.triangles`` or MISS, u, v), where t is in units of the direction's length, and u and v
    are the barycentric weights of corners 1 and 2. ``stack`` is a scratch array (STACK_SIZE,) int32.
    """
    bounds, first, count, triangles = tree.bounds, tree.first, tree.count, tree.triangles
    ix, iy, iz = 1.0 / dx, 1.0 / dy, 1.0 / dz
    best = far
    hit = MISS
    hit_u = 0.0
    hit_v = 0.0
    top = 0
    node = 0
    while True:
        n = count[node]
        if n > 0:
            start = first[node]
            for i in range(start, start + n):
                e1x, e1y, e1z = triangles[i, 3], triangles[i, 4], triangles[i, 5]
                e2x, e2y, e2z = triangles[i, 6], triangles[i, 7], triangles[i, 8]
                px = dy * e2z - dz * e2y
                py = dz * e2x - dx * e2z
                pz = dx * e2y - dy * e2x
                det = e1x * px + e1y * py + e1z * pz
                if abs(det) < 1e-18:
                    continue
                inv = 1.0 / det
                sx = ox - triangles[i, 0]
                sy = oy - triangles[i, 1]
                sz = oz - triangles[i, 2]
                u = (sx * px + sy * py + sz * pz) * inv
                # A tiny tolerance closes the cracks that rounding opens between neighbouring triangles.
                if u < -1e-6 or u > 1.000001:
                    continue
                qx = sy * e1z - sz * e1y
                qy = sz * e1x - sx * e1z
                qz = sx * e1y - sy * e1x
                v = (dx * qx + dy * qy + dz * qz) * inv
                if v < -1e-6 or u + v > 1.000001:
                    continue
                t = (e2x * qx + e2y * qy + e2z * qz) * inv
                if 0.0 < t < best:
                    best = t
                    hit = i
                    hit_u = u
                    hit_v = v
                    if any_hit:
                        return best, hit, hit_u, hit_v
        else:
            near_child = first[node]
            far_child = near_child + 1
            t_near = _entry(bounds, near_child, ox, oy, oz, ix, iy, iz, best)
            t_far = _entry(bounds, far_child, ox, oy, oz, ix, iy, iz, best)
            if t_near > t_far:
                near_child, far_child = far_child, near_child
                t_near, t_far = t_far, t_near
            if t_near < np.inf:
                if t_far < np.inf and top < STACK_SIZE:
                    stack[top] = far_child
                    top += 1
                node = near_child
                continue
        if top == 0:
            break
        top -= 1
        node = stack[top]
    return best, hit, hit_u, hit_v


@no_type_check
@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _entry(bounds, node, ox, oy, oz, ix, iy, iz, best):
    """Returns where a ray enters a node's box; infinity if it misses the box or enters it behind ``best``."""
    ax = (bounds[node, 0] - ox) * ix
    bx = (bounds[node, 3] - ox) * ix
    ay = (bounds[node, 1] - oy) * iy
    by = (bounds[node, 4] - oy) * iy
    az = (bounds[node, 2] - oz) * iz
    bz = (bounds[node, 5] - oz) * iz
    enter = max(min(ax, bx), min(ay, by), min(az, bz), 0.0)
    leave = min(max(ax, bx), max(ay, by), max(az, bz), best)
    if enter <= leave:
        return enter
    return np.inf


@no_type_check
@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _cast_many(tree, origins, directions, far, t, faces, weights):
    rays = origins.shape[0]
    blocks = (rays + 255) // 256
    for block in prange(blocks):
        stack = np.empty(STACK_SIZE, np.int32)
        for r in range(block * 256, min(rays, block * 256 + 256)):
            o, d = origins[r], directions[r]
            distance, hit, u, v = cast(tree, o[0], o[1], o[2], d[0], d[1], d[2], far, False, stack)
            t[r] = distance
            faces[r] = tree.order[hit] if hit >= 0 else MISS
            weights[r, 0] = u
            weights[r, 1] = v


def cast_many(
    tree: Tree, origins: np.ndarray, directions: np.ndarray, far: float = np.inf
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the first hits of many rays, given by origins and directions (rays, 3).

    Returns t (rays,), which is ``far`` where nothing is hit; face indices of the mesh (rays,), -1 where nothing is hit;
    and the barycentric weights (rays, 2) of corners 1 and 2.
    """
    t = np.empty(len(origins), np.float64)
    faces = np.empty(len(origins), np.int32)
    weights = np.empty((len(origins), 2), np.float64)
    _cast_many(
        tree,
        np.ascontiguousarray(origins, np.float64),
        np.ascontiguousarray(directions, np.float64),
        far,
        t,
        faces,
        weights,
    )
    return t, faces, weights


def cast_brute_force(
    vertices: Float[np.ndarray, "verts 3"],
    faces: Int[np.ndarray, "faces 3"],
    origins: Float[np.ndarray, "rays 3"],
    directions: Float[np.ndarray, "rays 3"],
) -> tuple[Float[np.ndarray, "rays"], Int[np.ndarray, "rays"]]:
    """Finds the nearest hit of each ray by testing every triangle, in plain numpy.

    Returns distances in units of the direction's length (∞ for a miss) and face indices (-1 for a miss).
    """
    corners = vertices.astype(np.float64)[faces]
    distances = np.full((len(origins), len(faces)), np.inf)
    for r, (origin, direction) in enumerate(zip(origins, directions, strict=True)):
        # origin + t·direction = corner0 + u·edge1 + v·edge2, one 3x3 system per triangle.
        edge1, edge2 = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
        systems = np.stack([np.broadcast_to(-direction, edge1.shape), edge1, edge2], axis=-1)
        solvable = np.abs(np.linalg.det(systems)) > 1e-18
        right = (origin - corners[solvable, 0])[..., None]
        t, u, v = np.moveaxis(np.linalg.solve(systems[solvable], right)[..., 0], -1, 0)
        inside = (u >= 0) & (v >= 0) & (u + v <= 1) & (t > 0)
        distances[r, solvable] = np.where(inside, t, np.inf)
    nearest = distances.argmin(axis=1)
    t = distances[np.arange(len(origins)), nearest]
    return t, np.where(np.isfinite(t), nearest, -1)

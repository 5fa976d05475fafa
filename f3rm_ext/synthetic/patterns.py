"""Procedural textures: colour as a function of texture coordinates, in numba.

A pattern takes coordinates (x, y, z), three linear RGB colours and four parameters of a material, and returns the
linear RGB albedo there. :mod:`f3rm_ext.synthetic.shapes` documents the coordinates of each shape, in whose units sizes
and distances below are.
"""

import math
from typing import no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit, prange

from f3rm_ext.synthetic.materials import MaterialTable

FAST = {"contract", "afn", "reassoc", "nsz", "arcp"}
"""All of fast math except "no infinities" and "no NaNs"."""
TOY_COLORS = (
    (0.62, 0.03, 0.03),
    (0.02, 0.30, 0.10),
    (0.02, 0.10, 0.50),
    (0.80, 0.58, 0.03),
    (0.78, 0.24, 0.02),
    (0.75, 0.75, 0.72),
)


@no_type_check
@njit(cache=True, inline="always")
def _hash(ix, iy, iz):
    """Returns a pseudo-random number in [0, 1) for a lattice point."""
    h = np.uint32(ix * 374761393 + iy * 668265263 + iz * 2147483647 + 974634777)
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(1274126177))
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(2246822519))
    return float(h ^ (h >> np.uint32(15))) * (1.0 / 4294967296.0)


@no_type_check
@njit(cache=True, fastmath=FAST)
def noise(x, y, z):
    """Returns smooth value noise in [0, 1] with features of size 1."""
    fx, fy, fz = math.floor(x), math.floor(y), math.floor(z)
    ix, iy, iz = int(fx), int(fy), int(fz)
    tx, ty, tz = x - fx, y - fy, z - fz
    tx = tx * tx * (3.0 - 2.0 * tx)
    ty = ty * ty * (3.0 - 2.0 * ty)
    tz = tz * tz * (3.0 - 2.0 * tz)
    total = 0.0
    for k in range(8):
        cx, cy, cz = k & 1, (k >> 1) & 1, k >> 2
        weight = (tx if cx else 1.0 - tx) * (ty if cy else 1.0 - ty) * (tz if cz else 1.0 - tz)
        total += weight * _hash(ix + cx, iy + cy, iz + cz)
    return total


@no_type_check
@njit(cache=True, fastmath=FAST)
def fractal(x, y, z, octaves):
    """Returns a sum of noise at doubling frequencies, in [0, 1]."""
    total, amplitude, norm = 0.0, 0.5, 0.0
    for _ in range(octaves):
        total += amplitude * noise(x, y, z)
        norm += amplitude
        amplitude *= 0.5
        x, y, z = 2.03 * x + 17.1, 2.03 * y + 31.7, 2.03 * z + 5.3
    return total / norm


@no_type_check
@njit(cache=True, inline="always")
def _step(low, high, x):
    t = min(1.0, max(0.0, (x - low) / (high - low)))
    return t * t * (3.0 - 2.0 * t)


@no_type_check
@njit(cache=True, inline="always")
def _blend(a, b, t):
    return (a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t, a[2] + (b[2] - a[2]) * t)


@no_type_check
@njit(cache=True, inline="always")
def _times(a, s):
    return (a[0] * s, a[1] * s, a[2] * s)


@no_type_check
@njit(cache=True)
def _toy_color(h):
    """The colour of a pseudo-random number in [0, 1)."""
    return TOY_COLORS[int(h * 6.0) % 6]


@no_type_check
@njit(cache=True)
def _cell(x, y, z):
    """Returns distance and identity of the nearest jittered point, with one such point in each unit cell."""
    fx, fy, fz = math.floor(x), math.floor(y), math.floor(z)
    best, identity = 1e9, 0.0
    for dx in range(-1, 2):
        for dy in range(-1, 2):
            for dz in range(-1, 2):
                cx, cy, cz = fx + dx, fy + dy, fz + dz
                ax = cx + 0.15 + 0.7 * _hash(cx, cy, cz) - x
                ay = cy + 0.15 + 0.7 * _hash(cx + 91, cy, cz) - y
                az = cz + 0.15 + 0.7 * _hash(cx, cy + 57, cz) - z
                d = ax * ax + ay * ay + az * az
                if d < best:
                    best = d
                    identity = _hash(cx, cy, cz + 133)
    return math.sqrt(best), identity


@no_type_check
@njit(cache=True)
def _cube_face(x, y, z):
    """Returns the side (0-5) of the cube ±1 that a point lies on, and its two coordinates there."""
    ax, ay, az = abs(x), abs(y), abs(z)
    if az >= ax and az >= ay:
        return (4 if z > 0 else 5), x, y
    if ay >= ax:
        return (2 if y > 0 else 3), x, z
    return (0 if x > 0 else 1), y, z


@no_type_check
@njit(cache=True)
def _painting(x, y, key):
    sky = _blend((0.75, 0.42, 0.25), (0.16, 0.33, 0.52), _step(0.35, 1.0, y + 0.1 * (noise(x * 3, y * 9, key) - 0.5)))
    sun = math.hypot((x - 0.3 - 0.4 * _hash(int(key * 7), 3, 5)) * 1.3, y - 0.68)
    color = _blend((0.95, 0.75, 0.30), sky, _step(0.10, 0.115, sun))
    for k in range(4):
        ridge = 0.62 - 0.14 * k + 0.16 * (noise(x * (2.2 + k) + 9.7 * k, key, k) - 0.5)
        hill = _blend((0.22, 0.30, 0.42), (0.06, 0.22 + 0.03 * k, 0.06), k / 3.0)
        hill = _times(hill, 0.8 + 0.4 * fractal(x * 20, y * 20, k + key, 2))
        color = _blend(hill, color, _step(ridge - 0.006, ridge + 0.006, y))
    return color


@no_type_check
@njit(cache=True)
def _doughnut(x, y, a, b):
    edge = 0.035 * math.sin(x * 2.0 * math.pi * 7.0) + 0.03 * math.sin(x * 2.0 * math.pi * 11.0 + 1.0)
    down = abs(y - 0.25 if y < 0.75 else y - 1.25)
    icing = _step(0.205 + edge, 0.195 + edge, down)
    color = _blend(_times(a, 0.8 + 0.4 * fractal(x * 40, y * 14, 0.0, 3)), b, icing)
    if icing > 0.5:
        u, v = x * 44.0, y * 14.0
        iu, iv = math.floor(u), math.floor(v)
        turn = 6.283 * _hash(iu, iv, 1)
        du, dv = u - iu - 0.5, v - iv - 0.5
        along = du * math.cos(turn) + dv * math.sin(turn)
        across = -du * math.sin(turn) + dv * math.cos(turn)
        if abs(along) < 0.34 and abs(across) < 0.11 and _hash(iu, iv, 2) < 0.75:
            color = _toy_color(_hash(iu, iv, 3))
    return color


@no_type_check
@njit(cache=True)
def _rug(x, y, a, b, c, radius):
    r = math.hypot(x, y) / radius
    angle = math.atan2(y, x)
    wave = 0.025 * math.sin(angle * 24.0)
    color = a
    if r > 0.93:
        color = b
    elif r > 0.88:
        color = c
    elif r > 0.70 + wave:
        color = b if r > 0.84 or r < 0.72 + wave else a
        petal = abs(math.sin(angle * 12.0)) * 0.09
        if abs(r - 0.79) < petal * 0.45:
            color = c
    else:
        u, v = (x + y) / (0.22 * radius), (x - y) / (0.22 * radius)
        du, dv = abs(u - math.floor(u) - 0.5), abs(v - math.floor(v) - 0.5)
        if max(du, dv) < 0.16:
            color = c
        elif max(du, dv) > 0.43:
            color = b
    thread = 0.82 + 0.36 * noise(x * 160.0, y * 160.0, 0.0)
    return _times(color, thread)


@no_type_check
@njit(cache=True)
def pattern_color(pattern, x, y, z, a, b, c, p0, p1, p2, p3):
    """Returns the linear RGB albedo (or emitted colour) of a pattern at texture coordinates (x, y, z)."""
    if pattern == 1:
        odd = (math.floor(x / p0) + math.floor(y / p0)) & 1
        return b if odd else a
    if pattern == 2:
        t = (p1 * x + p2 * y + p3 * z) / p0
        return b if math.floor(t) & 1 else a
    if pattern == 3:
        bend = 5.0 * (fractal(x * 1.6, y * 5.0, z * 5.0, 3) - 0.5)
        ring = math.hypot(y + 0.13, z - 0.31) / p0 + bend
        ring = 0.5 + 0.5 * math.sin(6.283 * ring)
        grain = fractal(x * 14.0, y * 190.0, z * 190.0, 2)
        return _times(_blend(a, b, 0.75 * ring * ring + 0.25 * grain), 0.86 + 0.28 * grain)
    if pattern == 4:
        turbulence = fractal(x / p0, y / p0, z / p0, 5)
        vein = abs(math.sin(3.1416 * (0.6 * x + 0.9 * y + 0.5 * z) / p0 + 9.0 * turbulence))
        fine = abs(math.sin(8.0 * (x - y + z) / p0 + 14.0 * turbulence))
        color = _blend(b, a, _step(0.0, 0.35, vein))
        return _blend(_blend(c, color, 0.45), color, _step(0.0, 0.12, fine))
    if pattern == 5:
        d, identity = _cell(x / p0, y / p0, z / p0)
        if d > 0.24 + 0.28 * identity:
            return _times(a, 0.94 + 0.12 * noise(x * 90, y * 90, z * 90))
        return b if identity < 0.4 else (c if identity < 0.75 else (0.16, 0.15, 0.15))
    if pattern == 6:
        u, v = x / p0, y / p0
        over = (math.floor(u) + math.floor(v)) & 1
        thread = u - math.floor(u) if over else v - math.floor(v)
        shade = 0.75 + 0.5 * math.sin(3.1416 * thread) * (0.8 + 0.4 * noise(x * 31, y * 31, z * 31))
        return _times(b if over else a, shade)
    if pattern == 7:
        row = math.floor(y / p1)
        u = x / p0 + _hash(int(row), 7, 1)
        board = math.floor(u)
        tint = _hash(int(row), int(board), 3)
        grain = fractal(x * 3.0 + 40.0 * tint, y * 55.0, 9.0 * tint, 4)
        color = _times(_blend(a, b, 0.55 * tint + 0.45 * grain), 0.85 + 0.3 * grain)
        gap = min(min(y / p1 - row, row + 1 - y / p1) * p1, min(u - board, board + 1 - u) * p0)
        return _times(color, 0.45 + 0.55 * _step(0.0005, 0.0035, gap))
    if pattern == 8:
        side, u, v = _cube_face(x, y, z)
        su, sv = (u + 1) * 1.5, (v + 1) * 1.5
        iu, iv = math.floor(su), math.floor(sv)
        if max(abs(su - iu - 0.5), abs(sv - iv - 0.5)) > 0.43:
            return (0.015, 0.015, 0.015)
        return _toy_color(_hash(int(iu) + 10 * side, int(iv), int(p0)))
    if pattern == 9:
        return _painting(x, y, p0)
    if pattern == 10:
        return _doughnut(x, y, a, b)
    if pattern == 11:
        return _rug(x, y, a, b, c, p0)
    if pattern == 12:
        side, u, v = _cube_face(x, y, z)
        if abs(u) < 0.16 or (side >= 4 and abs(v) < 0.16):
            return b
        du, dv = 3.5 * u - math.floor(3.5 * u) - 0.5, 3.5 * v - math.floor(3.5 * v) - 0.5
        return c if du * du + dv * dv < 0.06 else a
    if pattern == 13:
        blush = _step(-p0, p0, z + 0.5 * p0 * (fractal(x * 60, y * 60, z * 15, 3) - 0.5))
        pores = 0.88 + 0.2 * noise(x / p1, y / p1, z / p1)
        return _times(_blend(a, b, blush), pores)
    if pattern == 14:
        if z < p0 or z > p1:
            return a
        middle, t = 0.5 * (p0 + p1), x * p2
        if min(z - p0, p1 - z) < 0.08 * (p1 - p0):
            return c
        zigzag = middle + (abs(t - math.floor(t) - 0.5) - 0.25) * 1.2 * (p1 - p0)
        return b if abs(z - zigzag) < 0.13 * (p1 - p0) else a
    if pattern == 15:
        cloud = _step(0.45, 0.75, fractal(x * 3.0, y * 5.0, 0.0, 4))
        return _blend(_blend(a, b, _step(0.0, 0.8, y)), c, 0.8 * cloud)
    if pattern == 16:
        d, _ = _cell(x / p0, y / p0, z / p0)
        return b if d < 0.3 else a
    if pattern == 17:
        stripe = math.floor((x + y) / p1) & 1
        color = _times(a, 1.0 if stripe else 0.93) if z > p0 else b
        return _times(color, 0.96 + 0.08 * noise(x * 45, y * 45, z * 45))
    return _times(a, 1.0 + p1 * (2.0 * fractal(x / p0, y / p0, z / p0, 3) - 1.0))


@no_type_check
@njit(cache=True, parallel=True)
def _pattern_colors(table, which, coords, out):
    for i in prange(len(coords)):
        m = which[i]
        a, b, c = table.colors[m]
        p = table.params[m]
        out[i, 0], out[i, 1], out[i, 2] = pattern_color(
            table.pattern[m],
            coords[i, 0],
            coords[i, 1],
            coords[i, 2],
            (a[0], a[1], a[2]),
            (b[0], b[1], b[2]),
            (c[0], c[1], c[2]),
            p[0],
            p[1],
            p[2],
            p[3],
        )


def pattern_colors(
    table: MaterialTable, which: Int[np.ndarray, " n"], coords: Float[np.ndarray, "n 3"]
) -> Float[np.ndarray, "n 3"]:
    """Returns the albedo (or emitted colour), linear RGB, of materials at texture coordinates."""
    out = np.empty((len(coords), 3))
    _pattern_colors(table, which, coords, out)
    return out

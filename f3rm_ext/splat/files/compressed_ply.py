"""Compressed PLY of PlayCanvas (SuperSplat, gsplat's ``ply_compressed``): 16 bytes per Gaussian, and SH in bytes.

Each chunk of 256 Gaussians stores the least and greatest position, log-scale and colour. Each Gaussian stores values
between these in 11 + 10 + 11 bits (8 per channel for colours). SH coefficients range from -4 to 4 in 256 steps.
"""

from io import BufferedIOBase
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8, UInt32

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.info import SplatInfo, read_tags, tag_comments
from f3rm_ext.splat.files.ply import rest_columns, rest_degree
from f3rm_ext.splat.gaussians import SH_C0, Gaussians, sh_rest_count
from f3rm_ext.utils.ply import PlyTables, Table, header

CHUNK = 256
LIMIT_SCALE = 20.0
"""Log-scales are clamped to ± this."""
SH_RANGE = 8.0
"""Width of the range of SH coefficients."""
_VECTORS = (("", "xyz"), ("scale_", "xyz"), ("", "rgb"))
BOUNDS = tuple(f"{end}_{name}{axis}" for name, axes in _VECTORS for end in ("min", "max") for axis in axes)
PACKED = ("packed_position", "packed_rotation", "packed_scale", "packed_color")
_BITS = ((21, 11), (11, 10), (0, 11))
"""Shift and number of bits of x, y and z."""
_BLOCK = 256 * CHUNK


def is_compressed(tables: PlyTables) -> bool:
    """Returns whether a PLY file has this format."""
    return any(name in tables.tables.get("vertex", Table("", 0)).kinds for name in PACKED)


def read_compressed_ply(path: Path, tables: PlyTables) -> tuple[Gaussians, SplatInfo]:
    """Reads splats; float32, on the CPU, values not checked.

    Raises:
        SplatFileError: the file is of another kind, or damaged.
    """
    names = _require_layout(path, tables)
    count = tables.tables["vertex"].count
    bounds = np.empty((tables.tables["chunk"].count, len(BOUNDS)))
    bounds[:, -6:] = (0, 0, 0, 1, 1, 1)  # in the first version of the format, colours range from 0 to 1
    for where, rows in tables.rows("chunk", names):
        bounds[where, : len(names)] = np.stack([rows[name] for name in names], axis=1)
    vectors, quats = np.empty((3, count, 3), "f4"), np.empty((count, 4), "f4")
    opacities = np.empty((count, 1), "f4")
    with np.errstate(over="ignore", invalid="ignore"):  # a later check finds values that are not finite
        for where, rows in tables.rows("vertex", list(PACKED), chunk=_BLOCK):
            ends = bounds[np.arange(where.start, where.stop) // CHUNK].reshape(-1, 3, 2, 3)
            position, rotation, scale, color = (rows[name].astype(np.uint32) for name in PACKED)
            vectors[0, where] = _between(ends[:, 0], _unpack_vector(position))
            vectors[1, where] = _between(ends[:, 1], _unpack_vector(scale))
            shown = np.stack([packing.unpack_unorm(color, shift, 8) for shift in (24, 16, 8)], axis=1)
            vectors[2, where] = (_between(ends[:, 2], shown) - 0.5) / SH_C0
            quats[where] = _unpack_rotations(rotation)
            opacities[where] = packing.alphas_to_logits(packing.unpack_unorm(color, 0, 8))
    rest = _read_rest(path, tables, count)
    mode, fused, comments = read_tags(tables.comments)
    means, scales, dc = vectors
    gaussians = Gaussians.from_arrays(means, scales, quats, opacities, dc, rest)
    return gaussians, SplatInfo("compressed-ply", mode, fused, gaussians.sh_degree, count, comments)


def write_compressed_ply(stream: BufferedIOBase, gaussians: Gaussians, info: SplatInfo) -> None:
    """Writes splats. Neighbours in the file should be neighbours in space; see :func:`packing.morton_order`."""
    arrays = gaussians.arrays()
    count, rest = len(gaussians), arrays["features_rest"]
    blocks = [slice(start, start + _BLOCK) for start in range(0, count, _BLOCK)]
    bounds = np.empty((-(-count // CHUNK), len(BOUNDS)), dtype="<f4")
    packed = np.empty((count, len(PACKED)), dtype="<u4")
    for block in blocks:
        chunks = slice(block.start // CHUNK, -(-block.stop // CHUNK))
        bounds[chunks], packed[block] = _pack({name: array[block] for name, array in arrays.items()})
    elements = {
        "chunk": (len(bounds), dict.fromkeys(BOUNDS, "float32")),
        "vertex": (count, dict.fromkeys(PACKED, "uint32")),
    }
    if rest.shape[1]:
        elements["sh"] = (count, dict.fromkeys(rest_columns(rest), "uint8"))
    stream.write(header(elements, tag_comments(info)))
    stream.write(bounds.tobytes())
    stream.write(packed.tobytes())
    for block in blocks if rest.size else ():
        stream.write(_pack_rest(rest[block]).tobytes())


def _pack(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns bounds of chunks and packed numbers of a block."""
    count = len(arrays["means"])
    chunk_of = np.arange(count) // CHUNK
    colors = arrays["features_dc"].astype(np.float64) * SH_C0 + 0.5
    vectors = (arrays["means"], np.clip(arrays["scales"], -LIMIT_SCALE, LIMIT_SCALE), colors)
    bounds, parts = [], []
    for vector in vectors:
        starts = np.arange(0, count, CHUNK)
        low = np.minimum.reduceat(vector, starts, axis=0).astype(np.float32)
        high = np.maximum.reduceat(vector, starts, axis=0).astype(np.float32)
        bounds += [low, high]
        # The bounds as rounded for the file, since a reader interpolates between those.
        low, high = low.astype(np.float64)[chunk_of], high.astype(np.float64)[chunk_of]
        extent = high - low
        parts.append(np.where(extent > 0, (vector - low) / np.where(extent > 0, extent, 1), 0))
    rgba = np.concatenate([parts[2], packing.logits_to_alphas(arrays["opacities"])[:, None]], axis=1)
    color = packing.pack_unorm(rgba, 8)
    packed = [
        _pack_vector(parts[0]),
        _pack_rotations(arrays["quats"]),
        _pack_vector(parts[1]),
        color[:, 0] << 24 | color[:, 1] << 16 | color[:, 2] << 8 | color[:, 3],
    ]
    return np.concatenate(bounds, axis=1), np.stack(packed, axis=1)


def _pack_vector(parts: Float[np.ndarray, "n 3"]) -> UInt32[np.ndarray, " n"]:
    x, y, z = (packing.pack_unorm(parts[:, axis], bits) << np.uint32(shift) for axis, (shift, bits) in enumerate(_BITS))
    return x | y | z


def _unpack_vector(packed: UInt32[np.ndarray, " n"]) -> Float[np.ndarray, "n 3"]:
    return np.stack([packing.unpack_unorm(packed, shift, bits) for shift, bits in _BITS], axis=1)


def _between(ends: Float[np.ndarray, "n 2 3"], part: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
    """Interpolates between the least and the greatest value; exact at both ends."""
    return ends[:, 0] * (1 - part) + ends[:, 1] * part


def _pack_rotations(quats: Float[np.ndarray, "n 4"]) -> UInt32[np.ndarray, " n"]:
    largest, others = packing.drop_largest(packing.unit_quats(quats))
    a, b, c = packing.pack_unorm(others * packing.HALF_DIAGONAL + 0.5, 10).T
    return largest.astype(np.uint32) << 30 | a << 20 | b << 10 | c


def _unpack_rotations(packed: UInt32[np.ndarray, " n"]) -> Float[np.ndarray, "n 4"]:
    others = np.stack([packing.unpack_unorm(packed, shift, 10) for shift in (20, 10, 0)], axis=1)
    return packing.insert_largest((packed >> np.uint32(30)).astype(np.int64), (others - 0.5) / packing.HALF_DIAGONAL)


def _pack_rest(rest: Float[np.ndarray, "n coeffs 3"]) -> UInt8[np.ndarray, "n channel_coeffs"]:
    levels = np.clip(np.floor((rest.astype(np.float64) / SH_RANGE + 0.5) * 256), 0, 255).astype(np.uint8)
    return levels.transpose(0, 2, 1).reshape(len(rest), -1)


def _read_rest(path: Path, tables: PlyTables, count: int) -> Float[np.ndarray, "n coeffs 3"]:
    """Reads SH coefficients: the centre of each level, but the ends of the range for the first and the last level."""
    table = tables.tables.get("sh")
    rest = np.empty((count, 0 if table is None else sh_rest_count(rest_degree(path, table)), 3), "f4")
    columns = rest_columns(rest)
    centres = (np.arange(256) + 0.5) / 256
    centres[0], centres[255] = 0, 1
    values = ((centres - 0.5) * SH_RANGE).astype(np.float32)
    for where, rows in tables.rows("sh", list(columns)) if columns else ():
        for name, column in columns.items():
            column[where] = values[rows[name].astype(np.uint8)]
    return rest


def _require_layout(path: Path, tables: PlyTables) -> list[str]:
    """Returns the properties of chunks, in the order of :data:`BOUNDS`."""
    chunk, vertex = (tables.tables.get(name, Table(name, 0)) for name in ("chunk", "vertex"))
    names = list(BOUNDS if any(name in chunk.kinds for name in BOUNDS[12:]) else BOUNDS[:12])
    missing = [name for name in names if name not in chunk.kinds]
    missing += [name for name in PACKED if name not in vertex.kinds]
    if missing:
        raise SplatFileError(
            f"{path} is a compressed PLY file that lacks {', '.join(missing[:6])}: export the splats again."
        )
    wrong = [name for name in PACKED if vertex.kinds[name] not in ("u4", "i4")]
    sh = tables.tables.get("sh")
    wrong += [name for name, kind in (sh.kinds if sh else {}).items() if kind != "u1"]
    if wrong:
        raise SplatFileError(f"{path} has {', '.join(wrong[:6])} in another kind of number: export the splats again.")
    if chunk.count != -(-vertex.count // CHUNK) or (sh is not None and sh.count != vertex.count):
        raise SplatFileError(
            f"{path} has {chunk.count} chunks of {CHUNK}{'' if sh is None else f' and SH for {sh.count}'}, which do "
            f"not fit its {vertex.count} Gaussians: export the splats again."
        )
    return names

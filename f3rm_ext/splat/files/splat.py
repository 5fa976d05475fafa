"""Splats as ``.splat`` of antimatter15's WebGL viewer: 32 bytes each, without header and spherical harmonics.

Position and size (not its logarithm) are float32. Colour, opacity and rotation are bytes.
"""

from io import BufferedIOBase
from pathlib import Path

import numpy as np

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.info import SplatInfo
from f3rm_ext.splat.gaussians import SH_C0, Gaussians

RECORD = np.dtype([("position", "<f4", 3), ("size", "<f4", 3), ("rgba", "u1", 4), ("rotation", "u1", 4)])
_CHUNK = 1 << 16


def read_splat(path: Path) -> tuple[Gaussians, SplatInfo]:
    """Reads splats; float32, on the CPU, values not checked (sizes of 0 or less have no finite logarithm).

    Raises:
        SplatFileError: the file is of another kind, or cut short.
    """
    size = path.stat().st_size
    if size % RECORD.itemsize:
        raise SplatFileError(
            f"{path} is not a whole number of records of {RECORD.itemsize} bytes ({size} bytes), so it is cut short "
            "or no .splat file: copy or export it again."
        )
    count = size // RECORD.itemsize
    means, scales, quats = np.empty((count, 3), "f4"), np.empty((count, 3), "f4"), np.empty((count, 4), "f4")
    opacities, dc = np.empty((count, 1), "f4"), np.empty((count, 3), "f4")
    with path.open("rb") as stream, np.errstate(divide="ignore", invalid="ignore"):
        for start in range(0, count, _CHUNK):
            rows = np.frombuffer(stream.read(_CHUNK * RECORD.itemsize), RECORD)
            block = slice(start, start + len(rows))
            means[block] = rows["position"]
            scales[block] = np.log(rows["size"])
            colors = rows["rgba"] / 255.0
            dc[block] = (colors[:, :3] - 0.5) / SH_C0
            opacities[block] = packing.alphas_to_logits(colors[:, 3])
            quats[block] = rows["rotation"] / 128.0 - 1.0
    rest = np.empty((count, 0, 3), "f4")
    gaussians = Gaussians.from_arrays(means, scales, quats, opacities, dc, rest)
    return gaussians, SplatInfo("splat", count=count)


def write_splat(stream: BufferedIOBase, gaussians: Gaussians, info: SplatInfo) -> None:
    """Writes splats, of which the format can store neither SH coefficients beyond the first nor the information. Large
    ones should come first; see :func:`packing.importance_order`."""
    arrays, limits = gaussians.arrays(), np.finfo(np.float32)
    for start in range(0, len(gaussians), _CHUNK):
        block = slice(start, start + _CHUNK)
        rows = np.empty(len(arrays["means"][block]), dtype=RECORD)
        rows["position"] = arrays["means"][block]
        # Within float32, or a reader would get a logarithm that is infinite.
        rows["size"] = np.exp(arrays["scales"][block].astype(np.float64)).clip(limits.tiny, limits.max)
        colors = arrays["features_dc"][block].astype(np.float64) * SH_C0 + 0.5
        rgba = np.concatenate([colors, packing.logits_to_alphas(arrays["opacities"][block])[:, None]], axis=1)
        rows["rgba"] = packing.pack_unorm(rgba, 8)
        rows["rotation"] = (packing.unit_quats(arrays["quats"][block]) * 128 + 128).round().clip(0, 255)
        stream.write(rows.tobytes())

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
    rows = np.fromfile(path, RECORD)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = np.log(rows["size"])
    colors, quats = rows["rgba"] / 255.0, rows["rotation"] / 128.0 - 1.0
    opacities, dc = packing.alphas_to_logits(colors[:, 3]), (colors[:, :3] - 0.5) / SH_C0
    rest = np.empty((len(rows), 0, 3))
    gaussians = Gaussians.from_arrays(np.ascontiguousarray(rows["position"]), scales, quats, opacities, dc, rest)
    return gaussians, SplatInfo("splat", count=len(rows))


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

"""Writes splats as OpenUSD: a ``ParticleField3DGaussianSplat`` (usdVol, since OpenUSD 26.03) in a text file (.usda).

The prim has no place for the compensation of opacities: ``customLayerData`` of the file says so.
"""

import json
from collections.abc import Iterator
from io import BufferedIOBase

import numpy as np
from jaxtyping import Shaped

from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.info import SplatInfo, find_maker, tag_comments
from f3rm_ext.splat.files.scores import LABEL
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.utils.provenance import MADE_BY

_BLOCK = 4096
"""Rows that are formatted at a time."""


def write_usd_splats(stream: BufferedIOBase, gaussians: Gaussians, info: SplatInfo) -> None:
    """Writes splats.

    Args:
        gaussians: z up, which the file says.
        info: its tags and comments go into ``customLayerData``; its scores into primvars.
    """
    arrays = gaussians.arrays()
    harmonics = np.concatenate([arrays["features_dc"][:, None], arrays["features_rest"]], axis=1)
    sizes, means = np.exp(arrays["scales"].astype(np.float64)), arrays["means"]
    reach = 3 * sizes.max(axis=1, keepdims=True)
    extent = np.stack([(means - reach).min(axis=0), (means + reach).max(axis=0)])
    comments = tag_comments(info)
    stream.write(
        f"""#usda 1.0
# {MADE_BY}: {find_maker(comments)}
(
    customLayerData = {{
        string[] comments = {json.dumps(comments, ensure_ascii=False)}
    }}
    defaultPrim = "Splats"
    metersPerUnit = 1
    upAxis = "Z"
)

def ParticleField3DGaussianSplat "Splats"
{{
    uniform int radiance:sphericalHarmonicsDegree = {gaussians.sh_degree}
    uniform token sortingModeHint = "zDepth"
""".encode(errors="backslashreplace")
    )
    attributes = {
        "float3[] extent": extent,
        "point3f[] positions": means,
        "quatf[] orientations": packing.unit_quats(arrays["quats"]),
        "float3[] scales": sizes,
        "float[] opacities": packing.logits_to_alphas(arrays["opacities"]),
        "float3[] radiance:sphericalHarmonicsCoefficients": harmonics.reshape(-1, 3),
    }
    if info.scores is not None:
        attributes |= {f"float[] primvars:{name}": values for name, values in info.scores.columns.items()}
        attributes[f"int[] primvars:{LABEL}"] = info.scores.labels
    for declaration, values in attributes.items():
        stream.write(f"    {declaration} = [".encode())
        stream.writelines(_format_rows(values))
        stream.write(b'] (\n        interpolation = "vertex"\n    )\n' if "primvars" in declaration else b"]\n")
    stream.write(b"}\n")


def _format_rows(values: Shaped[np.ndarray, "n *columns"]) -> Iterator[bytes]:
    """Yields rows as text, tuples in brackets, in blocks."""
    row = "%.7g" if values.ndim == 1 else f"({', '.join(['%.7g'] * values.shape[1])})"
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        text = ", ".join([row] * len(block)) % tuple(block.ravel().tolist())
        yield (text if start == 0 else f", {text}").encode()

"""Writes splats as glTF 2.0 with KHR_gaussian_splatting (release candidate of 2026), one binary file (.glb).

Viewers without the extension show a point cloud. The file has y up, as glTF demands, where splats have z up. It has no
place for the compensation of opacities: its comments (``asset.extras``) say so.
"""

import json
import struct
from io import BufferedIOBase

import numpy as np
import torch
from jaxtyping import Float

from f3rm_ext.capture.frame import Y_UP
from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.info import SplatInfo, find_maker, tag_comments
from f3rm_ext.splat.gaussians import Gaussians, sh_to_rgb
from f3rm_ext.splat.transform import transform
from f3rm_ext.utils.pictures import to_linear
from f3rm_ext.utils.provenance import MADE_BY

EXTENSION = "KHR_gaussian_splatting"
_FLOAT, _SHORT, _BYTE = 5126, 5122, 5121
_DTYPES = {_FLOAT: "<f4", _SHORT: "<i2", _BYTE: "u1"}
_TYPES = {1: "SCALAR", 3: "VEC3", 4: "VEC4"}
_ARRAY_BUFFER, _POINTS = 34962, 0


def write_gltf_splats(stream: BufferedIOBase, gaussians: Gaussians, info: SplatInfo) -> None:
    """Writes splats.

    Args:
        info: its tags and comments go into ``asset.extras``; its scores into attributes ``_SCORE_0`` and on, and
            ``_LABEL``, with the names of the queries in the primitive's ``extras``.
    """
    buffer = _Buffer()
    for name, values, component in _attributes(transform(gaussians, Y_UP, 1.0, np.zeros(3))):
        buffer.add(name, values, component)
    queries: dict[str, object] = {}
    if info.scores is not None:
        # Names of attributes of one's own begin with an underscore; whole numbers of 32 bits are not allowed.
        for index, values in enumerate(info.scores.scores.T):
            buffer.add(f"_SCORE_{index}", values[:, None], _FLOAT)
        buffer.add("_LABEL", info.scores.labels[:, None].astype(np.float32), _FLOAT)
        queries = {"extras": {"queries": info.scores.names}}
    comments = tag_comments(info)
    extras = {MADE_BY: find_maker(comments), "comments": comments}
    extension = {
        "kernel": "ellipse",
        "colorSpace": "srgb_rec709_display",
        "projection": "perspective",
        "sortingMethod": "cameraDistance",
    }
    primitive = {"attributes": buffer.attributes, "mode": _POINTS, "extensions": {EXTENSION: extension}, **queries}
    tree = {
        "asset": {"version": "2.0", "generator": "f3rm_ext", "extras": extras},
        "extensionsUsed": [EXTENSION],
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [primitive]}],
        "accessors": buffer.accessors,
        "bufferViews": buffer.views,
        "buffers": [{"byteLength": len(buffer.data)}],
    }
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    length = 12 + 8 + len(text) + 8 + len(buffer.data)
    stream.write(struct.pack("<4sII", b"glTF", 2, length))
    for kind, chunk in ((b"JSON", text), (b"BIN\0", buffer.data)):
        stream.write(struct.pack("<I4s", len(chunk), kind))
        stream.write(chunk)


def _attributes(gaussians: Gaussians) -> list[tuple[str, Float[np.ndarray, "n columns"], int]]:
    """The vertex attributes: name, values, type of a component."""
    arrays = gaussians.arrays()
    alphas = packing.logits_to_alphas(arrays["opacities"])[:, None]
    xyzw = np.roll(packing.unit_quats(arrays["quats"]), -1, axis=1)
    # For viewers without the extension: glTF has the colours of vertices in linear light.
    srgb = sh_to_rgb(torch.from_numpy(arrays["features_dc"])).clamp(0, 1).numpy()
    named = [
        ("POSITION", arrays["means"], _FLOAT),
        ("COLOR_0", np.concatenate([to_linear(srgb), alphas], axis=1), _BYTE),
        (f"{EXTENSION}:ROTATION", xyzw, _SHORT),
        (f"{EXTENSION}:SCALE", np.exp(arrays["scales"].astype(np.float64)), _FLOAT),
        (f"{EXTENSION}:OPACITY", alphas, _FLOAT),
        (f"{EXTENSION}:SH_DEGREE_0_COEF_0", arrays["features_dc"], _FLOAT),
    ]
    harmonics = [
        f"{EXTENSION}:SH_DEGREE_{degree}_COEF_{number}"
        for degree in range(1, gaussians.sh_degree + 1)
        for number in range(2 * degree + 1)
    ]
    return named + [(name, arrays["features_rest"][:, i], _FLOAT) for i, name in enumerate(harmonics)]


class _Buffer:
    """The binary chunk and what describes it. Every attribute has a view of its own; rows are multiples of 4 bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.views: list[dict[str, int]] = []
        self.accessors: list[dict[str, object]] = []
        self.attributes: dict[str, int] = {}

    def add(self, name: str, values: Float[np.ndarray, "n columns"], component: int) -> None:
        """Appends an attribute; integers are normalised."""
        top = {_BYTE: 255, _SHORT: 32767}.get(component)
        stored = np.ascontiguousarray(values if top is None else np.rint(values * top), _DTYPES[component])
        accessor: dict[str, object] = {
            "bufferView": len(self.views),
            "componentType": component,
            "count": len(stored),
            "type": _TYPES[stored.shape[1]],
        }
        if top is not None:
            accessor["normalized"] = True
        if name == "POSITION":
            accessor |= {"min": stored.min(axis=0).tolist(), "max": stored.max(axis=0).tolist()}
        view = {"buffer": 0, "byteOffset": len(self.data), "byteLength": stored.nbytes, "target": _ARRAY_BUFFER}
        self.attributes[name] = len(self.accessors)
        self.views.append(view)
        self.accessors.append(accessor)
        self.data += stored.tobytes()

"""The file of a mesh's features, ``room.ply.features.npz`` for ``room.ply``, and the refusal of those of another mesh.

An uncompressed NPZ file without pickled objects:

- ``provenance``: JSON: the mesh's hash, capture, frame, extractors, and how it was made.
- ``heads``: JSON: name, dimension, extractor and identity of each feature.
- ``heads.NAME.codes`` (vertices, K) float16: features, or their PCA codes, of all vertices in the order of the mesh.
- ``heads.NAME.groups`` (vertices,) int32: number of each vertex's group, -1 for none; missing in older files.
- ``heads.NAME.code_basis`` (K, D): feature ≈ code @ code_basis; empty for full features. ``display_*``: see
  :class:`~f3rm_ext.features.spec.DisplayBasis`.
- ``seen`` (vertices,) bool: vertices that a photo sees; the others have the feature of the nearest one that is.
- with a code map, ``map.NAME.dictionary`` (C, K) float16 and ``map.NAME.texels`` (rows, columns) uint16: the row of
  the dictionary at each texel, 65535 where there is none; see :mod:`f3rm_ext.mesh.semantics.code_map`.
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trimesh
from jaxtyping import Bool
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import MeshError, reason_of
from f3rm_ext.mesh.semantics.code_map import CodeMap
from f3rm_ext.splat.features.heads import LiftedHeads
from f3rm_ext.utils.output_file import NpzWriter, replace_file
from f3rm_ext.utils.provenance import PROVENANCE

COMMAND = "f3rm-ext features lift-mesh"
"""The command that writes such files."""
_MESH_HASH = "mesh_hash"


@dataclass(frozen=True)
class MeshFeatures:
    """Features of a mesh."""

    heads: LiftedHeads
    """One code per vertex and feature."""
    visible: Bool[np.ndarray, " verts"]
    """Vertices that a photo sees."""
    maps: dict[str, CodeMap]
    """Code maps in texture space by the feature's name; empty without them."""
    provenance: dict[str, Any]
    """Capture, frame and extractors, and how the features were made, as JSON."""


def features_path(mesh: Path) -> Path:
    """Returns the file of a mesh's features.

    >>> features_path(Path("room/mesh.ply")).as_posix()
    'room/mesh.ply.features.npz'
    """
    return mesh.with_name(f"{mesh.name}.features.npz")


def mesh_hash(mesh: trimesh.Trimesh) -> str:
    """Returns the hash of a mesh's vertices, faces and texture coordinates, 32 hex digits; colours do not count."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(mesh.vertices, np.float32).tobytes())
    digest.update(np.ascontiguousarray(mesh.faces, np.int64).tobytes())
    if isinstance(mesh.visual, TextureVisuals) and mesh.visual.uv is not None:
        digest.update(np.ascontiguousarray(mesh.visual.uv, np.float32).tobytes())
    return digest.hexdigest()


def save_features(path: Path, mesh: trimesh.Trimesh, features: MeshFeatures) -> None:
    """Writes the features of a mesh. A file of that name remains whole until the new one is. Raises ConfigError where
    the file cannot be written."""
    record = {"made_by": COMMAND, _MESH_HASH: mesh_hash(mesh), **features.provenance}
    with replace_file(path) as stream, NpzWriter(stream) as npz:
        npz.array(PROVENANCE, np.asarray(json.dumps(record)))
        npz.array("heads", np.asarray(json.dumps(features.heads.describe())))
        npz.array("seen", features.visible)
        for name, values in features.heads.state_dict().items():
            npz.array(name, values.cpu().numpy())
        for name, code_map in features.maps.items():
            npz.array(f"map.{name}.dictionary", code_map.dictionary)
            npz.array(f"map.{name}.texels", code_map.texels)


def load_features(path: Path, mesh: trimesh.Trimesh) -> MeshFeatures:
    """Reads the features of a mesh. Raises MeshError where there is no such file, or it cannot be read or is of another
    mesh."""
    if not path.is_file():
        raise MeshError(f"There is no file {path}, so the mesh has no features: lift some with `{COMMAND}`.")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            record = json.loads(str(archive[PROVENANCE]))
            if record[_MESH_HASH] != mesh_hash(mesh):
                raise MeshError(
                    f"The features in {path} are of another mesh, or this one was changed after they were made: lift "
                    f"them again with `{COMMAND}`."
                )
            state = {name: torch.from_numpy(archive[name]) for name in archive if name.startswith("heads.")}
            heads = LiftedHeads()
            heads.grow(json.loads(str(archive["heads"])), state, "")
            maps = {
                name: CodeMap(archive[f"map.{name}.dictionary"], archive[f"map.{name}.texels"])
                for name in heads.to_dict()
                if f"map.{name}.texels" in archive
            }
            return MeshFeatures(heads, archive["seen"], maps, record)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise MeshError(
            f"{path} cannot be read ({type(error).__name__}: {reason_of(error)}): it may be damaged, so make it again "
            f"with `{COMMAND}`."
        ) from error

"""The file of a mesh's features."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.semantics.code_map import CodeMap
from f3rm_ext.mesh.semantics.feature_file import MeshFeatures, features_path, load_features, save_features
from f3rm_ext.splat.features.heads import LiftedHead, LiftedHeads


@pytest.fixture
def features(halves: torch.Tensor, make_spec: Callable) -> MeshFeatures:
    heads = LiftedHeads()
    heads.add(LiftedHead(make_spec("west-east", 3), halves))
    texels = np.array([[0, 1], [65535, 1]], np.uint16)
    maps = {"west-east": CodeMap(np.eye(2, 3, dtype=np.float16), texels)}
    return MeshFeatures(heads, np.ones(len(halves), bool), maps, {"frame": "capture", "data": "room"})


def test_all_comes_back(floor: trimesh.Trimesh, features: MeshFeatures, tmp_path: Path) -> None:
    path = features_path(tmp_path / "floor.ply")
    save_features(path, floor, features)
    assert [file.name for file in tmp_path.iterdir()] == ["floor.ply.features.npz"]
    found = load_features(path, floor)
    (head,), (wanted,) = found.heads.to_dict().values(), features.heads.to_dict().values()
    assert torch.equal(head.codes, wanted.codes) and head.codes.dtype == torch.float16
    assert (head.name, head.identity, head.basis) == (wanted.name, wanted.identity, None)
    assert torch.equal(head.display_components, wanted.display_components)
    np.testing.assert_array_equal(found.maps["west-east"].texels, features.maps["west-east"].texels)
    assert found.provenance["data"] == "room" and found.provenance["made_by"] == "f3rm-ext features lift-mesh"
    assert found.visible.all()


def test_features_of_another_mesh_are_refused(floor: trimesh.Trimesh, features: MeshFeatures, tmp_path: Path) -> None:
    save_features(tmp_path / "a.npz", floor, features)
    colored = trimesh.Trimesh(floor.vertices, floor.faces, process=False)
    moved = floor.copy()
    moved.vertices[3] += 0.01
    for other in (moved, colored):
        with pytest.raises(MeshError, match="another mesh"):
            load_features(tmp_path / "a.npz", other)


def test_missing_and_damaged_files(floor: trimesh.Trimesh, features: MeshFeatures, tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="f3rm-ext features lift-mesh"):
        load_features(tmp_path / "a.npz", floor)
    save_features(tmp_path / "a.npz", floor, features)
    whole = (tmp_path / "a.npz").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PK\x03\x04 no archive"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(MeshError, match="cannot be read"):
            load_features(tmp_path / "a.npz", floor)
    with (tmp_path / "a.npz").open("wb") as stream:
        np.savez(stream, provenance=np.asarray("{}"))
    with pytest.raises(MeshError, match="cannot be read"):
        load_features(tmp_path / "a.npz", floor)

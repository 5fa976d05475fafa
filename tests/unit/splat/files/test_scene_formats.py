"""Splats in formats of whole scenes: glTF with KHR_gaussian_splatting, and OpenUSD."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.capture.frame import Y_UP
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.files import SplatInfo, write_splats
from f3rm_ext.splat.files.gltf import EXTENSION
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rendering import SplatScene, render

Make = Callable[..., Gaussians]
INFO = SplatInfo(render_mode="mip", comments=("made_by: f3rm-ext export splats",))
_DTYPES = {5126: "<f4", 5122: "<i2", 5121: "u1"}
_COLUMNS = {"SCALAR": 1, "VEC3": 3, "VEC4": 4}


def read_glb(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON of a .glb file, and its attributes as numbers."""
    data = path.read_bytes()
    length = int.from_bytes(data[12:16], "little")
    tree, start = json.loads(data[20 : 20 + length]), 20 + length + 8
    assert len(data) == int.from_bytes(data[8:12], "little") and tree["buffers"][0]["byteLength"] == len(data) - start
    arrays = {}
    for name, index in tree["meshes"][0]["primitives"][0]["attributes"].items():
        accessor = tree["accessors"][index]
        view, dtype = tree["bufferViews"][accessor["bufferView"]], np.dtype(_DTYPES[accessor["componentType"]])
        assert view["byteOffset"] % 4 == 0
        columns = _COLUMNS[accessor["type"]]
        flat = np.frombuffer(data, dtype, accessor["count"] * columns, start + view["byteOffset"])
        top = np.iinfo(dtype).max if accessor.get("normalized") else 1
        arrays[name] = flat.reshape(-1, columns).astype(np.float64) / top
    return tree, arrays


def from_glb(arrays: dict[str, np.ndarray], degree: int) -> Gaussians:
    """The Gaussians of the attributes, in the axes of the file."""
    named = {name.removeprefix(f"{EXTENSION}:"): torch.from_numpy(value).float() for name, value in arrays.items()}
    rest = [named[f"SH_DEGREE_{d}_COEF_{i}"] for d in range(1, degree + 1) for i in range(2 * d + 1)]
    return Gaussians(
        named["POSITION"],
        named["SCALE"].log(),
        named["ROTATION"].roll(1, dims=1),
        named["OPACITY"].logit(1e-6),
        named["SH_DEGREE_0_COEF_0"],
        torch.stack(rest, dim=1),
    )


def drawn(gaussians: Gaussians, turn: torch.Tensor) -> np.ndarray:
    """The picture of a camera that is turned together with the scene."""
    view = torch.eye(4)
    view[:3, :3] = turn.T
    view[2, 3] = 4.0
    K = torch.tensor([[[40.0, 0, 24], [0, 40, 20], [0, 0, 1]]])
    camera = PinholeCameras(view[None], K, torch.tensor([48]), torch.tensor([40]))
    scene = SplatScene(gaussians, MipOptions(filter_3d=False))
    with torch.no_grad():
        return render(scene, camera).outputs()["rgb"].numpy()


@pytest.fixture
def gaussians(colorful: Make) -> Gaussians:
    return colorful(200, 2)


def test_gltf_draws_the_same_with_y_up(gaussians: Gaussians, tmp_path: Path) -> None:
    write_splats(tmp_path / "a.glb", gaussians, INFO)
    tree, arrays = read_glb(tmp_path / "a.glb")
    again = from_glb(arrays, 2)
    turn = torch.from_numpy(Y_UP).float()
    np.testing.assert_allclose(turn @ torch.tensor([0.0, 0, 1]), [0, 1, 0])
    np.testing.assert_allclose(drawn(again, turn), drawn(gaussians, torch.eye(3)), atol=2e-3)
    position = tree["accessors"][tree["meshes"][0]["primitives"][0]["attributes"]["POSITION"]]
    np.testing.assert_allclose(position["min"], arrays["POSITION"].min(axis=0))
    assert tree["extensionsUsed"] == [EXTENSION] and "SplatRenderMode: mip" in tree["asset"]["extras"]["comments"]


def test_other_programs_see_a_gltf_point_cloud_in_linear_colours(gaussians: Gaussians, tmp_path: Path) -> None:
    gaussians.features_dc[:] = 0.0  # mid grey, 0.5 in sRGB and 0.214 in linear light
    write_splats(tmp_path / "a.glb", gaussians, INFO)
    (cloud,) = trimesh.load_scene(tmp_path / "a.glb").geometry.values()
    np.testing.assert_allclose(cloud.vertices, gaussians.means.numpy() @ Y_UP.T, atol=1e-6)
    np.testing.assert_allclose(cloud.colors[:, :3], 55, atol=1)


def test_usd_says_what_the_gaussians_are(gaussians: Gaussians, tmp_path: Path) -> None:
    write_splats(tmp_path / "a.usda", gaussians, INFO)
    text = (tmp_path / "a.usda").read_text()
    assert text.startswith("#usda 1.0\n") and 'def ParticleField3DGaussianSplat "Splats"' in text

    def numbers(name: str) -> np.ndarray:
        (line,) = re.findall(rf"^    \S+ {name} = \[(.*)\]$", text, re.MULTILINE)
        return np.array(re.findall(r"[-+.\de]+", line), float)

    np.testing.assert_allclose(numbers("positions").reshape(-1, 3), gaussians.means, rtol=1e-5)
    np.testing.assert_allclose(numbers("scales").reshape(-1, 3), gaussians.sizes(), rtol=1e-4)
    np.testing.assert_allclose(numbers("opacities"), gaussians.alphas(), rtol=1e-5)
    harmonics = torch.cat([gaussians.features_dc[:, None], gaussians.features_rest], dim=1)
    np.testing.assert_allclose(numbers("radiance:sphericalHarmonicsCoefficients"), harmonics.flatten(), rtol=1e-4)
    low, high = numbers("extent").reshape(2, 3)
    assert (low < gaussians.means.numpy()).all() and (high > gaussians.means.numpy()).all()


def test_usd_opens_in_openusd(gaussians: Gaussians, tmp_path: Path) -> None:
    usd = pytest.importorskip("pxr.Usd", reason="usd-core is not installed")
    write_splats(tmp_path / "a.usda", gaussians, replace(INFO, comments=(*INFO.comments, "photos: Möbel 猫 \udcff")))
    stage = usd.Stage.Open(str(tmp_path / "a.usda"))  # prims live as long as it does
    assert "photos: Möbel 猫" in stage.GetRootLayer().customLayerData["comments"][1]
    prim = stage.GetDefaultPrim()
    assert prim.GetTypeName() == "ParticleField3DGaussianSplat"
    assert len(prim.GetAttribute("radiance:sphericalHarmonicsCoefficients").Get()) == 9 * len(gaussians)
    assert prim.GetAttribute("radiance:sphericalHarmonicsDegree").Get() == 2


@pytest.fixture
def scored() -> SplatInfo:
    scores = {"blue mug": np.linspace(0, 1, 200, dtype=np.float32), "plant": np.full(200, 0.3, np.float32)}
    return SplatInfo(scores=GaussianScores.of_queries(scores, 0.5))


def test_gltf_has_scores_as_attributes_of_its_own(gaussians: Gaussians, scored: SplatInfo, tmp_path: Path) -> None:
    write_splats(tmp_path / "a.glb", gaussians, scored)
    tree, arrays = read_glb(tmp_path / "a.glb")
    assert tree["meshes"][0]["primitives"][0]["extras"] == {"queries": ["blue mug", "plant"]}
    np.testing.assert_allclose(arrays["_SCORE_0"][:, 0], np.linspace(0, 1, 200), atol=1e-6)
    np.testing.assert_allclose(arrays["_SCORE_1"], 0.3, atol=1e-6)
    assert arrays["_LABEL"][:, 0].tolist() == [-1] * 100 + [0] * 100
    (cloud,) = trimesh.load_scene(tmp_path / "a.glb").geometry.values()
    assert len(cloud.vertices) == 200


def test_usd_has_scores_as_primvars(gaussians: Gaussians, scored: SplatInfo, tmp_path: Path) -> None:
    usd = pytest.importorskip("pxr.Usd", reason="usd-core is not installed")
    geom = pytest.importorskip("pxr.UsdGeom", reason="usd-core is not installed")
    write_splats(tmp_path / "a.usda", gaussians, scored)
    stage = usd.Stage.Open(str(tmp_path / "a.usda"))
    written = geom.PrimvarsAPI(stage.GetDefaultPrim()).GetPrimvarsWithAuthoredValues()
    primvars = {primvar.GetPrimvarName(): primvar for primvar in written}
    assert set(primvars) == {"score_blue_mug", "score_plant", "label"}
    assert {primvar.GetInterpolation() for primvar in primvars.values()} == {"vertex"}
    np.testing.assert_allclose(primvars["score_blue_mug"].Get(), np.linspace(0, 1, 200), atol=1e-6)
    assert list(primvars["label"].Get()) == [-1] * 100 + [0] * 100

"""``f3rm-ext export texture`` and ``f3rm-ext eval texture`` as a user types them, on the true mesh of the tiny room."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from PIL import Image

from f3rm_ext.mesh.cleaning import clean, simplify
from f3rm_ext.mesh.mesh_files import read_mesh, read_provenance, vertex_colors
from f3rm_ext.mesh.texture.rendering import get_texture

Typed = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("open3d")


@pytest.fixture(scope="module")
def room(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The true surface with fewer triangles."""
    truth = read_mesh(tiny_capture / "gt_mesh.npz")
    truth.merge_vertices()
    path = tmp_path_factory.mktemp("mesh") / "room.ply"
    simplify(clean(truth), 3000).export(path)
    return path


def test_the_texture_shows_held_out_photos(f3rm_ext: Typed, room: Path, tiny_capture: Path, tmp_path: Path) -> None:
    out, scores, pictures = tmp_path / "room.glb", tmp_path / "scores.json", tmp_path / "pictures"
    done = f3rm_ext(
        "export", "texture", "--data", tiny_capture, "--mesh", room, "--output", out, "--padding", 2
    ).succeeds()
    words = re.search(r"No photo sees (\d+) of (\d+) texels", done.stdout)
    assert words is not None and 0 < int(words[1]) < int(words[2])
    assert "a texture of" in done.stdout and "y up" in done.stdout
    said, mesh = read_provenance(out), read_mesh(out)
    assert said["made_by"] == "f3rm-ext export texture" and said["frame"] == "capture" and said["up"] == "y"
    texture = get_texture(mesh)
    assert texture is not None and texture.shape[0] == texture.shape[1] == said["texture_px"]
    np.testing.assert_allclose(mesh.bounds, read_mesh(room).bounds, atol=1e-4)
    done = f3rm_ext("eval", "texture", out, "--data", tiny_capture, "--out", scores, "--pictures", pictures).succeeds()
    found = json.loads(scores.read_text())
    assert found["psnr"] > 17 and found["coverage"] > 0.98 and len(found["photos"]) == 3
    assert f"{found['psnr']:.2f} dB" in done.stdout
    assert [Image.open(path).size for path in sorted(pictures.iterdir())] == [(128, 48)] * 3


def test_pictures_are_grey_where_a_mask_leaves_out(
    f3rm_ext: Typed, room: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    capture, pictures, mesh = tmp_path / "masked", tmp_path / "pictures", read_mesh(room)
    shutil.copytree(tiny_capture, capture)
    meta = json.loads((capture / "transforms.json").read_text())
    keeps = np.zeros((meta["h"], meta["w"]), np.uint8)
    keeps[:, meta["w"] // 2 :] = 255
    Image.fromarray(keeps).save(capture / "mask.png")
    for frame in meta["frames"]:
        frame["mask_path"] = "mask.png"
    (capture / "transforms.json").write_text(json.dumps(meta))
    mesh.visual.vertex_colors = [200, 10, 10, 255]
    mesh.export(tmp_path / "red.ply")
    f3rm_ext("eval", "texture", tmp_path / "red.ply", "--data", capture, "--pictures", pictures).succeeds()
    for path in pictures.iterdir():
        made, photo = np.split(np.asarray(Image.open(path)), 2, axis=1)
        assert (made[keeps == 0] == 128).all() and (photo[keeps == 0] == 128).all()
        assert (made[keeps > 0] != 128).any(axis=1).mean() > 0.9 and photo[keeps > 0].std() > 10


def test_other_formats_from_a_run(f3rm_ext: Typed, untrained: Any, room: Path, tmp_path: Path) -> None:
    base = ("export", "texture", "--load-config", untrained.config, "--mesh", room)
    f3rm_ext(*base, "--out", tmp_path / "two words.obj", "--texture-size", 256, "--padding", 1).succeeds()
    names = {"two words.obj", "two words.mtl", "two_words.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert Image.open(tmp_path / "two_words.png").size == (256, 256)
    material = (tmp_path / "two words.mtl").read_text().splitlines()
    assert "map_Kd two_words.png" in material and "Kd 1 1 1" in material
    f3rm_ext(*base, "--out", tmp_path / "room.ply", "--no-balance-exposure").succeeds()
    colors = vertex_colors(read_mesh(tmp_path / "room.ply"))
    assert colors is not None and colors.std() > 10


def test_disk_full_keeps_the_old_files(
    f3rm_ext: Typed, room: Path, tiny_capture: Path, tmp_path: Path, fill_disk: Callable[[], None]
) -> None:
    base = ("export", "texture", "--data", tiny_capture, "--mesh", room, "--out", tmp_path / "room.obj")
    base = (*base, "--texture-size", 256, "--padding", 1)
    f3rm_ext(*base).succeeds()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    fill_disk()
    assert "No space left on device" in f3rm_ext(*base, "--no-balance-exposure").refuses()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_mistakes(f3rm_ext: Typed, room: Path, tiny_capture: Path, tmp_path: Path) -> None:
    away = tmp_path / "away.ply"
    trimesh.creation.box((1, 1, 1)).apply_translation([0, 0, 500]).export(away)
    data, mesh, out = ("--data", tiny_capture), ("--mesh", room), ("--out", tmp_path / "room.glb")
    for arguments, says in (
        ((*mesh, *out), "either --load-config or --data"),
        ((*data, *mesh, "--out", tmp_path / "room.stl"), "written as .ply, .obj, .glb"),
        ((*data, *mesh, "--out", room), "--out is the mesh itself"),
        ((*data, "--mesh", away, *out), "photo"),
        ((*data, *mesh, *out, "--texture-size", 64), "texture of 64"),
        ((*data, *mesh, *out, "--texture-size", 9000), "--texture-size is 9000"),
        ((*data, *mesh, *out, "--padding", 0), "--padding is 0"),
        (("--load-config", tmp_path / "none.yml", *mesh, *out), "There is no file"),
    ):
        assert says in f3rm_ext("export", "texture", *arguments).refuses(), arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["away.ply"]
    assert "neither a texture nor vertex colours" in f3rm_ext("eval", "texture", away, *data).refuses()
    assert "either --load-config or --data" in f3rm_ext("eval", "texture", away).refuses()


def test_a_mesh_that_no_photo_shows_has_no_score_there(f3rm_ext: Typed, tiny_capture: Path, tmp_path: Path) -> None:
    away, scores = tmp_path / "away.ply", tmp_path / "scores.json"
    mesh = trimesh.creation.box(transform=trimesh.transformations.translation_matrix([0, 0, -1000]))
    mesh.visual.vertex_colors = [255, 0, 0, 255]
    mesh.export(away)
    done = f3rm_ext("eval", "texture", away, "--data", tiny_capture, "--out", scores).succeeds()
    assert "Warning" not in done.text and '"psnr_covered": null' in scores.read_text()

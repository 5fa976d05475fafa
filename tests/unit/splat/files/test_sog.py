"""SOG: textures worked out by hand, round trips, files of others and damaged ones, and other programs as readers."""

import io
import json
import math
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import RenderMode, SplatInfo, packing, read_splats, write_splats
from f3rm_ext.splat.files.convert import rotation_differences
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
THEIRS = Path(__file__).with_name("splat_transform.sog")
"""``make(200, 2)`` of these tests, converted by splat-transform 2.7.1."""


def webp(pixels: Any, width: int = 4, height: int = 4, **options: Any) -> bytes:
    """A texture whose first pixels are given."""
    image = np.zeros((height * width, 4), np.uint8)
    image[: len(pixels)] = pixels
    stream = io.BytesIO()
    saved = {"format": "WEBP", "lossless": True, "exact": True, **options}
    Image.fromarray(image.reshape(height, width, 4)).save(stream, **saved)
    return stream.getvalue()


def parts() -> tuple[dict[str, Any], dict[str, bytes]]:
    """The description and the textures of two Gaussians with SH degree 1."""
    steps = [i / 64 - 2 for i in range(256)]
    meta = {
        "version": 2,
        "count": 2,
        "means": {"mins": [-1.0, 0.0, 2.0], "maxs": [1.0, 0.0, 4.0], "files": ["means_l.webp", "means_u.webp"]},
        "scales": {"codebook": [i - 200.0 for i in range(256)], "files": ["scales.webp"]},
        "quats": {"files": ["quats.webp"]},
        "sh0": {"codebook": steps, "files": ["sh0.webp"]},
        "shN": {"count": 65, "bands": 1, "codebook": steps, "files": ["centroids.webp", "labels.webp"]},
    }
    palette = np.zeros((2 * 64 * 3, 4), np.uint8)
    palette[64 * 3 : 64 * 3 + 3, :3] = [(0, 64, 128), (192, 255, 129), (127, 128, 128)]  # the first of the second row
    textures = {
        "means_l.webp": webp([(0, 9, 255, 255), (255, 0, 0, 255)]),
        "means_u.webp": webp([(0, 9, 255, 255), (255, 0, 128, 255)]),
        "scales.webp": webp([(200, 195, 0, 255), (201, 202, 203, 255)]),
        "quats.webp": webp([(255, 0, 51, 253), (204, 51, 127, 252)]),
        "sh0.webp": webp([(0, 128, 255, 128), (128, 128, 192, 0)]),
        "centroids.webp": webp(palette, 64 * 3, 2),
        "labels.webp": webp([(64, 0, 0, 255), (0, 0, 0, 255)]),
    }
    return meta, textures


def bundle(path: Path, meta: Any, textures: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("meta.json", meta if isinstance(meta, str) else json.dumps(meta))
        for name, data in textures.items():
            archive.writestr(name, data)
    return path


def test_textures_that_are_read(tmp_path: Path) -> None:
    gaussians, info = read_splats(bundle(tmp_path / "a.sog", *parts()))
    assert info == SplatInfo("sog", None, None, 1, 2)
    middle = 2 + 2 * (128 << 8) / 65535
    wanted = [[1 - math.e, 0, math.expm1(4)], [math.expm1(1), 0, math.expm1(middle)]]
    torch.testing.assert_close(gaussians.means, torch.tensor(wanted))
    assert gaussians.scales.tolist() == [[0, -5, -200], [1, 2, 3]]
    smaller = torch.tensor([[1, -1, -0.6], [0.6, -0.6, -1 / 255]]) * math.sqrt(0.5)
    assert gaussians.quats[0, [0, 2, 3]].tolist() == pytest.approx(smaller[0].tolist(), abs=1e-6)
    assert gaussians.quats[0, 1] == 0, "the others are longer than 1 already"
    assert gaussians.quats[1, 1:].tolist() == pytest.approx(smaller[1].tolist(), abs=1e-6)
    assert gaussians.quats[1].norm() == pytest.approx(1)
    torch.testing.assert_close(gaussians.alphas(), torch.tensor([128 / 255, 0]), rtol=0, atol=1e-3)
    assert gaussians.features_dc.tolist() == [[-2, 0, 127 / 64], [0, 0, 1]]
    assert gaussians.features_rest[0].tolist() == [[-2, -1, 0], [1, 127 / 64, 1 / 64], [-1 / 64, 0, 0]]
    assert (gaussians.features_rest[1] == -2).all()


def test_a_folder_and_a_pressed_zip_hold_the_same(tmp_path: Path, assert_same: Any) -> None:
    meta, textures = parts()
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    for name, data in textures.items():
        (tmp_path / name).write_bytes(data)
    pressed = bundle(tmp_path / "a.bin", meta, textures, zipfile.ZIP_DEFLATED)
    assert_same(read_splats(tmp_path / "meta.json")[0], read_splats(pressed)[0])
    (tmp_path / "sh0.webp").unlink()
    with pytest.raises(SplatFileError, match=r"sh0\.webp"):
        read_splats(tmp_path / "meta.json")


def test_textures_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    meta, textures = parts()
    folder = tmp_path / "in"
    folder.mkdir()
    for name, data in textures.items():
        (folder / name).write_bytes(data)
    shutil.move(folder / "sh0.webp", tmp_path / "sh0.webp")
    for name in ("../sh0.webp", str(tmp_path / "sh0.webp"), "../in"):
        meta["sh0"]["files"] = [name]
        (folder / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(SplatFileError, match=r"meta\.json.*file name"):
            read_splats(folder / "meta.json")


def test_a_first_entry_that_is_null(tmp_path: Path) -> None:
    """Early files have it; PlayCanvas' engine continues the codebook by a mean step."""
    meta, textures = parts()
    meta["sh0"]["codebook"][0] = None
    found = read_splats(bundle(tmp_path / "a.sog", meta, textures))[0].features_dc[0, 0]
    assert found == pytest.approx(1 / 64 - 2 - (254 / 64) / 255)


@pytest.mark.parametrize(
    ("entries", "mode"),
    [
        ({"antialias": True}, "mip"),
        ({"model": "antialiased"}, "mip"),
        ({"antialias": False}, "default"),
        ({"model": "2dgs"}, "default"),
        ({"asset": {"generator": "somebody's"}}, None),
        ({"asset": "?"}, None),
    ],
)
def test_render_mode(entries: dict[str, Any], mode: RenderMode | None, tmp_path: Path) -> None:
    meta, textures = parts()
    info = read_splats(bundle(tmp_path / "a.sog", meta | entries, textures))[1]
    assert info.render_mode == mode and bool(info.notices) is (entries.get("model") == "2dgs")


@pytest.mark.parametrize("mode", ["mip", "default", None])
def test_tags_that_are_written(mode: RenderMode | None, make: Make, tmp_path: Path) -> None:
    info = SplatInfo(render_mode=mode, filters_fused=True, comments=("made_by: us", "scene: café"))
    write_splats(tmp_path / "a.sog", make(5), info)
    with zipfile.ZipFile(tmp_path / "a.sog") as archive:
        meta = json.loads(archive.read("meta.json"))
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    assert meta.get("antialias") == {"mip": True, "default": False, None: None}[mode]
    assert meta.get("model") == ("antialiased" if mode == "mip" else None)
    found = read_splats(tmp_path / "a.sog")[1]
    assert (found.render_mode, found.filters_fused, found.comments) == (mode, True, info.comments)


@pytest.mark.parametrize(("count", "degree"), [(1, 1), (5, 0), (300, 1), (300, 2), (300, 3)])
def test_round_trip(count: int, degree: int, make: Make, tmp_path: Path) -> None:
    gaussians = make(count, degree)
    gaussians.means[:, 0] = 0.5  # no extent along an axis
    gaussians.opacities[0] = -20.0  # a byte of 0, under which colours have to stay
    write_splats(tmp_path / "a.sog", gaussians, SplatInfo())
    found, info = read_splats(tmp_path / "a.sog")
    assert (info.count, info.sh_degree) == (count, degree)
    gaussians = gaussians[packing.morton_order(gaussians)]
    step = (gaussians.means.abs().log1p().amax() * 2 / 65535) * (1 + gaussians.means.abs())
    assert ((found.means - gaussians.means).abs() <= step / 2 + 1e-5).all()
    assert ((found.alphas() - gaussians.alphas()).abs() <= 0.5 / 255 + 1e-3).all()
    assert rotation_differences(gaussians.quats, found.quats).max() < 1
    for name in ("scales", "features_dc"):
        ours, theirs = gaussians.tensors()[name], found.tensors()[name]
        assert (ours - theirs).square().mean() <= (0.02 * ours.std(correction=0)) ** 2
    rest = gaussians.features_rest
    if degree:
        assert (found.features_rest - rest).square().mean() < (0.4 * 0.2) ** 2


def test_large_and_opaque_gaussians_keep_their_harmonics_best(make: Make, tmp_path: Path) -> None:
    gaussians = make(600, 2)
    gaussians.scales[::6] += 4
    gaussians.means = torch.arange(600.0)[:, None].expand(600, 3)  # so that their order stays
    write_splats(tmp_path / "a.sog", gaussians, SplatInfo())
    errors = (read_splats(tmp_path / "a.sog")[0].features_rest - gaussians.features_rest).square().mean(dim=(1, 2))
    assert errors[::6].mean() < 0.3 * errors.mean()


RED = np.full((16, 4), 255, np.uint8)
WITHOUT: Any = ...
"""Stands for what is left out."""
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "version 1": ({"version": WITHOUT}, {}, "version 1 "),
    "version 3": ({"version": 3}, {}, "version 3 "),
    "version of another kind": ({"version": ["x" * 99]}, {}, "version .{20} of"),
    "other JSON": (dict.fromkeys(parts()[0], WITHOUT), {}, "meta.json"),
    "no count": ({"count": WITHOUT}, {}, "count"),
    "negative count": ({"count": -1}, {}, r"\$\.count"),
    "no Gaussians": ({"count": 0}, {}, "no Gaussians"),
    "count beyond the textures": ({"count": 17}, {}, "4 × 4 .*17 Gaussians"),
    "count beyond memory": ({"count": 10**10}, {}, r"10000000000 .* \d+ bytes"),
    "two coordinates": ({"means": {"mins": [0.0, 1.0]}}, {}, r"means\.mins"),
    "short codebook": ({"scales": {"codebook": [0.0] * 255}}, {}, r"scales\.codebook"),
    "long codebook": ({"sh0": {"codebook": [0.0] * 257}}, {}, r"sh0\.codebook"),
    "codebook of words": ({"shN": {"codebook": ["0"] * 256}}, {}, r"shN\.codebook"),
    "codebook with gaps": ({"scales": {"codebook": [None] * 256}}, {}, "codebook"),
    "four bands": ({"shN": {"bands": 4}}, {}, r"shN\.bands"),
    "large palette": ({"shN": {"count": 65_537}}, {}, r"shN\.count"),
    "more in the palette than in its texture": ({"shN": {"count": 129}}, {}, "192 × 2 .*129 sets"),
    "palette of another degree": ({"shN": {"bands": 2}}, {}, "192 × 2"),
    "label beyond the palette": ({"shN": {"count": 64}}, {}, "64 of 64"),
    "one file": ({"means": {"files": ["means_l.webp"]}}, {}, r"means\.files"),
    "name out of the folder": ({"sh0": {"files": ["../sh0.webp"]}}, {}, r"\.\./sh0"),
    "absolute name": ({"sh0": {"files": ["/sh0.webp"]}}, {}, "/sh0"),
    "name with backslash": ({"sh0": {"files": ["..\\sh0.webp"]}}, {}, "sh0"),
    "empty name": ({"sh0": {"files": [""]}}, {}, "no  in"),
    "name with a null": ({"sh0": {"files": ["a\0.webp"]}}, {}, r"a\\x00"),
    "missing texture": ({}, {"quats.webp": WITHOUT}, r"quats\.webp"),
    "texture of another kind": ({}, {"quats.webp": webp(RED, format="PNG", lossless=None)}, r"quats\.webp"),
    "lossy texture": ({}, {"quats.webp": webp(RED, lossless=False)}, "lossless"),
    "cut texture": ({}, {"sh0.webp": webp(RED)[:-9]}, r"sh0\.webp"),
    "huge texture": ({}, {"labels.webp": webp(RED, 600, 600)}, "600 × 600 .*2 Gaussians"),
    "no rotation": ({}, {"quats.webp": webp([(0, 0, 0, 251)])}, r"rot \(length 0\)"),
    "far away": ({"means": {"maxs": [1e9, 0.0, 1e999]}}, {}, "infinite"),
    "numbers that are none": ({"scales": {"codebook": [math.nan] * 256}}, {}, "6 values|NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    meta, textures = parts()
    entries, files, message = BAD[name]
    for key, value in entries.items():
        meta[key] = {**meta[key], **value} if isinstance(value, dict) else value
    meta, textures = ({k: v for k, v in one.items() if v is not WITHOUT} for one in (meta, textures | files))
    with pytest.raises(SplatFileError, match=message):
        read_splats(bundle(tmp_path / "a.sog", meta, textures))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "\xff"])
def test_descriptions_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    path = bundle(tmp_path / "a.sog", text, {})
    (tmp_path / "meta.json").write_bytes(text.encode("latin-1"))
    for file in (path, tmp_path / "meta.json"):
        with pytest.raises(SplatFileError, match=file.name):
            read_splats(file)


@pytest.mark.parametrize("name", ["meta.json", "sh0.webp"])
def test_zip_bombs(name: str, tmp_path: Path) -> None:
    meta, textures = parts()
    text = json.dumps(meta)
    if name == "meta.json":
        text += " " * 2_000_000
    else:
        textures[name] += bytes(2_000_000)
    path = bundle(tmp_path / "a.sog", text, textures, zipfile.ZIP_DEFLATED)
    with pytest.raises(SplatFileError, match=rf"{name} .*20\d+ bytes"):
        read_splats(path)
    (tmp_path / "meta.json").write_text(json.dumps(meta) + " " * 2_000_000)
    with pytest.raises(SplatFileError, match=r"20\d+ bytes"):
        read_splats(tmp_path / "meta.json")


def test_damaged_zips(assert_refused: Callable[..., None], tmp_path: Path) -> None:
    data = bytearray(bundle(tmp_path / "a.sog", *parts()).read_bytes())
    start = data.index(b"VP8L")
    wrong, locked, rare, named = (bytearray(data) for _ in range(4))
    wrong[start + 20] ^= 255
    for at in [at for at in range(len(data)) if data[at : at + 4] == b"PK\1\2"]:
        locked[at + 8] |= 1
        rare[at + 10] = 12
        named[at + 9], named[at + 46] = 8, 255  # a name that is said to be UTF-8, and is not
    for broken in (data[:-1], data[:200], data[:4], wrong, locked, rare, named, data[:4] + bytes(99)):
        assert_refused("b.sog", broken, r"b\.sog")


def test_a_file_of_splat_transform(make: Make) -> None:
    """Its order is another one, so each of our Gaussians is compared with the nearest one."""
    gaussians, (found, info) = make(200, 2), read_splats(THEIRS)
    assert info == SplatInfo("sog", None, None, 2, 200)
    nearest = torch.cdist(gaussians.means, found.means).argmin(dim=1)
    assert torch.equal(nearest.sort()[0], torch.arange(200))
    found = found[nearest]
    torch.testing.assert_close(found.means, gaussians.means, rtol=0, atol=3e-3)
    torch.testing.assert_close(found.scales, gaussians.scales, rtol=0, atol=0.1)
    torch.testing.assert_close(found.features_dc, gaussians.features_dc, rtol=0, atol=0.1)
    assert rotation_differences(gaussians.quats, found.quats).max() < 1.5
    assert (found.alphas() - gaussians.alphas()).abs().max() < 2 / 255
    assert (found.features_rest - gaussians.features_rest).square().mean() < (0.7 * 0.2) ** 2


@pytest.mark.parametrize("degree", [0, 2])
def test_gsply_reads_the_same(degree: int, make: Make, tmp_path: Path) -> None:
    pytest.importorskip("imagecodecs", reason="imagecodecs, with which gsply reads SOG, is not installed")
    reader = pytest.importorskip("gsply.sog_reader", reason="gsply is not installed")
    write_splats(tmp_path / "a.sog", make(300, degree), SplatInfo(render_mode="mip"))
    ours, theirs = read_splats(tmp_path / "a.sog")[0], reader.sogread(tmp_path / "a.sog")
    pairs = zip(ours.tensors().items(), ("means", "scales", "quats", "opacities", "sh0", "shN"), strict=True)
    for (name, value), attribute in pairs:
        other = getattr(theirs, attribute)
        if value.numel():
            found = torch.from_numpy(np.asarray(other)).reshape(value.shape)
            if name == "opacities":  # logits of 0 and 1 are ours to choose
                torch.testing.assert_close(found.sigmoid(), value.sigmoid(), rtol=0, atol=2e-3)
            else:
                torch.testing.assert_close(found, value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("degree", [0, 2])
def test_splat_transform_reads_the_same(degree: int, make: Make, tmp_path: Path) -> None:
    program = shutil.which("splat-transform")
    if program is None:
        pytest.skip("splat-transform is not installed: npm install --global @playcanvas/splat-transform@2.7.1")
    write_splats(tmp_path / "a.sog", make(300, degree), SplatInfo(render_mode="mip"))
    subprocess.run([program, "--quiet", tmp_path / "a.sog", tmp_path / "b.ply"], check=True)
    ours, theirs = read_splats(tmp_path / "a.sog")[0], read_splats(tmp_path / "b.ply")[0]
    torch.testing.assert_close(theirs.alphas(), ours.alphas(), rtol=0, atol=2e-3)
    for name in ("means", "scales", "quats", "features_dc", "features_rest"):
        torch.testing.assert_close(theirs.tensors()[name], ours.tensors()[name], rtol=0, atol=1e-5, msg=name)

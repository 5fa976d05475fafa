"""CO3D's format: captures with depth become it, and its reader sees what the captures hold."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.scripts import sfm_train
from f3rm_ext.sfm.capture_cameras import read_capture_cameras
from f3rm_ext.sfm.diffusion import co3d, co3d_lists
from f3rm_ext.sfm.rays import map_points
from f3rm_ext.sfm.recovery import recover_cameras


@pytest.fixture(scope="module")
def room(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("co3d")
    counts = co3d_lists.convert_captures([tiny_capture, tiny_capture], out, "room")
    assert counts == {"train": 18, "test": 6}
    return out


def scenes(root: Path, **changes: Any) -> co3d.Co3dScenes:
    options: dict[str, Any] = dict(num_images=3, cells=8, patches=4, image_size_px=56, augment=False, seed=0)
    return co3d.Co3dScenes(
        root, changes.pop("categories", ["room"]), changes.pop("split", "train"), **options | changes
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_lists_of_others_stay(tiny_capture: Path, tmp_path: Path, split: str) -> None:
    theirs = tmp_path / co3d.ANNOTATIONS / f"room_{split}.jgz"
    theirs.parent.mkdir()
    theirs.write_bytes(gzip.compress(b'{"110_13051_23361": []}'))
    before = theirs.read_bytes()
    with pytest.raises(ConfigError, match=rf"room_{split}\.jgz"):
        co3d_lists.convert_captures([tiny_capture], tmp_path, "room")
    with pytest.raises(ConfigError, match=rf"room_{split}\.jgz"):
        co3d_lists.list_co3d(tmp_path, "room")
    assert theirs.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [co3d.ANNOTATIONS]


def test_samples_hold_the_cameras_of_the_capture(room: Path, tiny_capture: Path) -> None:
    data = scenes(room)
    scene = data[0]
    assert scene.images.shape == (3, 3, 56, 56) and scene.maps.shape == (3, 8, 8, 8) and scene.ndc.shape == (3, 2, 4, 4)
    assert 0 <= scene.images.min() and scene.images.max() <= 1 and scene.known.all()
    found = recover_cameras(scene.maps, torch.full((3, 2), 56.0), (scene.focals_px, scene.principals_px))
    torch.testing.assert_close(found.rotations.float(), scene.rotations, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.centers.float(), scene.centers, atol=1e-4, rtol=0)
    frames = {frame["number"]: frame for sequence in data.sequences for frame in sequence}
    indices = [int(Path(frames[number]["filepath"]).stem[-6:]) for number in scene.numbers.tolist()]
    truth = read_capture_cameras(tiny_capture).cameras[indices].relative_to_first()
    torch.testing.assert_close(scene.rotations.double(), truth.rotations, atol=1e-5, rtol=0)
    scale = scene.centers.norm().double() / truth.centers.norm()
    torch.testing.assert_close(scene.centers.double(), scale * truth.centers, atol=1e-5, rtol=0)


def test_endpoints_are_where_the_depth_says(room: Path) -> None:
    scene = scenes(room)[0]
    _, endpoints = map_points(scene.maps)
    local = (endpoints - scene.centers[:, None, None]) @ scene.rotations[:, None]
    pixels = local[..., :2] / local[..., 2:] * scene.focals_px[:, None, None] + scene.principals_px[:, None, None]
    grid = (torch.arange(8) + 0.5) * 56 / 8
    torch.testing.assert_close(pixels[0, :, :, 0], grid.expand(8, 8), atol=1e-3, rtol=0)
    torch.testing.assert_close(pixels[0, :, :, 1], grid[:, None].expand(8, 8), atol=1e-3, rtol=0)
    assert torch.allclose(endpoints[0].reshape(-1, 3).median(0).values.norm(), torch.tensor(1.0), atol=1e-3)


@pytest.mark.parametrize("augment", [False, True])
def test_patches_lie_in_the_whole_image(room: Path, tiny_capture: Path, augment: bool) -> None:
    truth = read_capture_cameras(tiny_capture).cameras
    size, focal, principal = truth.sizes_px[0], truth.focals_px[0], truth.principals_px[0]
    scene = scenes(room, augment=augment, patches=14)[0]
    for ndc, focal_px, principal_px in zip(scene.ndc, scene.focals_px, scene.principals_px, strict=True):
        for axis, patches in enumerate((ndc[0, 0], ndc[1, :, 0])):  # 4 pixels each; the middle of the first is at 2
            step = (patches[-1] - patches[0]) / 13
            per_pixel = -2 / size.min() * focal[axis] / focal_px[axis]
            assert step == pytest.approx(float(4 * per_pixel), rel=1e-4)
            found = patches[0] + step * (principal_px[axis] - 2) / 4
            assert found == pytest.approx(float((size[axis] - 2 * principal[axis]) / size.min()), abs=1e-4)


def test_a_sample_is_determined_by_its_number(room: Path) -> None:
    one, two = scenes(room, augment=True), scenes(room, augment=True)
    for first, second in zip(one[5], two[5], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(one[5].maps, one[7].maps)
    assert not torch.equal(one[0].ndc[0], one[0].ndc[1]), "crops have sizes of their own"
    assert any((scenes(room, augment=True, cells=48)[number].known == 0).any() for number in range(4)), "beyond edges"


def test_holes_are_masked(room: Path) -> None:
    path = next((room / "co3d/room").glob("*/depths/*.png"))
    depth = co3d.read_depth(path)
    depth[: len(depth) // 2] = 0
    co3d.write_depth(path, depth)
    assert (co3d.read_depth(path) == depth).all()
    frames = [frame for sequence in scenes(room).sequences for frame in sequence]
    name = path.name.removesuffix(".geometric.png")
    holed = [frame for frame in frames if frame["filepath"] == f"room/{path.parent.parent.name}/images/{name}"]
    scene = scenes(room).load(holed * 2, np.random.default_rng(0))
    assert (scene.known[0, :4] == 0).all() and scene.known[0, 4:].all() and scene.maps.isfinite().all()


def test_bad_data_is_told(room: Path, tmp_path: Path, tiny_capture: Path) -> None:
    with pytest.raises(CaptureError, match="CO3D"):
        scenes(tmp_path)
    with pytest.raises(CaptureError, match="room"):
        scenes(room, categories=["apple"])
    with pytest.raises(CaptureError, match=r"lower model\.num_images"):
        scenes(room, num_images=40)
    sequence = scenes(room).sequences[0]
    gone = [{**sequence[0], "filepath": "room/none/images/frame000000.jpg"}]
    with pytest.raises(CaptureError, match="cannot be read"):
        scenes(room).load(gone, np.random.default_rng(0))
    bad = tmp_path / "bad"
    bad.mkdir()
    meta = json.loads((tiny_capture / "transforms.json").read_text())
    for more, says in (({"k1": 0.1}, "lens distortion"), ({"distortion_params": [0.1] + [0] * 5}, "lens distortion"),
                       ({"camera_model": "OPENCV_FISHEYE"}, "OPENCV_FISHEYE"),
                       ({"camera_model": "EQUIRECTANGULAR"}, "perspective images"),
                       ({}, "image .*bad.* cannot be read")):  # fmt: skip
        (bad / "transforms.json").write_text(json.dumps({**meta, **more}))
        with pytest.raises(CaptureError, match=says):
            co3d_lists.convert_captures([bad], tmp_path / "out", "room")


def test_held_out_images_are_told_by_their_paths_and_unlisted_ones_left_out(tiny_capture: Path, tmp_path: Path) -> None:
    room = tmp_path / "room"
    shutil.copytree(tiny_capture, room)
    meta = json.loads((room / "transforms.json").read_text())
    names = [frame["file_path"] for frame in meta["frames"]]
    for frame in meta["frames"]:
        frame["file_path"] = "./" + frame["file_path"]
    for key in ("val_filenames", "test_filenames"):
        meta.pop(key, None)
    meta |= {"train_filenames": names[:5], "val_filenames": names[5:6], "test_filenames": names[6:8]}
    (room / "transforms.json").write_text(json.dumps(meta))
    assert co3d_lists.convert_captures([room], tmp_path / "out", "room") == {"train": 5, "test": 3}
    with gzip.open(co3d.list_path(tmp_path / "out", "room", "test")) as stream:
        (held_out,) = json.load(stream).values()
    assert [Path(frame["filepath"]).stem for frame in held_out] == ["frame000005", "frame000006", "frame000007"]
    del meta["train_filenames"]
    (room / "transforms.json").write_text(json.dumps(meta))
    assert co3d_lists.convert_captures([room], tmp_path / "out", "room") == {"train": len(names) - 3, "test": 3}


def test_a_folder_that_cannot_be_written_is_one_sentence(tiny_capture: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ConfigError, match="--output"):
            co3d_lists.convert_captures([tiny_capture], out, "room")


def make_co3d(root: Path, category: str = "apple") -> Path:
    """Writes three sequences of CO3D v2, of four frames each; the last one is of bad quality."""
    folder = root / "co3d" / category
    (folder / "set_lists").mkdir(parents=True)
    frames, sequences, sets = [], [], {"train": [], "val": [], "test": []}
    for name, quality in (("110_1_1", 0.9), ("110_1_2", 0.9), ("110_1_3", 0.2)):
        sequences.append({"sequence_name": name, "category": category, "viewpoint_quality_score": quality})
        for part in ("images", "depths", "masks"):
            (folder / name / part).mkdir(parents=True)
        for number in range(4):
            image, mask = (f"{category}/{name}/{part}/frame{number:06d}" for part in ("images", "masks"))
            image, mask = f"{image}.jpg", f"{mask}.png"
            pixels = np.zeros((40, 30), np.uint8)
            pixels[5:9, 10:25] = 90 if number == 3 else 255  # too faint for a mask
            Image.fromarray(np.full((40, 30, 3), 40 * number, np.uint8)).save(root / "co3d" / image)
            Image.fromarray(pixels).save(root / "co3d" / mask)
            co3d.write_depth(co3d.depth_path(root / "co3d" / image), np.full((40, 30), 2.0 + number))
            viewpoint = {
                "R": [[np.cos(number), 0, -np.sin(number)], [0, 1, 0], [np.sin(number), 0, np.cos(number)]],
                **{"T": [0, 0, 3], "focal_length": [2, 2], "principal_point": [0, 0]},
                "intrinsics_format": "ndc_isotropic",
            }
            frames.append({"image": {"path": image}, "mask": {"path": mask}, "viewpoint": viewpoint})
            sets["test" if number == 1 else "train"].append([name, number, image])
    for file, content in (("frame_annotations.jgz", frames), ("sequence_annotations.jgz", sequences)):
        (folder / file).write_bytes(gzip.compress(json.dumps(content).encode()))
    (folder / co3d_lists._SET_LIST).write_text(json.dumps(sets))
    return folder


def test_co3d_as_downloaded_is_read(tmp_path: Path) -> None:
    make_co3d(tmp_path)
    assert co3d_lists.list_co3d(tmp_path, "apple") == ({"train": 4, "test": 2}, {})
    with gzip.open(tmp_path / "co3d_annotations" / "apple_train.jgz") as stream:
        listed = json.load(stream)
    assert sorted(listed) == ["110_1_1", "110_1_2"]
    first = listed["110_1_1"][0]
    assert first["filepath"] == "apple/110_1_1/images/frame000000.jpg" and first["bbox"] == [10, 5, 25, 9]
    data = scenes(tmp_path, categories=["apple"], num_images=2)
    assert data.num_frames == 4
    scene = data[0]
    brightness, depth = (255 * scene.images[:, 0, 0, 0]).round(), (2 + torch.tensor([0, 2.0]))
    order = (brightness / 80).long()  # frames 0 and 2
    _, endpoints = map_points(scene.maps)
    local = (endpoints - scene.centers[:, None, None]) @ scene.rotations[:, None]
    ratio = local[0, 0, 0, 2] / local[1, 0, 0, 2]
    torch.testing.assert_close(ratio, depth[order[0]] / depth[order[1]], atol=1e-3, rtol=0)
    with pytest.raises(ConfigError, match="again"):
        co3d_lists.list_co3d(tmp_path, "cup")


def test_all_categories_are_listed_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_co3d(tmp_path)
    make_co3d(tmp_path, category="cup")
    (tmp_path / "co3d" / "half").mkdir()
    said: list[str] = []
    monkeypatch.setattr(sfm_train, "say", lambda *lines: said.extend(lines))

    def listed() -> list[str]:
        return sorted(path.name for path in (tmp_path / "co3d_annotations").iterdir())

    assert sfm_train.Prepare(tmp_path, ("cup",)).main() == 0
    assert listed() == ["cup_test.jgz", "cup_train.jgz"] and said[-1].endswith("dataset.category=cup")
    for wanted, setting in ((("all",), "all_train"), (("apple", "cup"), "apple,cup")):
        assert sfm_train.Prepare(tmp_path, wanted).main() == 0
        assert listed() == ["apple_test.jgz", "apple_train.jgz", "cup_test.jgz", "cup_train.jgz"]
        assert said[-2].startswith("8 images to train with and 4") and said[-1].endswith(f"category={setting}")
    with pytest.raises(ConfigError, match="no categories"):
        sfm_train.Prepare(tmp_path / "empty", ("all",)).main()
    for wanted in (("all",), ("room", "house"), ()):
        with pytest.raises(ConfigError, match="--captures"):
            sfm_train.Prepare(tmp_path, wanted, (tmp_path,)).main()


def test_a_subset_of_co3d_says_what_is_missing_and_version_1_is_refused(tmp_path: Path) -> None:
    folder = make_co3d(tmp_path)
    gone = folder / "110_1_2" / "depths" / "frame000002.jpg.geometric.png"
    gone.unlink()
    counts, missing = co3d_lists.list_co3d(tmp_path, "apple")
    assert counts == {"train": 3, "test": 2} and missing == {"110_1_2": gone}
    for name in ("110_1_1", "110_1_2"):
        for path in (folder / name / "masks").iterdir():
            path.unlink()
    with pytest.raises(ConfigError, match="apple"):
        co3d_lists.list_co3d(tmp_path, "apple")
    path = folder / "frame_annotations.jgz"
    old = gzip.decompress(path.read_bytes()).replace(b"ndc_isotropic", b"ndc_norm_image_bounds")
    path.write_bytes(gzip.compress(old))
    with pytest.raises(ConfigError, match="v1"):
        co3d_lists.list_co3d(tmp_path, "apple")

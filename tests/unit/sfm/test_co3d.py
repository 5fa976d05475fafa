"""CO3D's format: captures with depth become it, and its reader sees what the captures hold."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import CaptureError, ConfigError
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


def test_samples_hold_the_cameras_of_the_capture(room: Path, tiny_capture: Path) -> None:
    data = scenes(room)
    scene = data[0]
    assert scene.images.shape == (3, 3, 56, 56) and scene.maps.shape == (3, 8, 8, 8) and scene.ndc.shape == (3, 2, 4, 4)
    assert 0 <= scene.images.min() and scene.images.max() <= 1 and scene.known.all()
    found = recover_cameras(scene.maps, torch.full((3, 2), 56.0), (scene.focals_px, scene.principals_px))
    torch.testing.assert_close(found.rotations.float(), scene.rotations, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.centers.float(), scene.centers, atol=1e-4, rtol=0)
    # The capture's own cameras, found by their distances, which no frame changes.
    truth = read_capture_cameras(tiny_capture).cameras
    ratios = torch.cdist(scene.centers.double(), scene.centers.double())
    ratios = ratios / ratios.max()
    every = torch.cdist(truth.centers, truth.centers)
    wanted = ratios[0, 1] / ratios[1, 2]
    some = (every[:, :, None] / every[None]).reshape(-1)
    assert (some[some.isfinite()] - wanted).abs().min() < 1e-3


def test_endpoints_are_where_the_depth_says(room: Path) -> None:
    scene = scenes(room)[0]
    _, endpoints = map_points(scene.maps)
    local = (endpoints - scene.centers[:, None, None]) @ scene.rotations[:, None]
    pixels = local[..., :2] / local[..., 2:] * scene.focals_px[:, None, None] + scene.principals_px[:, None, None]
    grid = (torch.arange(8) + 0.5) * 56 / 8
    torch.testing.assert_close(pixels[0, :, :, 0], grid.expand(8, 8), atol=1e-3, rtol=0)
    torch.testing.assert_close(pixels[0, :, :, 1], grid[:, None].expand(8, 8), atol=1e-3, rtol=0)
    assert torch.allclose(endpoints[0].reshape(-1, 3).median(0).values.norm(), torch.tensor(1.0), atol=1e-3)


def test_a_sample_is_determined_by_its_number(room: Path) -> None:
    one, two = scenes(room, augment=True), scenes(room, augment=True)
    for first, second in zip(one[5], two[5], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(one[5].maps, one[7].maps)
    assert not torch.equal(one[0].ndc[0], one[0].ndc[1]), "crops have sizes of their own"


def test_crops_beyond_the_image_are_black_and_without_depth(room: Path) -> None:
    found = [scenes(room, augment=True, cells=48)[number] for number in range(4)]
    assert any((scene.known == 0).any() for scene in found)


def test_holes_are_masked(room: Path) -> None:
    path = next((room / "co3d/room").glob("*/depths/*.png"))
    depth = co3d.read_depth(path)
    depth[: len(depth) // 2] = 0
    co3d.write_depth(path, depth)
    assert (co3d.read_depth(path) == depth).all()
    frames = [frame for sequence in scenes(room).sequences for frame in sequence.frames]
    name = path.name.removesuffix(".geometric.png")
    holed = [frame for frame in frames if frame["filepath"] == f"room/{path.parent.parent.name}/images/{name}"]
    scene = scenes(room).load(holed * 2, np.random.default_rng(0))
    assert (scene.known[0, :4] == 0).all() and scene.known[0, 4:].all() and scene.maps.isfinite().all()


def test_bad_data_is_told(room: Path, tmp_path: Path, tiny_capture: Path) -> None:
    with pytest.raises(CaptureError, match="no lists of CO3D"):
        scenes(tmp_path)
    with pytest.raises(CaptureError, match="which has room"):
        scenes(room, categories=["apple"])
    with pytest.raises(CaptureError, match=r"lower model\.num_images"):
        scenes(room, num_images=40)
    sequence = scenes(room).sequences[0]
    gone = [{**sequence.frames[0], "filepath": "room/none/images/frame000000.jpg"}]
    with pytest.raises(CaptureError, match="cannot be read"):
        scenes(room).load(gone, np.random.default_rng(0))
    distorted = tmp_path / "distorted"
    distorted.mkdir()
    meta = json.loads((tiny_capture / "transforms.json").read_text())
    (distorted / "transforms.json").write_text(json.dumps({**meta, "k1": 0.1}))
    with pytest.raises(CaptureError, match="lens distortion"):
        co3d_lists.convert_captures([distorted], tmp_path / "out", "room")


def test_lists_of_co3d_are_made_from_its_annotations(tmp_path: Path) -> None:
    folder = tmp_path / "co3d" / "apple"
    (folder / "set_lists").mkdir(parents=True)
    viewpoint = {"R": np.eye(3).tolist(), "T": [0, 0, 1], "focal_length": [2, 2], "principal_point": [0, 0]}
    frames = []
    for name, mask in (("a", 255), ("b", 255), ("bad", 255), ("a_empty", 90)):
        pixels = np.zeros((20, 30), np.uint8)
        pixels[5:9, 10:25] = mask
        (folder / "masks").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / "masks" / f"{name}.png")
        image, masked = {"path": f"apple/{name}.jpg"}, {"path": f"apple/masks/{name}.png"}
        frames.append({"image": image, "mask": masked, "viewpoint": viewpoint})
    sequences = [{"sequence_name": n, "viewpoint_quality_score": q} for n, q in (("s", 0.9), ("t", 0.2))]
    for file, content in (("frame_annotations.jgz", frames), ("sequence_annotations.jgz", sequences)):
        (folder / file).write_bytes(gzip.compress(json.dumps(content).encode()))
    sets = {
        "train": [["s", 1, "apple/a.jpg"], ["t", 1, "apple/bad.jpg"], ["s", 2, "apple/a_empty.jpg"]],
        "test": [["s", 3, "apple/b.jpg"]],
    }
    (folder / co3d_lists._SET_LIST).write_text(json.dumps(sets))
    assert co3d_lists.list_co3d(tmp_path, "apple") == {"train": 1, "test": 1}
    with gzip.open(tmp_path / "co3d_annotations" / "apple_train.jgz") as stream:
        assert json.load(stream) == {"s": [{"filepath": "apple/a.jpg", "bbox": [10, 5, 25, 9], **viewpoint}]}
    with pytest.raises(ConfigError, match="download the category again"):
        co3d_lists.list_co3d(tmp_path, "cup")

"""One picture: formats, maps below it, and files that are not lost."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.synthetic import PictureConfig, picture, take_picture
from f3rm_ext.synthetic.render import LitScene, render
from f3rm_ext.synthetic.world import World


@pytest.fixture
def small(world: World, lit: LitScene, monkeypatch: pytest.MonkeyPatch) -> PictureConfig:
    monkeypatch.setattr(picture, "build_world", lambda *_: world)
    monkeypatch.setattr(picture, "light_world", lambda *_: lit)
    return PictureConfig(width=48, height=30, samples=1, light_rays=1)


def test_picture_with_maps(tmp_path: Path, small: PictureConfig) -> None:
    plain = np.asarray(Image.open(take_picture(tmp_path / "new" / "a.png", small)))
    small.maps = True
    sheet = np.asarray(Image.open(take_picture(tmp_path / "b.png", small)))
    assert plain.shape == (30, 48, 3) and sheet.shape == (40, 48, 3)
    np.testing.assert_array_equal(sheet[:30], plain)
    assert all(sheet[30:, k * 16 : (k + 1) * 16].std() > 5 for k in range(3))


def test_picture_is_not_replaced_unasked(tmp_path: Path, small: PictureConfig) -> None:
    out = tmp_path / "a.jpg"
    out.write_text("mine")
    with pytest.raises(CaptureError, match="--overwrite"):
        take_picture(out, small)
    assert out.read_text() == "mine"
    small.overwrite = True
    take_picture(out, small)
    assert Image.open(out).format == "JPEG" and [p.name for p in tmp_path.iterdir()] == ["a.jpg"]


def test_a_place_that_cannot_be_written_is_refused_before_rendering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "build_world", lambda *_: pytest.fail("too late"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "a.png", tmp_path / f"{'long' * 99}.png"):
        with pytest.raises(CaptureError, match="Cannot write"):
            take_picture(out, PictureConfig())


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.jpg or \.png"):
        take_picture(tmp_path / "a.gif", PictureConfig())


def test_supersampling_smooths_edges_and_keeps_the_rest(lit: LitScene, capture) -> None:
    """More samples change colours at edges only; depth, normals and labels are of the centre ray and stay."""
    pose, focal = capture.poses[0], capture.transforms["fl_x"]
    coarse = render(lit, pose, 48, 32, focal, samples=1)
    fine = render(lit, pose, 48, 32, focal, samples=4)
    for one, other in zip(coarse[1:], fine[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    difference = np.abs(coarse.rgb.astype(int) - fine.rgb.astype(int)).max(axis=-1)
    labels = np.pad(fine.labels, 1, mode="edge")
    edge = np.zeros_like(fine.labels, bool)
    for dy in range(3):
        for dx in range(3):
            edge |= labels[dy : dy + 32, dx : dx + 48] != fine.labels
    assert difference[edge].mean() > 1.3 * difference[~edge].mean() > 0


def test_reflections_show_on_shiny_things_only(lit: LitScene, capture) -> None:
    pose, focal = capture.poses[0], capture.transforms["fl_x"]
    none, two = (render(lit, pose, 48, 32, focal, bounces=bounces).rgb.astype(int) for bounces in (0, 2))
    changed = np.abs(none - two).max(axis=-1) > 8
    labels = {thing["name"]: thing["label"] for thing in capture.scene["objects"]}
    assert changed[capture.labels[0] == labels["table"]].mean() > 0.2
    assert not changed[capture.labels[0] == labels["rug"]][5:-5].mean() > 0.2

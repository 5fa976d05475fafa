"""Next views in a round room whose photos look to one side only, and the words that lead there."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.confidence import confidence, ray_information, uncertainty
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.export.confidence import Measurement, _camera_path, _describe, _strips
from f3rm_ext.export.splats import load_splat_run
from f3rm_ext.html.page import Picture
from f3rm_ext.query.run import read_camera_path
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.next_best_view import SIDE_PX, Survey, _aim, choose, propose, survey
from f3rm_ext.splat.rendering import SplatScene

RADIUS = 2.0
"""Of the room."""


def _cameras(positions: Tensor, directions: Tensor) -> PinholeCameras:
    K = torch.tensor([[40.0, 0.0, 32.0], [0.0, 40.0, 24.0], [0.0, 0.0, 1.0]])
    upright = torch.eye(4)
    upright[:3, :3] = torch.tensor([[0.0, -1.0, 0.0], [0.0, 0.0, -1.0], [1.0, 0.0, 0.0]])
    size = torch.tensor([64, 48], dtype=torch.int32)
    template = PinholeCameras(upright[None], K[None], size[:1], size[1:])
    return _aim(positions, directions, template)


@pytest.fixture(scope="module")
def room() -> tuple[SplatScene, PinholeCameras, Survey]:
    generator = torch.Generator().manual_seed(0)
    count = 1500
    shell = RADIUS * functional.normalize(torch.randn(count, 3, generator=generator), dim=1)
    gaussians = Gaussians(
        means=shell,
        scales=torch.full((count, 3), 0.12).log(),
        quats=torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(count, 1),
        opacities=torch.full((count, 1), 3.0),
        features_dc=torch.zeros(count, 3),
        features_rest=torch.zeros(count, 0, 3),
    )
    angles = torch.linspace(0, 2 * torch.pi, 13)[:12]
    ring = torch.stack([0.8 * angles.cos(), 0.8 * angles.sin(), 0.1 * (3 * angles).sin()], dim=1)
    views = _cameras(ring, torch.tensor([[1.0, 0.0, 0.0]]).expand(12, 3) + 0.2 * ring)
    scene = SplatScene(gaussians, MipOptions(filter_3d=False))
    return scene, views, survey(scene, views)


def test_the_photos_are_sure_of_the_side_that_they_show(room: tuple[SplatScene, PinholeCameras, Survey]) -> None:
    scene, _, found = room
    sure, ahead = confidence(found.evidence.information), scene.gaussians.means[:, 0] > 1.5
    assert sure[ahead].median() > 0.1
    assert sure[scene.gaussians.means[:, 0] < -1.0].max() == 0
    assert found.empty < 0.02


def test_next_views_show_what_no_photo_saw_and_stand_where_one_can(
    room: tuple[SplatScene, PinholeCameras, Survey],
) -> None:
    scene, views, found = room
    candidates = propose(scene, views, found, places=40)
    chosen = choose(scene, views, found, candidates, 5)
    gains = [view.gain for view in chosen]
    assert len(chosen) == 5 and all(0 < gain < 1 for gain in gains)
    cameras = [view.camera for view in chosen]
    looks = torch.cat([camera.forward for camera in cameras])
    assert looks[:, 0].max() < 0.9, "they turn from where all photos look"
    for camera in cameras:
        assert camera.positions.norm() < RADIUS - 0.5, "within the room, and no nearer to its wall than photos were"
        assert -0.11 <= float(camera.positions[0, 2]) <= 0.11, "at the height of photos"
        assert abs(float(camera.viewmats[0, 0, 2])) < 0.2, "level"
    shown = scene.gaussians.means[:, 2].abs() < 0.8  # by level cameras
    added = [views, PinholeCameras(*map(torch.cat, zip(views, *cameras, strict=True)))]
    before, after = (uncertainty(survey(scene, some).evidence.information)[shown].mean() for some in added)
    assert after < before - 0.08


def test_what_is_near_the_known_comes_first(room: tuple[SplatScene, PinholeCameras, Survey]) -> None:
    scene, views, found = room
    back = _cameras(torch.zeros(1, 3), torch.tensor([[-1.0, 0.0, 0.0]]))
    assert choose(scene, views, found, back, 1) == [], "nothing on it tells where it was taken"
    side = _cameras(torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 0.0]]))
    both = PinholeCameras(*map(torch.cat, zip(back, side, strict=True)))
    assert torch.equal(choose(scene, views, found, both, 1)[0].camera.forward, side.forward)


@pytest.mark.parametrize("count", [1, 2])
def test_few_photos_and_no_room_give_little_advice(room: tuple[SplatScene, PinholeCameras, Survey], count: int) -> None:
    scene, views, _ = room
    few = views.take(slice(0, count))
    found = survey(scene, few)
    candidates = propose(scene, few, found, places=5)
    assert confidence(found.evidence.information).max() < 0.5
    assert len(choose(scene, few, found, candidates, 3)) <= 3


def test_the_uncertainty_is_the_trace_of_the_inverse() -> None:
    generator = torch.Generator().manual_seed(0)
    ways = functional.normalize(torch.randn(20, 4, 3, generator=generator), dim=2)
    information = ray_information(ways, torch.rand(20, 4, generator=generator)).sum(dim=1)
    inverse = torch.linalg.inv(information + torch.eye(3))
    assert torch.allclose(uncertainty(information), inverse.diagonal(dim1=1, dim2=2).mean(dim=1), atol=1e-5)
    assert torch.allclose(confidence(information), 1 - torch.linalg.eigvalsh(inverse)[:, -1], atol=1e-5)


def test_smaller_pictures_show_the_same() -> None:
    one = _cameras(torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 0.0]]))
    large = one._replace(
        Ks=one.Ks * torch.tensor([10.0, 10.0, 1.0])[:, None], widths=10 * one.widths, heights=10 * one.heights
    )
    small = large.shrink(SIDE_PX)
    assert (int(small.widths), int(small.heights)) == (SIDE_PX, 120)
    assert torch.allclose(small.Ks, one.Ks * torch.tensor([2.5, 2.5, 1.0])[:, None])
    assert torch.equal(one.shrink(SIDE_PX).Ks, one.Ks), "they never grow"


@pytest.mark.parametrize(
    ("position", "direction", "words"),
    [
        ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0], "Stand where b.jpg was taken; keep its direction, and look ahead."),
        (
            [0.0, -0.5, 0.0],
            [0.0, -1.0, 0.0],
            "Stand near b.jpg, 1 to the right; turn 90° to the right, and look ahead.",
        ),
        (
            [-0.5, 0.0, 0.25],
            [1.0, 0.0, -1.0],
            "Stand near b.jpg, 1 back, 0.5 higher; keep its direction, and look 45° down.",
        ),
    ],
)
def test_words_lead_to_a_camera(position: list[float], direction: list[float], words: str) -> None:
    views = _cameras(torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]] * 2))
    views = PinholeCameras(*(torch.cat([part, part[1:]]) for part in views))
    camera = _cameras(torch.tensor([position]), torch.tensor([direction]))
    # The reach of the cameras is 6.6 here, and steps of 2 % of it are not told.
    assert _describe(camera, views, ["a.jpg", "b.jpg", "c.jpg"], 0.5) == (words, 1)


def test_transparent_photos_are_shown_over_the_background(splat_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, shown = load_splat_run(splat_config), list[np.ndarray]()
    dataset, background = run.manager.train_dataset, torch.tensor([0.2, 0.4, 0.6])
    hidden = torch.tensor([255, 0, 255, 0], dtype=torch.uint8).expand(*dataset.picture(0).pixels.shape[:2], 4)
    monkeypatch.setattr(dataset, "picture", lambda index: SimpleNamespace(pixels=hidden))
    monkeypatch.setattr(run.model, "background", background)
    monkeypatch.setattr(Picture, "from_array", lambda pixels: shown.append(pixels) or Picture("", 1, 1))
    _strips(run, Measurement(torch.ones(run.model.num_gaussians), 1.0, 0.0, []))
    assert len(shown) >= 3 and all((photo == [51, 102, 153]).all() for photo in shown[::3])


def test_a_camera_path_leads_to_each_camera(tmp_path: Path) -> None:
    cameras = [_cameras(torch.rand(1, 3), torch.tensor([[1.0, -0.5, 0.2]])) for _ in range(3)]
    (tmp_path / "path.json").write_text(json.dumps(_camera_path(cameras)))
    path = read_camera_path(tmp_path / "path.json")
    for index, camera in enumerate(cameras):
        read = PinholeCameras.of(path.cameras[index : index + 1])
        assert torch.allclose(read.viewmats, camera.viewmats, atol=1e-5)
        assert torch.allclose(read.Ks, camera.Ks, atol=1e-3)

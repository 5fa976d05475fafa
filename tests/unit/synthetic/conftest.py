"""One tiny capture and one world, made once for all tests of the scene."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.synthetic import SynthConfig, synthesize
from f3rm_ext.synthetic.render import LitScene
from f3rm_ext.synthetic.world import World, build_world, light_world

TINY = {"num_images": 10, "width": 48, "height": 32, "light_rays": 1}


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., SynthConfig]:
    """Makes configurations of ten 48x32 images in rough light."""
    return lambda **options: SynthConfig(**{**TINY, **options})


@pytest.fixture(scope="session")
def world() -> World:
    """The scene of seed 0."""
    return build_world(0, light_rays=1)


@pytest.fixture(scope="session")
def lit(world: World) -> LitScene:
    """The same, in rough light."""
    return light_world(world, gather_rays=1)


@pytest.fixture
def ready_scene(world: World, lit: LitScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are made of the scene that is there already, whatever their seed: for tests about files."""
    _use(world, lit, monkeypatch)


def _use(world: World, lit: LitScene, monkeypatch: pytest.MonkeyPatch) -> None:
    from f3rm_ext.synthetic import capture

    monkeypatch.setattr(capture, "build_world", lambda *_: world)
    monkeypatch.setattr(capture, "light_world", lambda *_: lit)


@pytest.fixture(scope="session")
def capture(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., SynthConfig], world: World, lit: LitScene
) -> SimpleNamespace:
    """A tiny capture as a reader sees it: everything here comes from its files."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _use(world, lit, monkeypatch)
        path = synthesize(tmp_path_factory.mktemp("scene") / "room", tiny_config())
    transforms = json.loads((path / "transforms.json").read_text())
    frames = transforms["frames"]

    def stack(key: str) -> np.ndarray:
        return np.stack([np.asarray(Image.open(path / frame[key])) for frame in frames])

    return SimpleNamespace(
        path=path,
        transforms=transforms,
        scene=json.loads((path / "scene.json").read_text()),
        poses=np.array([frame["transform_matrix"] for frame in frames]),
        rgb=stack("file_path"),
        depth_m=stack("depth_file_path") * transforms["depth_unit_scale_factor"],
        normals=stack("normal_file_path") / 127.5 - 1.0,
        labels=stack("label_file_path"),
        mesh=dict(np.load(path / "gt_mesh.npz", allow_pickle=False)),
    )


@pytest.fixture(scope="session")
def unproject() -> Callable[[SimpleNamespace, int], np.ndarray]:
    """World points (h, w, 3) of a view, from its depth, its pose and the intrinsics, in plain numpy."""

    def points(capture: SimpleNamespace, k: int) -> np.ndarray:
        info = capture.transforms
        v, u = np.meshgrid(np.arange(info["h"]) + 0.5, np.arange(info["w"]) + 0.5, indexing="ij")
        ray = np.stack([(u - info["cx"]) / info["fl_x"], -(v - info["cy"]) / info["fl_y"], -np.ones_like(u)], axis=-1)
        camera = ray * capture.depth_m[k][..., None]
        return camera @ capture.poses[k, :3, :3].T + capture.poses[k, :3, 3]

    return points

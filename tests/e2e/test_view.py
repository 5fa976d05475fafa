"""`f3rm-ext view`: splats and meshes of files in the viewer, from camera to camera."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from PIL import Image

from f3rm_ext.mesh.mesh_files import write_mesh
from f3rm_ext.splat.files import SplatInfo, write_splats
from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh

WAIT_S = 180
RED, BLUE = (220, 30, 30), (30, 60, 220)


def write_two_balls(path: Path) -> None:
    """Splats: a red ball at the left and a blue one at the right of two cameras of 3DGS, which look from both sides."""
    generator = torch.Generator().manual_seed(0)
    means = 0.3 * torch.randn(400, 3, generator=generator)
    means[:200, 0] -= 1.0
    means[200:, 0] += 1.0
    colors = torch.tensor([RED] * 200 + [BLUE] * 200) / 255.0
    quats = torch.tensor([1.0, 0, 0, 0]).expand(400, 4)
    scales, rest = torch.full((400, 3), -2.0), torch.zeros(400, 0, 3)
    write_splats(path, Gaussians(means, scales, quats, torch.full((400, 1), 4.0), rgb_to_sh(colors), rest), SplatInfo())
    sides = {"front": np.eye(3), "back": np.diag([-1.0, 1.0, -1.0])}
    cameras = [
        {"img_name": name, "width": 400, "height": 300, "fx": 300.0, "fy": 300.0,
         "rotation": turn.tolist(), "position": (-5.0 * turn[:, 2]).tolist()}
        for name, turn in sides.items()
    ]  # fmt: skip
    path.with_name("cameras.json").write_text(json.dumps(cameras))


def write_textured_wall(path: Path) -> None:
    """A square that faces the front, red on the left and blue on the right."""
    mesh = trimesh.Trimesh([[0, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1]], [[0, 1, 2], [0, 2, 3]], process=False)
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, :32], pixels[:, 32:] = RED, BLUE
    material = trimesh.visual.material.PBRMaterial(baseColorTexture=Image.fromarray(pixels))
    mesh.visual = trimesh.visual.TextureVisuals(uv=np.array([[0.0, 0], [1, 0], [1, 1], [0, 1]]), material=material)
    write_mesh(path, mesh, {"made_by": "f3rm-ext export texture"}, "y")


def scene_of(page: Any) -> np.ndarray:
    """The picture without its right quarter, which the panel may cover: it opens large and shrinks."""
    return page.picture()[:, :24]


def sides_of(page: Any) -> str:
    """Which colour the left and the right half of the picture show, such as ``red blue``; white where nothing is."""
    picture = page.picture()
    names = []
    for half in np.array_split(picture, 2, axis=1):
        warmth = (half[..., 0] - half[..., 2])[np.ptp(half, axis=2) > 0.2]
        names.append("white" if not len(warmth) else "red" if warmth.mean() > 0.2 else "blue")
    return " ".join(names)


@pytest.fixture
def view(
    tmp_path: Path, start_command: Callable[..., Any], free_port: Callable[[], int], wait_until: Callable[..., None]
) -> Callable[[str], Any]:
    """Starts the command on a file of the test; gives the process, whose ``address`` is that of the page."""

    def start(name: str) -> Any:
        port = free_port()
        process = start_command("f3rm-ext", "view", tmp_path / name, "--port", port)
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: not process.is_running() or address in process.said(), WAIT_S, "an address")
        assert process.is_running(), process.said()[-3000:]
        process.address, process.port = address, port
        return process

    return start


def test_splats_and_from_camera_to_camera(
    tmp_path: Path,
    view: Callable[[str], Any],
    open_page: Callable[[str], Any],
    wait_until: Callable[..., None],
    listening_hosts: Callable[[int, int], set[str]],
) -> None:
    write_two_balls(tmp_path / "balls.ply")
    process = view("balls.ply")
    assert listening_hosts(process.pid, process.port) == {"127.0.0.1"}
    assert "400 Gaussians" in process.said()
    page = open_page(process.address)
    wait_until(lambda: sides_of(page) == "red blue", WAIT_S, "the view of the first camera")
    page.press("Next camera")
    wait_until(lambda: sides_of(page) == "blue red", WAIT_S, "the view of the second camera, from behind")
    page.press("Previous camera")
    wait_until(lambda: sides_of(page) == "red blue", WAIT_S, "the first view again")
    done = process.interrupt(WAIT_S)
    assert done.code == 0 and "Traceback" not in done.text, done.text[-3000:]


def test_a_textured_mesh(
    tmp_path: Path, view: Callable[[str], Any], open_page: Callable[[str], Any], wait_until: Callable[..., None]
) -> None:
    write_textured_wall(tmp_path / "wall {1}.glb")
    page = open_page(view("wall {1}.glb").address)
    wait_until(lambda: sides_of(page) == "red blue", WAIT_S, "the wall with its texture")
    assert page.page.get_by_text("wall {1}.glb").is_visible()
    before = scene_of(page)
    page.drag(120)
    wait_until(lambda: np.abs(scene_of(page) - before).mean() > 0.02, WAIT_S, "the wall turned")
    page.press("Reset view")
    wait_until(lambda: np.abs(scene_of(page) - before).mean() < 0.01, WAIT_S, "the first view again")

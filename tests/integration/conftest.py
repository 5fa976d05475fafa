"""``f3rm-ext`` as a user types it, in this process to import everything only once; and runs that cannot be asked."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Finished = sys.modules["f3rm_ext_test_commands"].Finished


@pytest.fixture
def f3rm_ext(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command_environment: Mapping[str, str]
) -> Callable[..., Any]:
    """Types ``f3rm-ext ...`` with the caches of the other commands under test."""
    from f3rm_ext.scripts.cli import main

    for name in ("F3RM_EXT_CACHE", "TORCH_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, command_environment[name])
    monkeypatch.setenv("HF_HOME", command_environment["F3RM_EXT_CACHE"])

    def run(*arguments: object) -> Any:
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        return Finished(code, *capsys.readouterr())

    return run


@dataclass
class Folder:
    """Remembers what is in a folder."""

    path: Path
    content: dict[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.content = self.now()

    def now(self) -> dict[str, bytes]:
        """Contents of all files."""
        files = (path for path in self.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.path)): path.read_bytes() for path in files}

    def is_as_it_was(self) -> bool:
        """Whether nothing was added, removed or changed."""
        return self.now() == self.content


@pytest.fixture(scope="session")
def remember() -> Callable[[Path], Folder]:
    """Remembers what is in a folder, to see afterwards that nothing changed."""
    return Folder


@pytest.fixture(scope="session")
def rename_extractor() -> Callable[[str], Callable[[dict[str, Any]], None]]:
    """Makes a checkpoint say that its features came from an extractor written like this."""

    def make(extractor: str) -> Callable[[dict[str, Any]], None]:
        def change(state: dict[str, Any]) -> None:
            (key,) = [key for key in state if key.endswith("feature_field._extra_state")]
            described = json.loads(state[key])
            described["heads"][0]["extractor"] = extractor
            state[key] = json.dumps(described)

        return change

    return make


@pytest.fixture(scope="session")
def evaluated(trained: Any, run_command: Callable[..., Any], make_once: Callable[..., Path]) -> Path:
    """A folder with what ``ns-eval`` finds of the trained run (``eval.json``) and says (``said.txt``)."""

    def fill(out: Path) -> None:
        done = run_command("ns-eval", "--load-config", trained.config, "--output-path", out / "eval.json").succeeds()
        (out / "said.txt").write_text(done.text)

    return make_once("evaluated", fill)


@pytest.fixture(scope="session")
def no_features(make_run: Callable[..., Path]) -> Path:
    """config.yml of a run without features."""
    return make_run(())


@pytest.fixture(scope="session")
def other_basis(make_run: Callable[..., Path], tiny_capture: Path) -> Path:
    """config.yml of a run whose PCA codes have another basis than those in the feature store."""

    def turn(state: dict[str, Any]) -> None:
        (key,) = [key for key in state if key.endswith("code_basis")]
        state[key] = state[key].flip(0).contiguous()

    return make_run((f"labels:data={tiny_capture}",), codes=8, change=turn)


@pytest.fixture(scope="session")
def weightless(
    make_run: Callable[..., Path], rename_extractor: Callable[[str], Any], tiny_capture: Path
) -> tuple[Path, Path]:
    """config.yml of a run with stored features of a CLIP whose weights are not here, and where they should be."""
    weights = tiny_capture.parent / "vit_b_16.pt"
    change = rename_extractor(f"clip:model=ViT-B-16,pretrained={weights}")
    return make_run((f"labels:data={tiny_capture}",), change=change), weights


@pytest.fixture(scope="session")
def room_splats(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flat, opaque Gaussians on the true surface, in the frame of the capture."""
    import numpy as np
    import torch
    import trimesh
    from scipy.spatial.transform import Rotation

    from f3rm_ext.splat.files import SplatInfo, export_splats
    from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh

    count = 12_000
    arrays = np.load(tiny_capture / "gt_mesh.npz")
    mesh = trimesh.Trimesh(arrays["vertices"], arrays["faces"], process=False)
    points, faces = trimesh.sample.sample_surface(mesh, count, seed=0)[:2]
    normals = mesh.face_normals[faces]
    side = np.cross(normals, [0.3, 0.5, 0.81])
    side /= np.linalg.norm(side, axis=1, keepdims=True)
    turns = np.stack([side, np.cross(normals, side), normals], axis=2)
    x, y, z, w = Rotation.from_matrix(turns).as_quat().T
    splats = Gaussians(
        means=torch.tensor(np.asarray(points)).float(),
        scales=torch.tensor(np.tile(np.log([0.06, 0.06, 0.005]), (count, 1))).float(),
        quats=torch.tensor(np.stack([w, x, y, z], axis=1)).float(),
        opacities=torch.full((count, 1), 4.0),
        features_dc=rgb_to_sh(torch.tensor(np.abs(normals)).float()),
        features_rest=torch.zeros(count, 0, 3),
    )
    path = tmp_path_factory.mktemp("splats") / "room.ply"
    export_splats(splats, path, SplatInfo(), {"made_by": "a test"})
    return path


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system of a size such as 48k; skips the test where that is not allowed."""
    folder = tmp_path / "small"

    def mount(size: str) -> Path:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
        except FileNotFoundError:
            mounted = False
        if not mounted:
            pytest.skip("a small tmpfs cannot be mounted here (needs root)")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True, timeout=60)

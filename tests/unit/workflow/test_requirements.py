"""What later stages need is looked for before the first one."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.model_components import image_metrics
from f3rm_ext.workflow.demo import DemoRun
from f3rm_ext.workflow.options import DemoOptions
from f3rm_ext.workflow.runner import check_requirements

GIB = 1 << 30


def check(folder: Path, *needs: str) -> list[str]:
    training = "splats" if "splats" in needs else None
    return check_requirements(folder, training=training, meshes="meshes" in needs, scores="scores" in needs)


@pytest.fixture(autouse=True)
def _room_on_the_disk(set_free_space: Callable[[int], None]) -> None:
    set_free_space(100 * GIB)


def test_open3d(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not check(tmp_path, "meshes")
    monkeypatch.setitem(sys.modules, "open3d", None)  # type: ignore[arg-type]
    assert not check(tmp_path, "splats")
    with pytest.raises(ConfigError):
        check(tmp_path, "meshes")


def test_the_demos_room_needs_open3d_and_photos_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "open3d", None)  # type: ignore[arg-type]
    photos = tmp_path / "photos"
    photos.mkdir()
    DemoRun(DemoOptions(out=tmp_path / "demo", images=photos), Console()).check_requirements()
    with pytest.raises(ConfigError, match="Open3D"):
        DemoRun(DemoOptions(out=tmp_path), Console()).check_requirements()


def test_gsplats_kernels_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, pretend_gpus: Callable[[int], None], tmp_path: Path
) -> None:
    monkeypatch.setattr(compat, "describe_gsplat", lambda: (False, "without kernels", "Install nvcc."))
    assert not check(tmp_path, "splats")
    pretend_gpus(1)
    assert not check(tmp_path, "meshes")
    with pytest.raises(ConfigError, match="nvcc"):
        check(tmp_path, "splats")


def test_weights_of_lpips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = tmp_path / "alexnet.pth"
    monkeypatch.setattr(image_metrics, "find_alexnet", lambda: weights)
    (note,) = check(tmp_path, "scores")
    assert str(weights) in note
    weights.touch()
    assert not check(tmp_path, "scores")


def test_the_disk(
    monkeypatch: pytest.MonkeyPatch,
    pretend_gpus: Callable[[int], None],
    set_free_space: Callable[[int], None],
    tmp_path: Path,
) -> None:
    pretend_gpus(1)
    monkeypatch.setattr(compat, "describe_gsplat", lambda: (True, "with kernels", ""))
    set_free_space(5 * GIB)
    assert len(check(tmp_path, "splats")) == 1
    assert not check(tmp_path)
    set_free_space(GIB // 5)
    assert len(check(tmp_path)) == 1, "what is small may still fit"
    with pytest.raises(ConfigError):
        check(tmp_path, "splats")

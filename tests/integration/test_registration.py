"""Registering a method gives nerfstudio's commands what they need."""

import runpy
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("module", ["nerf", "splat"])
def test_every_ns_command_finds_an_ffmpeg(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("F3RM_EXT_CACHE", str(tmp_path / "cache"))
    assert shutil.which("ffmpeg") is None
    runpy.run_module(f"f3rm_ext.method_configs.{module}")
    assert shutil.which("ffmpeg") is not None

"""Registering a method gives nerfstudio's commands what they need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("module", ["nerf", "splat"])
def test_every_ns_command_finds_an_ffmpeg(module: str, tmp_path: Path) -> None:
    code = f"import shutil, f3rm_ext.method_configs.{module}; print(shutil.which('ffmpeg'))"
    bare = {**os.environ, "PATH": str(tmp_path), "F3RM_EXT_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.splitlines()[-1]).name == "ffmpeg"

"""An ffmpeg for nerfstudio and mediapy on machines that have none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from f3rm_ext.utils.ffmpeg import provide_ffmpeg


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setenv("F3RM_EXT_CACHE", str(tmp_path / "cache"))


def test_nerfstudio_and_mediapy_find_one(capsys: pytest.CaptureFixture[str]) -> None:
    import mediapy
    from nerfstudio.utils import install_checks

    with pytest.raises(SystemExit):
        install_checks.check_ffmpeg_installed()
    assert not mediapy.video_is_available()
    found = provide_ffmpeg()
    assert found is not None and found == shutil.which("ffmpeg")
    install_checks.check_ffmpeg_installed()
    assert mediapy.video_is_available()
    done = subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ffmpeg version")


def test_called_twice_the_path_grows_once() -> None:
    found = provide_ffmpeg()
    path = os.environ["PATH"]
    assert provide_ffmpeg() == found and os.environ["PATH"] == path


def test_the_machines_own_is_preferred(tmp_path: Path) -> None:
    own = tmp_path / "programs" / "ffmpeg"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    path = os.environ["PATH"]
    assert provide_ffmpeg() == str(own)
    assert os.environ["PATH"] == path and not (tmp_path / "cache").exists()


def test_link_into_a_removed_environment_is_made_anew(tmp_path: Path) -> None:
    link = tmp_path / "cache" / "bin" / "ffmpeg"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "removed" / "ffmpeg")
    assert provide_ffmpeg() == str(link) and link.resolve().is_file()
    assert [path.name for path in link.parent.iterdir()] == ["ffmpeg"], "nothing temporary is left"


def test_without_a_place_for_the_link_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    path = os.environ["PATH"]
    assert provide_ffmpeg() is None and os.environ["PATH"] == path


def test_without_a_home_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("F3RM_EXT_CACHE", "~no-such-user/cache")
    assert provide_ffmpeg() is None


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert provide_ffmpeg() is None

"""Compiled kernels find a place, whoever runs them."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils import kernel_cache
from f3rm_ext.utils.kernel_cache import VARIABLE, ensure_kernel_cache


@pytest.fixture
def _written_by_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing but the test's folder can be written; root may write everywhere."""
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).is_relative_to(tmp_path))


@pytest.mark.usefixtures("_written_by_others")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
def test_kernels_go_where_the_user_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"HOME": str(tmp_path)}, {"HOME": "/", "XDG_CACHE_HOME": str(tmp_path / "new")}, {VARIABLE: "elsewhere"}
    for environment in kept:
        before = dict(environment)
        ensure_kernel_cache(environment)
        assert environment == before
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a user whom the system does not know
    for home in ({"HOME": "/"}, {}):
        environment = {**home, "F3RM_EXT_CACHE": str(tmp_path / "cache")}
        ensure_kernel_cache(environment)
        assert environment[VARIABLE] == str(tmp_path / "cache" / "numba")


@pytest.mark.usefixtures("_written_by_others")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
def test_kernels_of_one_process_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    for name in (VARIABLE, "XDG_CACHE_HOME", "F3RM_EXT_CACHE"):
        monkeypatch.setenv(name, "")
    assert not kernel_cache.is_temporary()
    ensure_kernel_cache()
    folder = Path(os.environ[VARIABLE])
    assert kernel_cache.is_temporary() and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_without_a_home_the_cache_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("F3RM_EXT_CACHE", "~no-such-user/cache")
    with pytest.raises(ConfigError, match="F3RM_EXT_CACHE"):
        kernel_cache.user_cache()


def test_every_program_of_the_package_has_a_place() -> None:
    script = "import os; os.access = lambda *_: False; import f3rm_ext; print(os.environ['NUMBA_CACHE_DIR'])"
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).exists()  # gone with its process

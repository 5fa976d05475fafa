"""A libusb for Open3D on machines that have none."""

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import libusb_package
import pytest

from f3rm_ext.utils import libusb
from f3rm_ext.utils.libusb import LIBUSB, provide_libusb

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Open3D brings its own there")
LIBRARY = Path(str(libusb_package.get_library_path()))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An environment with Open3D, on a system without libusb."""
    load, find = ctypes.CDLL, importlib.util.find_spec
    module = tmp_path / "lib" / "python3.99" / "site-packages" / "open3d" / "__init__.py"

    def load_without(name: str, *rest: Any) -> Any:
        if name == LIBUSB:
            raise OSError(f"{name}: cannot open shared object file")
        return load(name, *rest)

    def find_in_environment(name: str, *rest: Any) -> Any:
        return ModuleSpec("open3d", None, origin=str(module)) if name == "open3d" else find(name, *rest)

    monkeypatch.setattr(ctypes, "CDLL", load_without)
    monkeypatch.setattr(importlib.util, "find_spec", find_in_environment)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    provide_libusb.cache_clear()
    yield tmp_path
    provide_libusb.cache_clear()


def test_this_process_gets_that_of_the_package() -> None:
    assert provide_libusb() == str(LIBRARY)
    assert str(LIBRARY.resolve()) in Path("/proc/self/maps").read_text()


def test_other_programs_find_a_link_where_open3d_looks(environment: Path) -> None:
    link = environment / "lib" / LIBUSB
    link.symlink_to(environment / "removed")  # of an environment that was moved
    provide_libusb()
    assert link.resolve() == LIBRARY.resolve()
    assert [path.name for path in link.parent.iterdir()] == [LIBUSB], "nothing temporary is left"


def test_no_link_outside_of_environments(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert provide_libusb() == str(LIBRARY) and not list((environment / "lib").iterdir())


def test_a_place_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(link: Path, target: Path) -> None:
        raise PermissionError(link, target)

    monkeypatch.setattr(libusb, "link_atomic", refuse)
    assert provide_libusb() == str(LIBRARY)


def test_that_of_the_system_is_preferred(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    assert provide_libusb() == LIBUSB and not list((environment / "lib").iterdir())


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libusb_package", None)
    assert provide_libusb() is None

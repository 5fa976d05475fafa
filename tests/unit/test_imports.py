"""Every module can be imported, the registration stays cheap, and the wheel gets every package."""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import f3rm_ext
from f3rm_ext.scripts.cli import GROUPS

ROOT = Path(__file__).parents[2]
HEAVY = {"open_clip", "transformers", "skimage", "numba", "scipy.ndimage", "tinycudann"}
NEEDS = {"f3rm_ext.nerf.hash_triton": "triton"}
"""Modules that are only imported where a package is installed."""


def modules() -> list[str]:
    found = [name for _, name, _ in pkgutil.walk_packages(f3rm_ext.__path__, "f3rm_ext.")]
    # In an editable install method_configs lies beside the package; it is a part of it all the same.
    return sorted(
        {*found, *(f"f3rm_ext.method_configs.{path.stem}" for path in (ROOT / "method_configs").glob("[!_]*.py"))}
    )


def test_every_module_can_be_imported() -> None:
    failed = {}
    for name in modules():
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = repr(error)
    assert not failed


def test_type_checkers_find_what_is_mapped_into_the_package() -> None:
    assert (ROOT / "typings" / "f3rm_ext" / "method_configs").resolve() == ROOT / "method_configs"


def test_setuptools_takes_nothing_else_for_a_package(tmp_path: Path) -> None:
    words = ["egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "lib"]
    done = subprocess.run(
        [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0 and "absent from the `packages`" not in done.stderr, done.stderr
    pages = tmp_path / "lib" / "f3rm_ext" / "html"
    assert (pages / "web" / "three.min.js").is_file() and (pages / "templates" / "page.html").is_file()


def test_every_package_is_listed_for_the_wheel() -> None:
    listed = set()
    section = (ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0]
    for line in section.splitlines():
        listed.add(line.strip(' ",'))
    there = {
        "f3rm_ext" if path.parent == ROOT / "f3rm_ext" else ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "f3rm_ext").rglob("__init__.py")
    }
    assert listed - {""} == there | {"f3rm_ext.method_configs"}


@pytest.fixture(scope="module")
def registered() -> list[str]:
    """What a process says that imports our methods, and then imports them again with a broken part."""
    code = f"""
import sys, f3rm_ext.capture.dataparser, f3rm_ext.method_configs.nerf as nerf
import f3rm_ext.method_configs.splat as splat
print(*(type(method.config).__name__ for method in (nerf.f3rm_ext, splat.sugar_ext, splat.sugar_ext_refine)))
print(sorted({HEAVY!r} & sys.modules.keys()))
for name in [name for name in sys.modules if name.startswith("f3rm_ext")]:
    del sys.modules[name]
sys.modules["f3rm_ext.nerf.model"] = None
from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.nerf import f3rm_ext as method
assert method.config.method_name == "f3rm-ext"
try:
    method.config.setup()
except ConfigError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_registration_imports_nothing_heavy(registered: list[str]) -> None:
    assert registered[:2] == ["F3rmTrainerConfig " * 2 + "F3rmTrainerConfig", "[]"]


def test_broken_part_of_ours_leaves_a_method_that_explains_itself(registered: list[str]) -> None:
    said = "\n".join(registered[2:])
    assert "f3rm_ext.nerf.model" in said and "f3rm-ext doctor" in said


def test_importing_the_package_imports_only_itself() -> None:
    code = "import sys, f3rm_ext; print(sorted({'torch', 'numpy', 'nerfstudio'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "[]\n", result.stderr


def test_help_of_no_command_needs_torch() -> None:
    code = """
import sys
from f3rm_ext.scripts.cli import GROUPS, main
for name in GROUPS:
    try:
        main([name, "--help"])
    except SystemExit:
        print(name, sorted({"torch", "nerfstudio", "numba", "scipy"} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {line for line in result.stdout.splitlines() if line.endswith("]")} >= {f"{name} []" for name in GROUPS}

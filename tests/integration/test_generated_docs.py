"""Tables of the docs are those that their scripts make, and the API pages have every module."""

import importlib.util
import pkgutil
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

import f3rm_ext

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "script", ["make_methods.py", "make_benchmarks.py", pytest.param("make_planning.py", marks=pytest.mark.release)]
)
def test_tables_are_up_to_date(
    script: str, monkeypatch: pytest.MonkeyPatch, set_command_line: Callable[..., None]
) -> None:
    monkeypatch.syspath_prepend(DOCS)
    set_command_line(script, "--check")
    runpy.run_path(str(DOCS / script), run_name="__main__")


def test_every_public_module_has_its_place_in_the_api_pages() -> None:
    spec = importlib.util.spec_from_file_location("api_pages", DOCS / "api_pages.py")
    assert spec is not None and spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    text = "".join(map(pages.page, pages.packages())) + (DOCS / "python.md").read_text()
    shown = re.findall(r"^::: (\S+)$", text, re.M)
    modules = [name for _, name, _ in pkgutil.walk_packages(f3rm_ext.__path__, "f3rm_ext.")]
    mapped = [f"method_configs.{path.stem}" for path in (DOCS.parent / "method_configs").glob("[!_]*.py")]
    public = {name for name in modules + mapped if "._" not in name and "f3rm_ext.method_configs" not in name}
    assert len(set(shown)) == len(shown) and public <= set(shown)
    for guide in pages.GUIDES.values():
        assert (DOCS / f"{guide}.md").is_file()

"""Every benchmark still finds what it imports: renamed parts are noticed here, not on the day they are wanted."""

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))


def _imported(script: Path) -> list[tuple[str, str]]:
    """Module and name of every `from … import …` of our package and of nerfstudio, also within functions."""
    found = []
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("f3rm_ext", "nerfstudio")):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(script: Path) -> None:
    missing = []
    for module, name in _imported(script):
        if not hasattr(importlib.import_module(module), name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                missing.append(f"{module}.{name}")
    assert not missing

"""Examples in docstrings say what happens."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for path in (ROOT / "f3rm_ext").rglob("*.py") if re.search(r"^\s*>>> ", path.read_text(), re.M))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def examples(path: Path) -> list[doctest.DocTest]:
    """The docstrings with examples; from the source, since decorators hide functions from doctest's own search."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    names = vars(importlib.import_module(".".join(parts).removesuffix(".__init__")))
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and ">>> " in (text := ast.get_docstring(node) or ""):
            name = getattr(node, "name", path.stem)
            line = 0 if isinstance(node, ast.Module) else node.lineno
            found.append(doctest.DocTestParser().get_doctest(text, dict(names), name, str(path), line))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples(path: Path) -> None:
    tests = examples(path)
    in_source = len(re.findall(r"^\s*>>> ", path.read_text(), re.M))
    assert sum(len(test.examples) for test in tests) == in_source, "an example is outside of a docstring"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in tests:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)

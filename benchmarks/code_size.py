"""How large the package and its tests are, and what in them is too long.

python benchmarks/code_size.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 500, 80


def main() -> None:
    """Prints the lines of each folder, long modules and functions, and assertions that depend on wording."""
    total = {}
    for folder in ("f3rm_ext", "method_configs", "tests", "benchmarks", "docs", "examples"):
        texts = {path: path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}
        total[folder] = sum(text.count("\n") for text in texts.values())
        print(f"{folder}: {total[folder]} lines in {len(texts)} modules")
        for path, text in texts.items() if folder in ("f3rm_ext", "method_configs") else ():
            if text.count("\n") > MAX_MODULE_LINES:
                print(f"  {path.relative_to(ROOT)} has {text.count(chr(10))} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    body = node.body[1:] if ast.get_docstring(node) else node.body
                    lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                    if lines > MAX_FUNCTION_LINES:
                        print(f"  {path.relative_to(ROOT)}:{node.lineno} {node.name} has {lines} lines")
        if folder == "tests":
            text = "".join(texts.values())
            quotes = len(re.findall(r'match=r?f?"(?:[^"\\]|\\.)* (?:[^"\\]|\\.)* (?:[^"\\]|\\.)* ', text))
            print(f"  {quotes} errors matched by four words or more, {text.count('monkeypatch.setattr')} patched names")
    print(f"docs: {sum(len(path.read_text().split()) for path in (ROOT / 'docs').rglob('*.md'))} words")


if __name__ == "__main__":
    main()

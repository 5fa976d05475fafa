"""How many small mistakes the unit tests notice.

    python benchmarks/mutants.py                        # 100 mistakes anywhere in the package
    python benchmarks/mutants.py --count 20 --under splat/rasterize --seed 7

Each mistake changes one operator, constant or sign of a random expression in a copy of the package. The unit tests of
its module run until one fails, then those of its folder. The mistakes that no test noticed are printed. Some change
nothing: a result that is not used, a bound that no input meets.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "f3rm_ext"
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
"""Operators and what they are mistaken for."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: the text of an expression, and what stands there instead."""

    path: Path
    line: int
    start: int
    """Offset of the expression in the file, bytes of UTF-8."""
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Returns the file with the mistake."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mistakes(node: ast.expr) -> Iterator[ast.expr]:
    """Yields what an expression may be mistaken for."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1 if isinstance(node.value, int) else node.value * 1.5 or 1.0)


def mutants(path: Path) -> list[Mutant]:
    """Returns all mistakes that can be made in the functions of a module."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    made = []
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    nodes = {id(node): node for function in functions for part in function.body for node in ast.walk(part)}
    for node in nodes.values():
        if isinstance(node, ast.expr):
            for mistake in mistakes(node):
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
                made.append(Mutant(path, node.lineno, begin, end, f"({ast.unparse(mistake)})"))
    return made


def find_tests(path: Path) -> list[Path]:
    """Returns where a module's unit tests are: those of the module, if there are any, then those of its folder."""
    folder = ROOT / "tests" / "unit" / path.parent.relative_to(PACKAGE)
    while not folder.is_dir():
        folder = folder.parent
    module = folder / f"test_{path.stem}.py"
    return [*([module] if module.is_file() else []), folder]


@dataclass
class Sample:
    """Makes random mistakes in the package and counts those that its unit tests notice."""

    count: int = 100
    """Number of mistakes."""
    seed: int = 0
    """Seed of the choice."""
    under: str = ""
    """Folder or module in the package to which the sample is limited."""
    timeout_s: float = 600.0
    """Time after which the tests of one mistake count as hanging, which is noticed, too; seconds."""

    def main(self) -> None:
        """Prints the mistakes that no test noticed, and the share of the others."""
        place = PACKAGE / self.under
        paths = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        every = [mutant for path in paths for mutant in mutants(path)]
        sample = random.Random(self.seed).sample(every, min(self.count, len(every)))
        missed = 0
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(PACKAGE, Path(folder, "f3rm_ext"), ignore=shutil.ignore_patterns("__pycache__"))
            Path(folder, "f3rm_ext", "method_configs").symlink_to(ROOT / "method_configs")
            for tests in sorted({tests for mutant in sample for tests in find_tests(mutant.path)}):
                if self._fail(tests, Path(folder)):
                    raise SystemExit(f"Error: {tests.relative_to(ROOT)} fails without any mistake: mend it first.")
            for mutant in track(sample, "Mistakes", console=Console(stderr=True)):
                copy = Path(folder) / mutant.path.relative_to(ROOT)
                source = mutant.path.read_bytes()
                copy.write_bytes(mutant.apply(source))
                if not any(self._fail(tests, Path(folder)) for tests in find_tests(mutant.path)):
                    missed += 1
                    line = source.decode().splitlines()[mutant.line - 1].strip()
                    print(f"{mutant.path.relative_to(ROOT)}:{mutant.line}: {line}  →  {mutant.text}", flush=True)
                copy.write_bytes(source)
        print(f"Noticed: {len(sample) - missed} of {len(sample)}, of {len(every)} possible ones (seed {self.seed})")

    def _fail(self, tests: Path, folder: Path) -> bool:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
        try:
            done = subprocess.run(
                [*command, "--rootdir", ROOT, tests],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
                capture_output=True,
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


if __name__ == "__main__":
    tyro.cli(Sample).main()

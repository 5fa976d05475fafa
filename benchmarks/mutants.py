"""How many small mistakes the unit tests notice.

    python benchmarks/mutants.py                        # 100 mistakes anywhere in the package
    python benchmarks/mutants.py --count 20 --under splat/rasterize --seed 7

Each mistake changes one operator, constant or sign of a random expression in a copy of the package. The unit tests of
its module and its folder run until one fails that passes without it. Some mistakes change nothing: a result that is not
used, a bound that no input meets.
"""

import ast
import contextlib
import functools
import multiprocessing
import os
import queue
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
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
PRELOAD = [
    "beartype",
    "jaxtyping",
    "numba",
    "pytest",
    "torch",
    "torchmetrics.image",
    "cv2",
    "viser",
    "nerfstudio.models.base_model",
]
"""What tests import slowly, without anything of the package: each run is a fork of a process that has it."""
CRASH = "crash"
"""Stands for a test whose process ended."""


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


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Returns the names of what a file imports or, as kernels that are chosen at run time, gives as a string."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return frozenset(names)


def name_module(path: Path) -> str:
    """Returns the name by which a module of the package is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def find_tests(path: Path, near: bool = False) -> list[str]:
    """Returns the files of a module's unit tests: its own, those of its folder that name it, the others of its folder,
    those elsewhere that import it, and the own ones of modules that import it, or import those.

    ``near`` leaves all but the first two out, and with a file of its own all but that.
    """
    unit = ROOT / "tests" / "unit"
    folder = unit / path.parent.relative_to(PACKAGE)
    while not (files := sorted(folder.glob("test_*.py"))):
        folder = folder.parent
    # Triton's kernels have tests that others run in a process of their own.
    interpreted = unit.rglob("interpreted_*.py")
    kernels = [file for file in interpreted if "triton" in path.stem and path.stem in file.read_text("utf-8")]
    own = [*kernels, *(file for file in files if file.stem == f"test_{path.stem}")]
    users = [file for file in files if path.stem in file.read_text("utf-8")]
    if near:
        return [str(file) for file in own or users]
    elsewhere = [file for file in sorted(unit.rglob("test_*.py")) if name_module(path) in imported(file)]
    callers = [path]
    for _ in range(2):
        wanted = set(map(name_module, callers))
        callers = [module for module in sorted(PACKAGE.rglob("*.py")) if module in callers or wanted & imported(module)]
    theirs = [unit / caller.parent.relative_to(PACKAGE) / f"test_{caller.stem}.py" for caller in callers]
    return [str(file) for file in dict.fromkeys([*own, *users, *files, *elsewhere, *theirs]) if file.exists()]


class Failure:
    """Tells which tests fail."""

    def __init__(self, results: Connection) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that failed."""
        if report.failed:
            self._results.send(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport
    """A file that cannot be imported."""


def run_tests(
    results: Connection, folder: Path, tests: Sequence[str], limit_s: float, fresh: bool, interpret: bool
) -> None:
    """Runs tests on the package in a folder and ends the process; sends the names of those that fail.

    ``fresh`` leaves alone what numba has compiled; ``interpret`` has the tests choose kernels of Triton where they
    otherwise choose those of numba.
    """
    from numba.core import config  # type: ignore[attr-defined]

    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some take longer to import than most tests take
    os.environ["TRITON_INTERPRET"] = str(int(interpret))
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    if fresh:
        config.CACHE_DIR = tempfile.mkdtemp(dir=folder)  # type: ignore[attr-defined]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    limits = ["-o", f"timeout={limit_s}", "-o", f"faulthandler_timeout={1.5 * limit_s}"]
    code = pytest.main([*options, *limits, *tests], plugins=[Failure(results)])
    os._exit(code)


@dataclass
class Sample:
    """Makes random mistakes in the package and counts those that its unit tests notice."""

    count: int = 100
    """Number of mistakes."""
    seed: int = 0
    """Seed of the choice."""
    under: str = ""
    """Folder or module in the package to which the sample is limited."""
    jobs: int = 1
    """Mistakes that are tested at the same time."""
    near: bool = False
    """Runs only the module's own file of tests, or those that name it: quicker, and misses more."""
    limit_s: float = 180.0
    """Time after which a test counts as hanging, which is noticed, too; seconds."""

    def main(self) -> None:
        """Prints the mistakes that no test noticed, and the share of the others."""
        place = PACKAGE / self.under
        paths = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        every = [mutant for path in paths for mutant in mutants(path)]
        sample = random.Random(self.seed).sample(every, min(self.count, len(every)))
        os.environ.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
        multiprocessing.set_start_method("forkserver")
        multiprocessing.set_forkserver_preload(PRELOAD)
        with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(self.jobs) as pool:
            copies: queue.Queue[Path] = queue.Queue()
            for job in range(self.jobs):
                copies.put(Path(root, str(job)))
                shutil.copytree(PACKAGE, Path(root, str(job), PACKAGE.name))
                Path(root, str(job), PACKAGE.name, "method_configs").symlink_to(ROOT / "method_configs")
            results = pool.map(functools.partial(self._notice, copies), sample)
            tests = list(track(results, "Mistakes", len(sample), console=Console(stderr=True)))
            named = [str(ROOT / test) for test in sorted({test for test in tests if test and test != CRASH})]
            broken = self._failures(Path(root, "0"), named) if named else []
        for test in broken:
            print(f"{test} fails without any mistake, too: those that it noticed count as missed.")
        noticed = len(sample) - sum(test is None or test in broken for test in tests)
        print(f"Noticed: {noticed} of {len(sample)}, of {len(every)} possible ones (seed {self.seed})")

    def _notice(self, copies: "queue.Queue[Path]", mutant: Mutant) -> str | None:
        """Returns the first test that fails, if any."""
        folder = copies.get()
        copy = folder / mutant.path.relative_to(ROOT)
        source = mutant.path.read_bytes()
        copy.write_bytes(mutant.apply(source))
        tests = ["-x", *find_tests(mutant.path, self.near)]
        fresh, interpret = self._has_compiled_callers(mutant.path), "triton" in mutant.path.stem
        test = next(iter(self._failures(folder, tests, fresh, interpret)), None)
        copy.write_bytes(source)
        copies.put(folder)
        line = source.decode().splitlines()[mutant.line - 1].strip()
        where = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
        print(f"{test or 'MISSED'}: {where}: {line}  →  {mutant.text}", flush=True)
        return test

    def _has_compiled_callers(self, path: Path) -> bool:
        """Whether what numba has compiled of other modules may hold functions of this one."""
        callers = (other for other in PACKAGE.rglob("*.py") if name_module(path) in imported(other))
        return any("njit" in caller.read_text("utf-8") for caller in callers)

    def _failures(self, folder: Path, tests: Sequence[str], fresh: bool = False, interpret: bool = False) -> list[str]:
        results, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(
            target=run_tests, args=(sender, folder, tests, self.limit_s, fresh, interpret)
        )
        process.start()
        sender.close()
        failed = []
        with contextlib.suppress(EOFError):
            while True:
                failed.append(results.recv())
        process.join()
        return failed or ([CRASH] if process.exitcode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else [])


if __name__ == "__main__":
    tyro.cli(Sample).main()

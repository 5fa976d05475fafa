"""The toy run, as a module and as a program."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from f3rm_ext.engine.trainer import F3rmTrainer, F3rmTrainerConfig

TOY = Path(__file__).with_name("toy_run.py")
PROGRAM = "from f3rm_ext.compat import shorten_imports; shorten_imports(); import toy_run; toy_run.main()"
"""Without the viewer and torch's compiler, whose imports take most of the time."""


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """``toy_run`` under a name that config.yml can refer to."""
    if "toy_run" not in sys.modules:
        spec = importlib.util.spec_from_file_location("toy_run", TOY)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["toy_run"] = module
        spec.loader.exec_module(module)
    return sys.modules["toy_run"]


@pytest.fixture
def make_config(toy: ModuleType, tmp_path: Path) -> Callable[..., F3rmTrainerConfig]:
    """Makes the options of a toy run of so many steps."""
    return partial(toy.make_config, tmp_path)


@pytest.fixture
def train(toy: ModuleType, make_config: Callable[..., F3rmTrainerConfig]) -> Callable[..., F3rmTrainer]:
    """Trains a toy run of so many steps."""
    return lambda steps, seed=42, **options: toy.run(make_config(steps, **options), seed=seed)


@pytest.fixture
def in_each_step(toy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], None]:
    """Has something done in each training step of toy runs, which is given the step's number."""
    return lambda do: monkeypatch.setattr(toy.ToyPipelineConfig, "on_step", lambda config, step: do(step))


@pytest.fixture
def fail_in_step(in_each_step: Callable[..., None]) -> Callable[[BaseException, int], None]:
    """Has a training step of toy runs fail."""

    def fail(error: BaseException, at: int) -> None:
        def on_step(step: int) -> None:
            if step == at:
                raise error

        in_each_step(on_step)

    return fail


@pytest.fixture
def start_toy() -> Callable[..., subprocess.Popen]:
    """Starts ``toy_run.py`` as a process with pipes."""

    def start(*arguments: object) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TOY.parent)},
        )

    return start

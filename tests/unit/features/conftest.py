"""Fixtures of the feature store's tests: the toy extractor, and processes that use it."""

import importlib.util
import itertools
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOY = Path(__file__).with_name("toy.py")


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The module ``toy.py`` beside this file."""
    spec = importlib.util.spec_from_file_location("f3rm_ext_test_toy", TOY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def processes() -> Any:
    """The multiprocessing context of :func:`start`. Its children are forked from a server that has torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["f3rm_ext.features.source", "f3rm_ext.features.display", "nerfstudio.utils.rich_utils"]
    )
    return context


@pytest.fixture
def start(processes: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a process that prepares the features of the images of ``job`` with the toy extractor."""
    started = []
    numbers = itertools.count()

    def run(**job: Any) -> Any:
        job.setdefault("cache", tmp_path / "cache")
        job.setdefault("log", tmp_path / "log.txt")
        job.setdefault("done", tmp_path / f"done-{next(numbers)}.txt")
        process = processes.Process(target=runpy.run_path, args=(str(TOY), {"JOB": job}, "__main__"))
        process.start()
        process.done = job["done"]
        started.append(process)
        return process

    yield run
    for process in started:
        if process.is_alive():
            process.kill()
        process.join(30)


@pytest.fixture
def logged(tmp_path: Path) -> Callable[[], list[str]]:
    """The keys of the images that were extracted so far, by whatever process."""

    def read() -> list[str]:
        log = tmp_path / "log.txt"
        return log.read_text().split() if log.exists() else []

    return read

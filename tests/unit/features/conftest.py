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

from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.source import FeatureSource, open_features, prepare_features
from f3rm_ext.features.store.extraction import extract_missing
from f3rm_ext.features.store.feature_store import FeatureStore
from f3rm_ext.features.store.images import ImageIndex, ImageSet

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


class Lab:
    """The toy extractor, small images, and a cache in a temporary folder."""

    def __init__(self, toy: Any, folder: Path) -> None:
        self.toy, self.folder, self.cache, self.log = toy, folder, folder / "cache", folder / "log.txt"
        self.train, self.evaluation = (
            toy.write_images(folder / name, count, seed=seed) for name, count, seed in (("train", 5, 0), ("eval", 2, 9))
        )

    def prepare(
        self, *sets: list[Path], extractors: tuple[str, ...] = ("toy",), codes: int = 0, **more: Any
    ) -> list[FeatureSource]:
        """Prepares the features of images."""
        more.setdefault("build", lambda text, *, device: self.toy.ToyExtractor(self.log, model=text))
        options = FeatureOptions(extractors=extractors, cache_dir=self.cache, codes=codes)
        return prepare_features([self.toy.ToyDataset(paths) for paths in sets], options, device="cpu", **more)

    def reopen(self, specs: Any, *sets: list[Path]) -> list[FeatureSource] | None:
        """Opens features as a fresh process would."""
        return open_features([self.toy.ToyDataset(paths) for paths in sets], specs, self.cache)

    def logged(self) -> list[str]:
        """The keys of the images that were extracted so far, by whatever process."""
        return self.log.read_text().split() if self.log.exists() else []

    def shards(self) -> list[Path]:
        """The files of all features."""
        return sorted(self.cache.glob("features/*/shards/*.npy"))

    def store(self) -> FeatureStore:
        """The features that the cache has, as a new process finds them."""
        extractor = self.toy.ToyExtractor()
        folder = self.cache / "features" / f"toy-{extractor.identity.key()}"
        return FeatureStore.open(folder, vars(extractor.identity), extractor.dim)

    def image_set(self, paths: list[Path]) -> ImageSet:
        """Images with an index in the folder."""
        return ImageSet(self.toy.ToyDataset(paths), ImageIndex(self.folder / "images.json"))

    def extract(self, paths: list[Path], extractor: Any = None, **options: Any) -> int:
        """Extracts what the store lacks; returns how many images that were."""
        extractor = extractor or self.toy.ToyExtractor(self.log)
        return extract_missing(extractor, self.store(), [self.image_set(paths)], name="toy", **options)


@pytest.fixture
def lab(toy: ModuleType, tmp_path: Path) -> Lab:
    """See :class:`Lab`."""
    return Lab(toy, tmp_path)

"""Prepares or opens the features of data sets, ready to train on."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from f3rm_ext.errors import ConfigError, FeatureStoreError
from f3rm_ext.features.base import Extractor, ExtractorIdentity, FeatureMap
from f3rm_ext.features.extractors.registry import build_extractor
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.features.store.extraction import disk_errors, say_waiting
from f3rm_ext.features.store.feature_store import FeatureStore, cache_root, plain_name
from f3rm_ext.features.store.images import INDEX_NAME, ImageDataset, ImageIndex, ImageSet
from f3rm_ext.features.store.manifest import MANIFEST_NAME
from f3rm_ext.features.stored_head import StoredHead


def head_names(extractors: Sequence[str]) -> list[str]:
    """Returns the name of each head: that of its extractor, with a number if an earlier head has the same.

    >>> head_names(["clip", "dinov2:layers=6+7", "clip:model=ViT-B-16"])
    ['clip', 'dinov2', 'clip_2']
    """
    names: list[str] = []
    for text in extractors:
        base = plain_name(text.split(":", 1)[0].strip())
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


class FeatureSource:
    """The features of one data set's images. It holds neither extractor nor features, only where they are stored.

    Args:
        stores: Store of each head.
        keys: Key of each image.
    """

    def __init__(self, specs: Sequence[FeatureSpec], stores: Sequence[FeatureStore], keys: Sequence[str]):
        self.specs = tuple(specs)
        """One per head, in the order of the options."""
        self.keys = tuple(keys)
        """Key of each image."""
        self._stores = tuple(stores)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.keys)

    def load(self, image_idx: int) -> dict[str, FeatureMap]:
        """Returns the features of one image by head name, memory-mapped. Safe to call from several threads.

        Raises:
            FeatureStoreError: A shard is missing or has changed.
        """
        key = self.keys[image_idx]
        return {spec.name: store.load(key) for spec, store in zip(self.specs, self._stores, strict=True)}


def prepare_features(
    datasets: Sequence[ImageDataset],
    options: FeatureOptions,
    *,
    device: torch.device | str,
    local_rank: int = 0,
    world_size: int = 1,
    local_size: int = 1,
    repair: bool = False,
    build: Callable[..., Extractor] | None = None,
) -> list[FeatureSource]:
    """Makes whatever features the images lack, and opens them: one source per data set.

    The processes on a machine share the extraction: local rank 0 extracts its part, adopts what the others extract, and
    the others wait for it. PCA codes and display bases are fitted to the images of the first data set. Extractors are
    released before this returns.

    Args:
        datasets: The training images first, then any others (evaluation), whose codes use the same basis.
        local_size: Number of processes that extract together; with 1, the others only wait.
        repair: Read every shard whole and make damaged ones again instead of raising.

    Raises:
        FeatureStoreError: A shard is damaged, the disk is full, or rank 0 has failed.
        ExtractorError: An extractor is unknown or cannot be set up.
        CaptureError: An image cannot be read.
        ConfigError: There are no images, or there are as many codes as dimensions or more.
    """
    if not datasets or len(datasets[0]) == 0:
        raise ConfigError("There are no training images to extract features of: check the capture and its split.")
    device = torch.device(device)
    cache = cache_root(options.cache_dir)
    index = ImageIndex(cache / INDEX_NAME)
    sets = [ImageSet(dataset, index) for dataset in datasets]

    def prepare(text: str, name: str) -> tuple[FeatureSpec, FeatureStore]:
        together = local_size > 1 and not repair
        own = device if local_rank == 0 or together else torch.device("cpu")
        extractor = (build or build_extractor)(text, device=own)
        head = StoredHead(text, name, extractor.identity, extractor.dim, options.codes, cache, sets)
        if local_rank != 0:
            if together:
                head.extract_share(extractor, local_rank, local_size)
            del extractor
            _free_memory(device)
            head.wait(world_size)
        elif repair or head.open() is None:
            with disk_errors(head.root, lambda: 0), head.lock.hold(say_waiting(head.root, "another process")):
                head.refresh()
                if together:
                    head.extract_with_others(extractor, local_size)
                else:
                    head.extract(extractor, repair=repair)
                del extractor
                _free_memory(device)
                head.derive(device)
        stores = head.open()
        if stores is None:
            raise FeatureStoreError(
                f"The features in {head.root} were changed while they were being made: run the same command again."
            )
        return stores

    stores = []
    for text, name in zip(options.extractors, head_names(options.extractors), strict=True):
        stores.append(prepare(text, name))
        _free_memory(device)
    keys = [image_set.keys() if stores else [""] * len(image_set) for image_set in sets]
    return _sources(stores, keys)


def open_features(
    datasets: Sequence[ImageDataset], specs: Sequence[FeatureSpec], cache_dir: Path | None
) -> list[FeatureSource] | None:
    """Opens features that were made before, given their specs in a checkpoint; None if anything is missing.

    Needs neither extractor nor weights. The training images come first, as in :func:`prepare_features`.

    Raises:
        FeatureStoreError: A shard is damaged.
    """
    cache = cache_root(cache_dir)
    index = ImageIndex(cache / INDEX_NAME)
    sets = [ImageSet(dataset, index) for dataset in datasets]
    keys = [image_set.keys() for image_set in sets]
    stores = []
    for spec in specs:
        codes, dim = (0, spec.dim) if spec.code_basis is None else spec.code_basis.shape
        head = StoredHead(spec.extractor, spec.name, ExtractorIdentity(**spec.identity), dim, codes, cache, sets)
        store = head.open() if (head.root / MANIFEST_NAME).is_file() else None
        if store is None:
            return None
        stores.append(store)
    return _sources(stores, keys)


def _sources(opened: Sequence[tuple[FeatureSpec, FeatureStore]], keys: Sequence[Sequence[str]]) -> list[FeatureSource]:
    specs, stores = [spec for spec, _ in opened], [store for _, store in opened]
    return [FeatureSource(specs, stores, set_keys) for set_keys in keys]


def _free_memory(device: torch.device) -> None:
    """Frees the memory of an extractor that is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

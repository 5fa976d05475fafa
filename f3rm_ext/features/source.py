"""Prepares or opens the features of data sets, ready to train on."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from f3rm_ext.errors import ConfigError, FeatureStoreError
from f3rm_ext.features.base import Extractor, ExtractorIdentity, FeatureMap
from f3rm_ext.features.extractors.registry import build_extractor, extractor_name, resizes
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.features.store.extraction import disk_errors, say_waiting
from f3rm_ext.features.store.feature_store import FeatureStore, cache_root, plain_name
from f3rm_ext.features.store.images import INDEX_NAME, ImageDataset, ImageIndex, ImageSet, full_size
from f3rm_ext.features.store.manifest import MANIFEST_NAME
from f3rm_ext.features.stored_head import StoredHead
from f3rm_ext.utils.names import unique_name


def head_names(extractors: Sequence[str]) -> list[str]:
    """Returns the name of each head: that of its extractor, with a number if an earlier head has the same.

    >>> head_names(["clip", "dinov2:layers=6+7", "clip:model=ViT-B-16"])
    ['clip', 'dinov2', 'clip_2']
    """
    names: list[str] = []
    for text in extractors:
        names.append(unique_name(plain_name(extractor_name(text)), names.__contains__))
    return names


class FeatureSource:
    """The features of one data set's images. It holds neither extractor nor features, only where they are stored.

    Args:
        dataset: The data set, at the size that is trained on.
        heads: Spec and store of each head, and the images that its extractor saw, in the order of the options.
    """

    def __init__(self, dataset: ImageDataset, heads: Sequence[tuple[FeatureSpec, FeatureStore, ImageSet]]):
        self.specs = tuple(spec for spec, _, _ in heads)
        """One per head, in the order of the options."""
        self._count = len(dataset)
        self._heads = [(spec.name, store, images.keys(), _scales(dataset, images)) for spec, store, images in heads]

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> tuple[str, ...]:
        """Key of each image in the store of the first head; none without heads."""
        return tuple(self._heads[0][2]) if self._heads else ()

    def load(self, image_idx: int) -> dict[str, FeatureMap]:
        """Returns the features of one image by head name, memory-mapped. Safe to call from several threads.

        Their grids are in pixels of the data set, also where the extractor saw larger photos.

        Raises:
            FeatureStoreError: A shard is missing or has changed.
        """
        return {
            name: _scale_grid(store.load(keys[image_idx]), scales[image_idx])
            for name, store, keys, scales in self._heads
        }


def _scales(dataset: ImageDataset, images: ImageSet) -> list[tuple[float, float]]:
    """Size (y, x) of each image of a data set, as a share of that of the photo that an extractor saw."""
    seen = images.dataset.cameras
    return [
        (int(dataset.cameras.height[i]) / int(seen.height[i]), int(dataset.cameras.width[i]) / int(seen.width[i]))
        for i in range(len(dataset))
    ]


def _scale_grid(feature_map: FeatureMap, scale: tuple[float, float]) -> FeatureMap:
    return feature_map if scale == (1.0, 1.0) else replace(feature_map, grid=feature_map.grid.scale(*scale))


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
    images = _SeenImages(datasets, cache)

    def prepare(text: str, name: str) -> tuple[FeatureSpec, FeatureStore, list[ImageSet]]:
        together = local_size > 1 and not repair
        build_device = device if local_rank == 0 or together else torch.device("cpu")
        extractor = _build(text, build_device, options.codes, build or build_extractor)
        sets = images.of(full=getattr(extractor, "resizes", False))
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
        return *stores, sets

    if build is None:
        # A mistake in a later extractor must not appear only after the first has worked for an hour.
        for text in options.extractors[1:]:
            _build(text, torch.device("cpu"), options.codes, build_extractor)
    heads = []
    for text, name in zip(options.extractors, head_names(options.extractors), strict=True):
        heads.append(prepare(text, name))
        _free_memory(device)
    return _sources(datasets, heads)


def _build(text: str, device: torch.device, codes: int, build: Callable[..., Extractor]) -> Extractor:
    """Builds an extractor. Raises ConfigError if its features have no more dimensions than there are codes."""
    extractor = build(text, device=device)
    if codes >= extractor.dim:
        raise ConfigError(
            f"{codes} PCA codes are no fewer than the {extractor.dim} dimensions of {text}: "
            "choose fewer codes, or 0 to distil the full features."
        )
    return extractor


def open_features(
    datasets: Sequence[ImageDataset], specs: Sequence[FeatureSpec], cache_dir: Path | None
) -> list[FeatureSource] | None:
    """Opens features that were made before, given their specs in a checkpoint; None if anything is missing.

    Needs neither extractor nor weights. The training images come first, as in :func:`prepare_features`.

    Raises:
        FeatureStoreError: A shard is damaged.
    """
    cache = cache_root(cache_dir)
    images = _SeenImages(datasets, cache)
    heads = []
    for spec in specs:
        sets = images.of(full=resizes(spec.extractor))
        for image_set in sets:
            image_set.keys()
        codes, dim = (0, spec.dim) if spec.code_basis is None else spec.code_basis.shape
        head = StoredHead(spec.extractor, spec.name, ExtractorIdentity(**spec.identity), dim, codes, cache, sets)
        store = head.open() if (head.root / MANIFEST_NAME).is_file() else None
        if store is None:
            return None
        heads.append((*store, sets))
    return _sources(datasets, heads)


def _sources(
    datasets: Sequence[ImageDataset], heads: Sequence[tuple[FeatureSpec, FeatureStore, list[ImageSet]]]
) -> list[FeatureSource]:
    return [
        FeatureSource(dataset, [(spec, store, sets[number]) for spec, store, sets in heads])
        for number, dataset in enumerate(datasets)
    ]


class _SeenImages:
    """The images of data sets as extractors see them."""

    def __init__(self, datasets: Sequence[ImageDataset], cache: Path) -> None:
        self._datasets, self._index = datasets, ImageIndex(cache / INDEX_NAME)
        self._sets: dict[bool, list[ImageSet]] = {}

    def of(self, *, full: bool) -> list[ImageSet]:
        """Returns the images of each data set, at full size or at the size that is trained on."""
        full = full and any(dataset.scale_factor != 1.0 for dataset in self._datasets)
        if full not in self._sets:
            datasets = [full_size(dataset) if full else dataset for dataset in self._datasets]
            self._sets[full] = [ImageSet(dataset, self._index) for dataset in datasets]
        return self._sets[full]


def _free_memory(device: torch.device) -> None:
    """Frees the memory of an extractor that is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

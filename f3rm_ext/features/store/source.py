"""From data sets and options to features ready to train on."""

import dataclasses
import gc
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from f3rm_ext.errors import ConfigError, FeatureStoreError
from f3rm_ext.features.base import Extractor, ExtractorIdentity, FeatureMap
from f3rm_ext.features.display import fit_display, load_display, sample_patches, save_display
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.pca_codes import CodeBasis, build_codes, codes_root, load_basis, open_codes
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.features.store.extraction import (
    disk_errors,
    extract_missing,
    pending,
    say_waiting,
    wait_until,
)
from f3rm_ext.features.store.feature_store import FeatureStore, shard_bytes
from f3rm_ext.features.store.images import INDEX_NAME, ImageDataset, ImageIndex, ImageSet, set_key
from f3rm_ext.features.store.manifest import MANIFEST_NAME
from f3rm_ext.utils.atomic_files import FolderLock, remove_temporaries
from f3rm_ext.utils.console import image_progress

BuildExtractor = Callable[..., Extractor]


def cache_root(cache_dir: Path | None) -> Path:
    """Folder of all feature stores: ``features`` in the given folder, else $F3RM_EXT_CACHE, else ~/.cache/f3rm_ext."""
    root = cache_dir or Path(os.environ.get("F3RM_EXT_CACHE") or "~/.cache/f3rm_ext")
    return root.expanduser() / "features"


def store_root(cache: Path, identity: ExtractorIdentity) -> Path:
    """Folder of the features of one extractor."""
    return cache / f"{_plain(identity.extractor)}-{identity.key()}"


def head_names(extractors: Sequence[str]) -> list[str]:
    """Names of the heads: the extractor's name; the second of the same name gets ``_2`` and so on."""
    names: list[str] = []
    for text in extractors:
        base = _plain(text.split(":", 1)[0].strip())
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text)


class FeatureSource:
    """The features of the images of one data set. Holds no extractor and no features, only where they are."""

    def __init__(self, specs: Sequence[FeatureSpec], stores: Sequence[FeatureStore], keys: Sequence[str]):
        self.specs = tuple(specs)
        """One per head, in the order asked for."""
        self.keys = tuple(keys)
        """Key of each image."""
        self._stores = tuple(stores)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.keys)

    def load(self, image_idx: int) -> dict[str, FeatureMap]:
        """The features of one image by head name, memory-mapped. Safe to call from several threads.

        Raises:
            FeatureStoreError: When a shard is missing or not what it was.
        """
        key = self.keys[image_idx]
        return {spec.name: store.load(key) for spec, store in zip(self.specs, self._stores, strict=True)}


@dataclass
class _Head:
    """One extractor's features of a capture."""

    text: str
    name: str
    identity: ExtractorIdentity
    dim: int
    codes: int
    cache: Path
    sets: Sequence[ImageSet]

    def __post_init__(self) -> None:
        if self.codes >= self.dim > 0:
            raise ConfigError(
                f"{self.codes} PCA codes are no fewer than the {self.dim} dimensions of {self.text}: "
                "ask for fewer codes, or for 0 to distil the full features."
            )
        self.root = store_root(self.cache, self.identity)
        self.lock = FolderLock(self.root / "lock")

    def full(self) -> FeatureStore:
        """The full features, as they are on the disk now."""
        return FeatureStore.open(self.root, dataclasses.asdict(self.identity), self.dim)

    def open(self) -> tuple[FeatureSpec, FeatureStore] | None:
        """What to distil, when all of it is there; None when something is missing.

        Raises:
            FeatureStoreError: When something is damaged or of another model.
        """
        if any(key is None for image_set in self.sets for key in image_set.known()):
            return None
        store, basis = self.full(), None
        if self.codes:
            root = self._codes_root(store)
            basis = load_basis(root)
            if basis is None:
                return None
            store = open_codes(store, root, basis)
        if pending(store, self.sets, repair=False):
            return None
        return self._spec(store, basis)

    def extract(self, extractor: Extractor, *, repair: bool) -> int:
        """Extracts what is missing. Only under the lock."""
        return extract_missing(extractor, self.full(), self.sets, name=self.name, repair=repair)

    def derive(self, device: torch.device) -> None:
        """Makes codes and display basis from the full features. Only under the lock."""
        store = self.full()
        keys = [key for image_set in self.sets for key in image_set.keys()]

        def needed_bytes() -> int:
            grids = [store.manifest.images[key].grid for key in set(keys)]
            return sum(shard_bytes(grid.rows, grid.cols, self.codes + 1) for grid in grids)

        with disk_errors(self.root, needed_bytes):
            if self.codes:
                with image_progress() as progress:
                    task = progress.add_task(f"PCA codes {self.name}", total=len(set(keys)))
                    store = build_codes(
                        store,
                        self._codes_root(store),
                        self.sets[0].keys(),
                        keys,
                        self.codes,
                        device,
                        lambda: progress.advance(task),
                    )
            path = self._display_path(store)
            if load_display(path, store.dim) is None:
                path.parent.mkdir(exist_ok=True)
                remove_temporaries(path.parent)
                save_display(path, fit_display(sample_patches(store, self.sets[0].keys())))

    def wait(self, world_size: int) -> None:
        """Waits for rank 0 to do all of the above."""

        def complete() -> bool:
            try:
                return look()
            except FeatureStoreError:
                # In the middle of a repair, unless nobody is at work.
                if not self.lock.is_held():
                    raise
                return False

        def look() -> bool:
            self.sets[0].index.refresh()
            for image_set in self.sets:
                image_set.look_up()
            # What the index cannot tell is decoded here, but only once rank 0 is done with it.
            if not self.lock.is_held() and self.full().manifest.images:
                for image_set in self.sets:
                    image_set.keys()
            return self.open() is not None

        wait_until(complete, self.lock, say_waiting(self.root, f"rank 0 of {world_size}"))

    def _codes_root(self, store: FeatureStore) -> Path:
        return codes_root(store, self._set_key(), self.codes)

    def _set_key(self) -> str:
        return set_key(self.sets[0].keys())

    def _display_path(self, store: FeatureStore) -> Path:
        return store.root / "display" / f"{self._set_key()}.json"

    def _spec(self, store: FeatureStore, basis: CodeBasis | None) -> tuple[FeatureSpec, FeatureStore] | None:
        display = load_display(self._display_path(store), store.dim)
        if display is None:
            return None
        spec = FeatureSpec(
            name=self.name,
            dim=store.dim,
            extractor=self.text,
            identity=dataclasses.asdict(self.identity),
            display=display,
            code_basis=None if basis is None else basis.rows,
            code_energy=1.0 if basis is None else basis.explained,
        )
        return spec, store


def prepare_features(
    datasets: Sequence[ImageDataset],
    options: FeatureOptions,
    *,
    device: torch.device | str,
    local_rank: int = 0,
    world_size: int = 1,
    repair: bool = False,
    build: BuildExtractor | None = None,
) -> list[FeatureSource]:
    """Sees to it that all images have their features, and opens them.

    What is missing is extracted (by local rank 0; the other ranks wait for it), PCA codes and display bases are
    made from the first data set's images, and the extractors are released again.

    Args:
        datasets: The training images first, then any others (evaluation), whose codes use the same basis.
        options: Which extractors, where, how many codes.
        device: Where extractors and PCA run.
        local_rank: Rank among the processes that share the cache folder's machine.
        world_size: How many processes there are; for messages.
        repair: Read every shard whole and extract damaged ones again, instead of raising.
        build: Builds an extractor from its text, as
            ``build(text, device=...)``; default :func:`f3rm_ext.features.extractors.registry.build_extractor`.

    Returns:
        One source per data set.

    Raises:
        FeatureStoreError: When a shard is damaged, the disk full, or rank 0 has failed.
        ExtractorError: When an extractor is unknown or cannot be set up.
        CaptureError: When an image cannot be read.
        ConfigError: When there are no images, or no fewer codes than dimensions.
    """
    if not datasets or len(datasets[0]) == 0:
        raise ConfigError("There are no training images to extract features of: check the capture and its split.")
    device = torch.device(device)
    cache = cache_root(options.cache_dir)
    index = ImageIndex(cache / INDEX_NAME)
    sets = [ImageSet(dataset, index) for dataset in datasets]
    opened = []
    for text, name in zip(options.extractors, head_names(options.extractors), strict=True):
        head = _prepare_head(
            build or _build_registered, text, name, options.codes, cache, sets, device, local_rank, world_size, repair
        )
        _release(device)
        opened.append(head)
    keys = [image_set.keys() if opened else [""] * len(image_set) for image_set in sets]
    specs, stores = [spec for spec, _ in opened], [store for _, store in opened]
    return [FeatureSource(specs, stores, set_keys) for set_keys in keys]


def open_features(
    datasets: Sequence[ImageDataset], specs: Sequence[FeatureSpec], cache_dir: Path | None
) -> list[FeatureSource] | None:
    """Opens features that were made before, by what a checkpoint says of them: no extractor and no weights needed.

    Args:
        datasets: The training images first, then any others.
        specs: What was distilled.
        cache_dir: See :class:`~f3rm_ext.features.options.FeatureOptions`.

    Returns:
        One source per data set; None where something is missing.

    Raises:
        FeatureStoreError: When a shard is damaged.
    """
    cache = cache_root(cache_dir)
    index = ImageIndex(cache / INDEX_NAME)
    sets = [ImageSet(dataset, index) for dataset in datasets]
    keys = [image_set.keys() for image_set in sets]
    opened = []
    for spec in specs:
        codes, dim = (0, spec.dim) if spec.code_basis is None else spec.code_basis.shape
        head = _Head(spec.extractor, spec.name, ExtractorIdentity(**spec.identity), dim, codes, cache, sets)
        found = head.open() if (head.root / MANIFEST_NAME).is_file() else None
        if found is None:
            return None
        opened.append(found)
    found_specs, stores = [spec for spec, _ in opened], [store for _, store in opened]
    return [FeatureSource(found_specs, stores, set_keys) for set_keys in keys]


def _build_registered(text: str, *, device: torch.device) -> Extractor:
    from f3rm_ext.features.extractors.registry import build_extractor

    return build_extractor(text, device=device)


def _prepare_head(
    build: BuildExtractor,
    text: str,
    name: str,
    codes: int,
    cache: Path,
    sets: Sequence[ImageSet],
    device: torch.device,
    local_rank: int,
    world_size: int,
    repair: bool,
) -> tuple[FeatureSpec, FeatureStore]:
    extractor = build(text, device=device if local_rank == 0 else torch.device("cpu"))
    head = _Head(text, name, extractor.identity, extractor.dim, codes, cache, sets)
    if local_rank != 0:
        del extractor
        head.wait(world_size)
    elif repair or head.open() is None:
        with disk_errors(head.root, lambda: 0), head.lock.hold(say_waiting(head.root, "another process")):
            for image_set in sets:
                image_set.index.refresh()
                image_set.look_up()
            head.extract(extractor, repair=repair)
            del extractor
            _release(device)
            head.derive(device)
    opened = head.open()
    if opened is None:
        raise FeatureStoreError(
            f"The features in {head.root} were changed while they were being made: run the same command again."
        )
    return opened


def _release(device: torch.device) -> None:
    """Gives the memory of a dropped extractor back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

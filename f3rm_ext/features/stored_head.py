"""The features that one extractor made of a capture: full features, PCA codes and display basis in one folder."""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from f3rm_ext.errors import FeatureStoreError
from f3rm_ext.features.base import Extractor, ExtractorIdentity
from f3rm_ext.features.display import fit_display, load_display, sample_patches, save_display
from f3rm_ext.features.pca_codes import build_codes, codes_root, load_basis, open_codes
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.features.store.extraction import disk_errors, extract_missing, pending, say_waiting, wait_until
from f3rm_ext.features.store.feature_store import FeatureStore, shard_bytes, store_root
from f3rm_ext.features.store.images import ImageSet, set_key
from f3rm_ext.features.store.manifest import MANIFEST_NAME
from f3rm_ext.utils.atomic_files import FolderLock, remove_temporaries
from f3rm_ext.utils.console import image_progress

_POLL_S = 0.2
_LATE_S = 60.0
"""Seconds that rank 0, after its own share, waits for a process that has not begun, before it takes over that share."""


@dataclass
class StoredHead:
    """One extractor's features of a capture: opens them in the store, makes them, or waits for another process."""

    text: str
    """The extractor as the user wrote it."""
    name: str
    identity: ExtractorIdentity
    dim: int
    """Dimension of the full features."""
    codes: int
    """Number of PCA codes; 0 for full features."""
    cache: Path
    """Folder of all feature stores."""
    sets: Sequence[ImageSet]
    """The training images first; PCA codes and display basis are fitted to them."""

    def __post_init__(self) -> None:
        self.root = store_root(self.cache, self.identity)
        self.lock = FolderLock(self.root / "lock")

    def full(self) -> FeatureStore:
        """Opens the store of the full features, as it is on the disk now."""
        return FeatureStore.open(self.root, dataclasses.asdict(self.identity), self.dim)

    def open(self) -> tuple[FeatureSpec, FeatureStore] | None:
        """Returns the spec and the store to distil; None if anything is missing.

        Raises:
            FeatureStoreError: Something is damaged or belongs to another model.
        """
        if any(key is None for image_set in self.sets for key in image_set.known_keys()):
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

    def extract(self, extractor: Extractor, *, repair: bool) -> None:
        """Extracts the full features that are missing. The caller must hold the lock.

        What the processes of a killed run left is taken over.
        """
        self._adopt(int(part.name) for part in (self.root / "parts").glob("[0-9]*"))
        extract_missing(extractor, self.full(), self.sets, name=self.name, repair=repair)

    def extract_share(self, extractor: Extractor, rank: int, ranks: int) -> None:
        """Extracts this process's share of what is missing, into a store of its own that rank 0 adopts."""
        part = self._part(rank)
        with disk_errors(part, lambda: 0), FolderLock(part / "lock").hold(say_waiting(part, "another process")):
            share = self._share(rank, ranks)
            if share:
                store = FeatureStore.open(part, dataclasses.asdict(self.identity), self.dim)
                extract_missing(extractor, store, self.sets, name=self.name, missing=share, show=False)

    def extract_with_others(self, extractor: Extractor, ranks: int) -> None:
        """Extracts the share of rank 0, adopts what the other processes extract, and extracts what is left.

        The caller must hold the lock.
        """
        self._adopt(range(1, ranks))
        share = self._share(0, ranks)
        if share:
            extract_missing(extractor, self.full(), self.sets, name=self.name, missing=share)
        start = quiet_since = time.monotonic()
        say = say_waiting(self.root, "the other processes")
        at_work = set(range(1, ranks))
        while True:
            at_work -= self._adopt(at_work)
            self.refresh()
            at_work = {rank for rank in at_work if self._share(rank, ranks)}
            now = time.monotonic()
            if any(FolderLock(self._part(rank) / "lock").is_held() for rank in at_work):
                quiet_since = now
            if not at_work or now - quiet_since > _LATE_S:
                break
            say(now - start)
            time.sleep(_POLL_S)
        self.extract(extractor, repair=False)

    def _part(self, rank: int) -> Path:
        return self.root / "parts" / str(rank)

    def _share(self, rank: int, ranks: int) -> list[tuple[ImageSet, int]]:
        """The images that a process extracts: each n-th one, whatever is there already, so that all agree."""
        numbers = {
            (id(image_set), i): number
            for number, (image_set, i) in enumerate((s, i) for s in self.sets for i in range(len(s)))
        }
        todo = pending(self.full(), self.sets, repair=False)
        return [(image_set, i) for image_set, i in todo if numbers[id(image_set), i] % ranks == rank]

    def _adopt(self, ranks: Iterable[int]) -> set[int]:
        """Takes over what other processes have extracted and returns the ranks of those that have finished."""
        ranks_done = set()
        for rank in ranks:
            part, lock = self._part(rank), FolderLock(self._part(rank) / "lock")
            if (part / MANIFEST_NAME).is_file() and not lock.is_held():
                with lock.hold():
                    self.full().adopt(FeatureStore.open(part, dataclasses.asdict(self.identity), self.dim))
                    (part / MANIFEST_NAME).unlink(missing_ok=True)
                ranks_done.add(rank)
        return ranks_done

    def derive(self, device: torch.device) -> None:
        """Makes PCA codes and display basis from the full features. The caller must hold the lock."""
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
        """Waits until rank 0 has extracted the features and made codes and display basis."""

        def complete() -> bool:
            try:
                self.refresh()
                # Decode the images that the index does not know, but only after rank 0 has finished.
                if not self.lock.is_held() and self.full().manifest.images:
                    for image_set in self.sets:
                        image_set.keys()
                return self.open() is not None
            except FeatureStoreError:
                # Rank 0 may be in the middle of a repair.
                if not self.lock.is_held():
                    raise
                return False

        wait_until(complete, self.lock, say_waiting(self.root, f"rank 0 of {world_size}"))

    def refresh(self) -> None:
        """Takes the keys of images that other processes have added to the index."""
        self.sets[0].index.refresh()
        for image_set in self.sets:
            image_set.look_up()

    def _codes_root(self, store: FeatureStore) -> Path:
        return codes_root(store, set_key(self.sets[0].keys()), self.codes)

    def _display_path(self, store: FeatureStore) -> Path:
        return store.root / "display" / f"{set_key(self.sets[0].keys())}.json"

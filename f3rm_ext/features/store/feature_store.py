"""The feature store: one memory-mapped fp16 shard per image and a JSON manifest. No pickle anywhere.

A store is a folder, ``<cache>/features/<extractor>-<identity key>/``::

    manifest.json            what is here (see manifest.py); the only thing that vouches for a shard
    shards/<image key>.npy   fp16, (rows, cols, D)
    codes/<set>-k<K>/        PCA codes, a store of its own (see codes.py)
    display/<set>.json       projection to RGB
    lock                     held by the process that writes

Shards and manifest are written under temporary names and renamed; the manifest is replaced after the shards of a
batch are on the disk. A process killed at any point therefore leaves a store that opens: what it had not entered
into the manifest yet (a batch at most) is deleted by the next writer and done again.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float16

from f3rm_ext.errors import FeatureStoreError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.store.manifest import MANIFEST_NAME, REDO, Manifest, ShardEntry, shard_name
from f3rm_ext.utils.atomic_files import digest_of, digest_of_file, remove_temporaries, sync_folder, write_atomic

SHARD_HEADER_BYTES = 128
ShardState = Literal["present", "missing", "damaged"]


@dataclass(frozen=True)
class Damage:
    """A shard that is not what the manifest says."""

    path: Path
    """The shard's file."""
    reason: str
    """What is wrong with it, as a clause."""


class FeatureStore:
    """The features of any number of images, of one extractor."""

    def __init__(self, root: Path, manifest: Manifest):
        self.root = root
        self.manifest = manifest
        self._verified: set[str] = set()

    @classmethod
    def open(cls, root: Path, identity: Mapping[str, str], dim: int, *, residual: bool = False) -> "FeatureStore":
        """Opens a store; where there is none it is empty. Nothing is written.

        Args:
            root: The store's folder.
            identity: Fields of the identity the store must have.
            dim: Feature dimension.
            residual: Whether shards have one more channel, the residual norm of PCA codes.

        Raises:
            FeatureStoreError: When the manifest is damaged or of another model.
        """
        manifest = Manifest.load(root)
        if manifest is None:
            manifest = Manifest(dict(identity), dim, residual)
        manifest.require(root, identity, dim, residual)
        return cls(root, manifest)

    @classmethod
    def at(cls, root: Path) -> "FeatureStore | None":
        """Opens whatever store is in a folder, None where there is none; for looking at it only."""
        manifest = Manifest.load(root)
        return None if manifest is None else cls(root, manifest)

    @property
    def dim(self) -> int:
        """Feature dimension."""
        return self.manifest.dim

    def __contains__(self, key: object) -> bool:
        return key in self.manifest.images

    def path(self, key: str) -> Path:
        """File of an image's shard."""
        return self.root / shard_name(key)

    # Writing: only for who holds the lock.

    def recover(self) -> int:
        """Deletes what a killed writer left: temporary files, and shards that the manifest does not vouch for.

        Returns:
            How many files were deleted.
        """
        shards = self.root / "shards"
        shards.mkdir(parents=True, exist_ok=True)
        count = remove_temporaries(self.root) + remove_temporaries(shards)
        for path in shards.glob("*.npy"):
            if path.stem not in self.manifest.images:
                path.unlink(missing_ok=True)
                count += 1
        return count

    def put(
        self, key: str, values: Float16[np.ndarray, "rows cols channels"], grid: PatchGrid, image_hw: tuple[int, int]
    ) -> None:
        """Writes one shard. It counts from the next :meth:`commit` on."""
        if values.shape != (grid.rows, grid.cols, self.manifest.channels):
            raise ValueError(f"values of shape {values.shape} do not fit {grid} with {self.manifest.channels} channels")
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.ascontiguousarray(values), allow_pickle=False)
        data = buffer.getvalue()
        self.path(key).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(key), data, sync_parent=False)
        self._verified.discard(key)
        self.manifest.images[key] = ShardEntry(len(data), digest_of(data), grid, image_hw[0], image_hw[1])

    def commit(self) -> None:
        """Enters the shards written so far into the manifest on the disk."""
        sync_folder(self.root / "shards")
        self.manifest.save(self.root)

    # Reading.

    def state(self, key: str) -> ShardState:
        """Whether the shard of an image is there, judged by its size alone (cheap)."""
        entry = self.manifest.images.get(key)
        if entry is None:
            return "missing"
        try:
            size = self.path(key).stat().st_size
        except FileNotFoundError:
            return "missing"
        return "present" if size == entry.bytes else "damaged"

    def damage(self, key: str) -> Damage | None:
        """What is wrong with a shard of the manifest, read whole; None when it is intact."""
        entry, path = self.manifest.images[key], self.path(key)
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                kind = "truncated" if size < entry.bytes else "altered"
                return Damage(path, f"is {kind}: it has {size} bytes where its manifest says {entry.bytes}")
            if digest_of_file(path) != entry.blake2b:
                return Damage(path, "was altered or is of another image or model: its hash is not the manifest's")
        except FileNotFoundError:
            return Damage(path, "is missing")
        except OSError as error:
            return Damage(path, f"cannot be read ({error})")
        return None

    def require(self, keys: Iterable[str]) -> None:
        """Raises FeatureStoreError unless the shards of these images are there with the right size."""
        for key in keys:
            if key not in self.manifest.images:
                raise FeatureStoreError(
                    f"The feature store {self.root} has no features of image {key}: {REDO.split(',')[0]}."
                )
            if self.state(key) != "present":
                self._raise(self.damage(key))

    def verify(self, keys: Iterable[str] | None = None) -> Iterator[Damage]:
        """Reads shards whole (all of them by default) and yields those that are not what the manifest says."""
        for key in self.manifest.images if keys is None else keys:
            damage = self.damage(key)
            if damage is not None:
                yield damage

    def load(self, key: str) -> FeatureMap:
        """Maps the features of an image. The content is checked the first time.

        Safe to call from several threads. The map stays valid when the shard is replaced meanwhile.

        Raises:
            FeatureStoreError: When the shard is missing, truncated, altered, or not what the manifest says.
        """
        self.require((key,))
        if key not in self._verified:
            self._raise(self.damage(key))
        entry = self.manifest.images[key]
        shape = (entry.grid.rows, entry.grid.cols, self.manifest.channels)
        try:
            values = np.load(self.path(key), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            self._raise(Damage(self.path(key), f"cannot be mapped ({error})"))
            raise
        if not isinstance(values, np.memmap) or values.shape != shape or values.dtype != np.float16:
            self._raise(Damage(self.path(key), f"is not a float16 array of shape {shape}"))
        self._verified.add(key)
        if not self.manifest.residual:
            return FeatureMap(values, entry.grid)
        return FeatureMap(values[..., : self.dim], entry.grid, values[..., self.dim])

    def bytes_on_disk(self) -> int:
        """Size of the shards and the manifest."""
        manifest = self.root / MANIFEST_NAME
        size = manifest.stat().st_size if manifest.exists() else 0
        return size + sum(entry.bytes for entry in self.manifest.images.values())

    def _raise(self, damage: Damage | None) -> None:
        if damage is not None:
            raise FeatureStoreError(f"The feature shard {damage.path} {damage.reason}; {REDO}.")


def shard_bytes(rows: int, cols: int, channels: int) -> int:
    """Size of a shard's file, to estimate the space needed."""
    return SHARD_HEADER_BYTES + 2 * rows * cols * channels

"""The feature store: one memory-mapped fp16 shard per image and a JSON manifest. No pickle anywhere.

A store is a folder, ``<cache>/features/<extractor>-<identity key>/``::

    manifest.json            what is here (see manifest.py); the only thing that vouches for a shard
    shards/<image key>.npy   fp16, (rows, cols, D)
    codes/<set>-k<K>/        PCA codes, a store of its own (see pca_codes.py)
    parts/<rank>/            what another process of a run extracts, a store of its own until rank 0 adopts it
    display/<set>.json       projection to RGB (see display.py)
    lock                     held by the process that writes

Shards and manifest are written under temporary names and then renamed. The manifest is replaced once the shards of a
batch are on the disk. A process killed at any point therefore leaves a store that opens: the next writer deletes the
shards that had not been entered into the manifest (at most one batch) and makes them again.
"""

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float16

from f3rm_ext.errors import FeatureStoreError
from f3rm_ext.features.base import ExtractorIdentity, FeatureMap, PatchGrid
from f3rm_ext.features.store.manifest import EXTRACT_AGAIN, MANIFEST_NAME, Manifest, ShardEntry, shard_name
from f3rm_ext.utils.atomic_files import hash_bytes, hash_file, remove_temporaries, sync_folder, write_atomic
from f3rm_ext.utils.kernel_cache import user_cache

SHARD_HEADER_BYTES = 128
ShardState = Literal["present", "missing", "damaged"]


def cache_root(cache_dir: Path | None, kind: str = "features") -> Path:
    """Returns the folder of all feature stores, or of what else is kept: ``features`` in the given folder.

    Without one, it is in that of :func:`~f3rm_ext.utils.kernel_cache.user_cache`, whose errors it raises.
    """
    return (cache_dir.expanduser() if cache_dir else user_cache()) / kind


def store_root(cache: Path, identity: ExtractorIdentity) -> Path:
    return cache / f"{plain_name(identity.extractor)}-{identity.key()}"


def plain_name(text: str) -> str:
    """Replaces what does not belong in a file or parameter name by underscores.

    >>> plain_name("my.own")
    'my_own'
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text)


@dataclass(frozen=True)
class Damage:
    """A shard that differs from its entry in the manifest."""

    path: Path
    reason: str
    """Reason, as a clause."""


class FeatureStore:
    """The features that one extractor made of any number of images."""

    def __init__(self, root: Path, manifest: Manifest):
        self.root = root
        self.manifest = manifest
        self._verified: set[str] = set()

    @classmethod
    def open(cls, root: Path, identity: Mapping[str, str], dim: int, *, residual: bool = False) -> "FeatureStore":
        """Opens a store, which is empty if the folder does not exist. Writes nothing.

        With ``residual``, shards have one more channel, the residual norm of PCA codes.

        Raises:
            FeatureStoreError: The manifest is damaged or belongs to another model.
        """
        manifest = Manifest.load(root) or Manifest(dict(identity), dim, residual)
        manifest.require(root, identity, dim, residual)
        return cls(root, manifest)

    @classmethod
    def at(cls, root: Path) -> "FeatureStore | None":
        """Opens whatever store a folder holds, for reading; returns None if it holds none."""
        manifest = Manifest.load(root)
        return None if manifest is None else cls(root, manifest)

    @property
    def dim(self) -> int:
        return self.manifest.dim

    def __contains__(self, key: object) -> bool:
        return key in self.manifest.images

    def path(self, key: str) -> Path:
        return self.root / shard_name(key)

    # Writing, which requires the lock.

    def recover(self) -> None:
        """Deletes what a killed writer left: temporary files and shards that are not listed."""
        shards = self.root / "shards"
        shards.mkdir(parents=True, exist_ok=True)
        remove_temporaries(self.root)
        remove_temporaries(shards)
        for path in shards.glob("*.npy"):
            if path.stem not in self.manifest.images:
                path.unlink(missing_ok=True)

    def adopt(self, other: "FeatureStore") -> None:
        """Takes over the shards of another store of the same extractor and commits them.

        A process killed meanwhile leaves two stores that open; shards that had been moved are made again.
        """
        missing = [key for key in other.manifest.images if key not in self and other.state(key) == "present"]
        for key in missing:
            self.path(key).parent.mkdir(parents=True, exist_ok=True)
            os.replace(other.path(key), self.path(key))
            self.manifest.images[key] = other.manifest.images[key]
            self._verified.discard(key)
        if missing:
            self.commit()

    def put(
        self, key: str, values: Float16[np.ndarray, "rows cols channels"], grid: PatchGrid, image_hw: tuple[int, int]
    ) -> None:
        """Writes one shard, which becomes part of the store at the next :meth:`commit`.

        A residual norm is the last channel. Raises ValueError if the values do not fit the grid.
        """
        if values.shape != (grid.rows, grid.cols, self.manifest.channels):
            raise ValueError(f"values of shape {values.shape} do not fit {grid} with {self.manifest.channels} channels")
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.ascontiguousarray(values), allow_pickle=False)
        data = buffer.getvalue()
        self.path(key).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(key), data, sync_parent=False)
        self._verified.discard(key)
        self.manifest.images[key] = ShardEntry(len(data), hash_bytes(data), grid, image_hw[0], image_hw[1])

    def commit(self) -> None:
        """Enters all shards written so far into the manifest on the disk."""
        sync_folder(self.root / "shards")
        self.manifest.save(self.root)

    # Reading.

    def state(self, key: str) -> ShardState:
        """Tells whether the shard of an image is there, by its size alone (cheap)."""
        entry = self.manifest.images.get(key)
        if entry is None:
            return "missing"
        try:
            size = self.path(key).stat().st_size
        except FileNotFoundError:
            return "missing"
        return "present" if size == entry.bytes else "damaged"

    def damage(self, key: str) -> Damage | None:
        """Reads a shard of the manifest whole and returns what is wrong with it; None if it is intact."""
        entry, path = self.manifest.images[key], self.path(key)
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                kind = "truncated" if size < entry.bytes else "altered"
                return Damage(path, f"is {kind}: it has {size} bytes where its manifest says {entry.bytes}")
            if hash_file(path) != entry.blake2b:
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
                    f"The feature store {self.root} has no features of image {key}: {EXTRACT_AGAIN} to make them."
                )
            if self.state(key) != "present" and (damage := self.damage(key)) is not None:
                raise _damage_error(damage)

    def verify(self, keys: Iterable[str] | None = None) -> Iterator[Damage]:
        """Reads shards whole (all of them by default) and yields those that differ from the manifest."""
        yield from filter(None, map(self.damage, self.manifest.images if keys is None else keys))

    def load(self, key: str) -> FeatureMap:
        """Memory-maps the features of an image. The first call for an image checks the whole shard.

        Safe to call from several threads. The map stays valid if the shard is replaced afterwards.

        Raises:
            FeatureStoreError: The shard is missing, truncated or altered.
        """
        self.require((key,))
        if key not in self._verified and (damage := self.damage(key)) is not None:
            raise _damage_error(damage)
        entry = self.manifest.images[key]
        shape = (entry.grid.rows, entry.grid.cols, self.manifest.channels)
        try:
            values = np.load(self.path(key), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise _damage_error(Damage(self.path(key), f"cannot be mapped ({error})")) from error
        if not isinstance(values, np.memmap) or values.shape != shape or values.dtype != np.float16:
            raise _damage_error(Damage(self.path(key), f"is not a float16 array of shape {shape}"))
        self._verified.add(key)
        if not self.manifest.residual:
            return FeatureMap(values, entry.grid)
        return FeatureMap(values[..., : self.dim], entry.grid, values[..., self.dim])

    def bytes_on_disk(self) -> int:
        """Returns the size of the shards and the manifest."""
        manifest = self.root / MANIFEST_NAME
        size = manifest.stat().st_size if manifest.exists() else 0
        return size + sum(entry.bytes for entry in self.manifest.images.values())


def _damage_error(damage: Damage) -> FeatureStoreError:
    return FeatureStoreError(
        f"The feature shard {damage.path} {damage.reason}; {EXTRACT_AGAIN} to redo it, or delete the file."
    )


def shard_bytes(rows: int, cols: int, channels: int) -> int:
    """Returns the size of a shard's file, for estimates of the space needed.

    >>> shard_bytes(rows=24, cols=36, channels=768)
    1327232
    """
    return SHARD_HEADER_BYTES + 2 * rows * cols * channels

"""The manifest of a feature store: which features it holds, which model made them, and the hash of each file."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from f3rm_ext.errors import FeatureStoreError
from f3rm_ext.features.base import PatchGrid
from f3rm_ext.utils.atomic_files import write_atomic

FORMAT = 1
MANIFEST_NAME = "manifest.json"
EXTRACT = "run `f3rm-ext features extract`"
EXTRACT_AGAIN = f"{EXTRACT} on this capture with the same options"


@dataclass(frozen=True)
class ShardEntry:
    """The manifest's entry for the features of one image."""

    bytes: int
    """Size of the shard's file."""
    blake2b: str
    """Hash of the shard's file, 32 hex digits."""
    grid: PatchGrid
    height_px: int
    width_px: int

    def to_json(self, key: str) -> dict[str, Any]:
        return {
            "file": shard_name(key),
            "bytes": self.bytes,
            "blake2b": self.blake2b,
            **dataclasses.asdict(self.grid),
            "height_px": self.height_px,
            "width_px": self.width_px,
        }

    @classmethod
    def from_json(cls, key: str, raw: Mapping[str, Any]) -> "ShardEntry":
        """Reads an entry.

        Raises:
            KeyError, TypeError, ValueError: It is not a valid entry.
        """
        if raw["file"] != shard_name(key):
            raise ValueError(f"the file of {key} is said to be {raw['file']!r}")
        origin, stride = ((float(raw[name][0]), float(raw[name][1])) for name in ("origin_px", "stride_px"))
        grid = PatchGrid(rows=int(raw["rows"]), cols=int(raw["cols"]), origin_px=origin, stride_px=stride)
        if min(grid.rows, grid.cols) < 1 or min(grid.stride_px) <= 0:
            raise ValueError(f"the patch grid of {key} is empty")
        return cls(int(raw["bytes"]), str(raw["blake2b"]), grid, int(raw["height_px"]), int(raw["width_px"]))


def shard_name(key: str) -> str:
    """Returns the path of an image's shard within the store."""
    return f"shards/{key}.npy"


@dataclass
class Manifest:
    """The content of ``manifest.json``, which is always replaced as a whole."""

    identity: dict[str, str]
    """Fields of the extractor's identity; for PCA codes also their number and the hash of their basis."""
    dim: int
    residual: bool = False
    """Whether each shard has one more channel, the norm of what the PCA codes leave out."""
    images: dict[str, ShardEntry] = field(default_factory=dict)
    """Shards by image key."""

    @property
    def channels(self) -> int:
        """Numbers per patch in a shard."""
        return self.dim + int(self.residual)

    def save(self, root: Path) -> None:
        """Writes the manifest, whole or not at all."""
        raw = {
            "format": FORMAT,
            "identity": self.identity,
            "dim": self.dim,
            "residual": self.residual,
            "images": {key: entry.to_json(key) for key, entry in self.images.items()},
        }
        write_atomic(root / MANIFEST_NAME, json.dumps(raw, indent=0).encode())

    @classmethod
    def load(cls, root: Path) -> "Manifest | None":
        """Reads the manifest of a store; None if there is none yet.

        Raises:
            FeatureStoreError: The file is damaged, or was written by a newer version.
        """
        path = root / MANIFEST_NAME
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            raw = json.loads(text)
            version = int(raw["format"])
            if version > FORMAT:
                raise FeatureStoreError(
                    f"The feature store {root} was written by a newer f3rm-ext (format {version}, this one reads "
                    f"{FORMAT}): upgrade f3rm-ext, or choose another cache folder."
                )
            return cls(
                identity={str(name): str(value) for name, value in raw["identity"].items()},
                dim=int(raw["dim"]),
                residual=bool(raw["residual"]),
                images={key: ShardEntry.from_json(key, entry) for key, entry in raw["images"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise FeatureStoreError(
                f"The manifest {path} is damaged ({type(error).__name__}: {error}): delete it and run "
                "`f3rm-ext features extract` on the capture to make its features again."
            ) from error

    def require(self, root: Path, identity: Mapping[str, str], dim: int, residual: bool) -> None:
        """Raises FeatureStoreError unless the store holds features of this identity and dimension."""
        required = {**identity, "dim": str(dim), "residual": str(residual)}
        own = {**self.identity, "dim": str(self.dim), "residual": str(self.residual)}
        for name in required.keys() | own.keys():
            if required.get(name) != own.get(name):
                raise FeatureStoreError(
                    f"The feature store {root} belongs to another model ({name} is {own.get(name)!r} in its "
                    f"manifest, but {required.get(name)!r} is required): move or delete that folder, then run "
                    "`f3rm-ext features extract`."
                )

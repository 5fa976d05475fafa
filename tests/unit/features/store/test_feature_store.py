"""The feature store: what is written is read back, what is damaged is refused with the file's name."""

import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import f3rm_ext.features
from f3rm_ext.errors import FeatureStoreError
from f3rm_ext.features.base import PatchGrid
from f3rm_ext.features.store import feature_store
from f3rm_ext.features.store.feature_store import FeatureStore, shard_bytes
from f3rm_ext.utils import atomic_files as atomic

IDENTITY = {"extractor": "toy", "model": "one"}
DIM = 6
KEYS = tuple(letter * 32 for letter in "abc")


def values_of(number: int, rows: int, channels: int = DIM) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(rows, 4, channels)).astype(np.float16)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with three images of unequal sizes."""
    root = tmp_path / "store"
    store = FeatureStore.open(root, IDENTITY, DIM)
    for number, key in enumerate(KEYS):
        rows = number + 2
        store.put(key, values_of(number, rows), PatchGrid.covering(rows, 4, rows * 10, 50), (rows * 10, 50))
    store.commit()
    return root


def reopened(root: Path) -> FeatureStore:
    return FeatureStore.open(root, IDENTITY, DIM)


def test_reads_back_what_was_written(root: Path) -> None:
    store = reopened(root)
    for number, key in enumerate(KEYS):
        loaded = store.load(key)
        assert isinstance(loaded.values, np.memmap) and loaded.values.dtype == np.float16
        np.testing.assert_array_equal(loaded.values, values_of(number, number + 2))
        assert loaded.grid == PatchGrid.covering(number + 2, 4, (number + 2) * 10, 50)
        assert loaded.residual_norm is None
    assert list(store.verify()) == []


def test_shards_are_plain_npy_of_the_estimated_size(root: Path) -> None:
    path = root / "shards" / f"{KEYS[0]}.npy"
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), values_of(0, 2))
    assert path.stat().st_size == shard_bytes(2, 4, DIM)


def test_residual_is_the_last_channel(tmp_path: Path) -> None:
    store = FeatureStore.open(tmp_path, IDENTITY, DIM, residual=True)
    both = values_of(0, 3, DIM + 1)
    store.put(KEYS[0], both, PatchGrid.covering(3, 4, 30, 40), (30, 40))
    store.commit()
    loaded = FeatureStore.open(tmp_path, IDENTITY, DIM, residual=True).load(KEYS[0])
    np.testing.assert_array_equal(loaded.values, both[..., :DIM])
    np.testing.assert_array_equal(loaded.residual_norm, both[..., DIM])


def test_manifest_says_what_is_there(root: Path) -> None:
    raw = json.loads((root / "manifest.json").read_text())
    entry = raw["images"][KEYS[1]]
    assert raw["format"] == 1 and raw["identity"] == IDENTITY and raw["dim"] == DIM
    assert entry["file"] == f"shards/{KEYS[1]}.npy" and (entry["rows"], entry["cols"]) == (3, 4)
    assert entry["bytes"] == (root / entry["file"]).stat().st_size
    assert entry["blake2b"] == atomic.hash_file(root / entry["file"])
    assert (entry["height_px"], entry["width_px"]) == (30, 50)
    assert entry["origin_px"] == [5.0, 6.25] and entry["stride_px"] == [10.0, 12.5]


def test_wrong_shape_is_not_stored(tmp_path: Path) -> None:
    store = FeatureStore.open(tmp_path, IDENTITY, DIM)
    with pytest.raises(ValueError, match="do not fit"):
        store.put(KEYS[0], values_of(0, 3), PatchGrid.covering(2, 4, 20, 40), (20, 40))


def npy_of(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: data[:-7], "truncated"),
        (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "altered"),
        (lambda data: npy_of(values_of(99, 2)), "another image"),  # valid, of the same size
        (lambda data: pickle.dumps({"values": [1, 2, 3]}).ljust(len(data), b"\0"), "altered"),
        (lambda data: data + b"more", "altered"),
        (None, "missing"),
    ],
)
def test_damaged_shard_is_refused_by_name(root: Path, damage, word: str) -> None:
    path = root / "shards" / f"{KEYS[0]}.npy"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    store = reopened(root)
    with pytest.raises(FeatureStoreError) as caught:
        store.load(KEYS[0])
    message = str(caught.value)
    assert str(path) in message and word in message
    assert "f3rm-ext features extract" in message and "delete the file" in message
    assert [found.path for found in store.verify()] == [path]
    assert store.load(KEYS[1]).values.shape == (3, 4, DIM)  # the others are usable


def test_sizes_are_checked_before_anything_is_read(root: Path) -> None:
    store = reopened(root)
    store.require(KEYS)
    path = root / "shards" / f"{KEYS[2]}.npy"
    path.write_bytes(path.read_bytes()[:-7])
    assert [store.state(key) for key in KEYS] == ["present", "present", "damaged"]
    with pytest.raises(FeatureStoreError, match="truncated"):
        store.require(KEYS)
    with pytest.raises(FeatureStoreError, match="no features"):
        store.require(("d" * 32,))


def test_content_is_hashed_once_per_process(root: Path, watch_calls: Callable[..., Any]) -> None:
    hashed = watch_calls(feature_store, "hash_file")
    store = reopened(root)
    for _ in range(3):
        store.load(KEYS[0])
    assert [call.args for call in hashed] == [(root / "shards" / f"{KEYS[0]}.npy",)]


def test_loaded_map_survives_a_replaced_shard(root: Path) -> None:
    store = reopened(root)
    before = store.load(KEYS[0])
    store.put(KEYS[0], values_of(50, 2), before.grid, (20, 50))
    store.commit()
    np.testing.assert_array_equal(before.values, values_of(0, 2))
    np.testing.assert_array_equal(reopened(root).load(KEYS[0]).values, values_of(50, 2))


@pytest.mark.parametrize(
    ("identity", "dim", "residual", "word"),
    [
        ({**IDENTITY, "model": "two"}, DIM, False, "model"),
        ({**IDENTITY, "more": "x"}, DIM, False, "more"),
        (IDENTITY, DIM + 1, False, "dim"),
        (IDENTITY, DIM, True, "residual"),
    ],
)
def test_another_model_is_refused(root: Path, identity: dict, dim: int, residual: bool, word: str) -> None:
    with pytest.raises(FeatureStoreError, match=f"another model.*{word}"):
        FeatureStore.open(root, identity, dim, residual=residual)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b'{"format": 1}', b"[" * 100_000, pickle.dumps({"format": 1, "images": {}})]
)
def test_damaged_manifest_is_refused_by_name(root: Path, content: bytes) -> None:
    (root / "manifest.json").write_bytes(content)
    with pytest.raises(FeatureStoreError, match=re.escape(str(root / "manifest.json"))):
        reopened(root)


def change_manifest(root: Path, **changes: Any) -> None:
    """Changes the entry of the first image, and ``format``."""
    raw = json.loads((root / "manifest.json").read_text())
    raw["format"] = changes.pop("format", raw["format"])
    raw["images"][KEYS[0]] |= changes
    (root / "manifest.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("change", "word"), [({"file": "../../x.npy"}, "damaged"), ({"format": 99}, "newer f3rm-ext")])
def test_manifest_that_points_elsewhere_or_is_of_a_newer_format_is_refused(root: Path, change: dict, word: str) -> None:
    change_manifest(root, **change)
    with pytest.raises(FeatureStoreError, match=word):
        reopened(root)


@pytest.mark.parametrize(
    ("save", "word"),
    [
        (lambda file: np.save(file, np.array([{"a": 1}, None], dtype=object), allow_pickle=True), "cannot be mapped"),
        (lambda file: np.save(file, values_of(0, 2).astype(np.float32)), "not a float16 array"),
        (lambda file: np.savez(file, values_of(0, 2)), "not a float16 array"),
    ],
)
def test_other_arrays_are_refused_even_where_the_manifest_vouches_for_them(root: Path, save: Any, word: str) -> None:
    path = root / "shards" / f"{KEYS[0]}.npy"
    with open(path, "wb") as stream:
        save(stream)
    change_manifest(root, bytes=path.stat().st_size, blake2b=atomic.hash_file(path))
    with pytest.raises(FeatureStoreError, match=word):
        reopened(root).load(KEYS[0])


def test_no_pickle_in_the_sources() -> None:
    """Neither in caches nor in weights."""
    for path in Path(f3rm_ext.features.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"pickle\.(load|dump|Pickler)|torch\.save\(|joblib|shelve|allow_pickle=True", text), (
            path.name
        )
        for function, option in (("np", "allow_pickle=False"), ("torch", "weights_only=True")):
            for call in re.findall(rf"{function}\.load\([^\n]*", text):
                assert option in call, f"{path.name}: {call}"


def test_recover_removes_what_a_killed_writer_left(root: Path) -> None:
    leftovers = [
        root / "shards" / f".{KEYS[0]}.npy.123-abcd.tmp",
        root / ".manifest.json.9-ff.tmp",
        root / "shards" / f"{'f' * 32}.npy",  # renamed, but not in the manifest
    ]
    for path in leftovers:
        path.write_bytes(b"half")
    reopened(root).recover()
    assert not any(path.exists() for path in leftovers)
    assert list(reopened(root).verify()) == [] and len(reopened(root).manifest.images) == 3


def test_uncommitted_shard_does_not_count(root: Path) -> None:
    store = reopened(root)
    store.put("d" * 32, values_of(4, 2), PatchGrid.covering(2, 4, 20, 40), (20, 40))
    assert reopened(root).state("d" * 32) == "missing"
    store.commit()
    assert reopened(root).state("d" * 32) == "present"


def test_size_on_disk_counts_shards_and_manifest(root: Path) -> None:
    expected = sum(path.stat().st_size for path in [*(root / "shards").iterdir(), root / "manifest.json"])
    assert reopened(root).bytes_on_disk() == expected
    assert FeatureStore.at(root / "nowhere") is None

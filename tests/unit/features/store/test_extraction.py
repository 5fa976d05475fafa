"""Extraction: resumable after a kill at any point, done once whoever asks, clear when the disk is full."""

import errno
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.errors import CaptureError, ExtractorError, FeatureStoreError
from f3rm_ext.features.store import extraction
from f3rm_ext.features.store.feature_store import FeatureStore
from f3rm_ext.features.store.images import ImageIndex, ImageSet, image_key
from f3rm_ext.utils import atomic_files as atomic
from f3rm_ext.utils.atomic_files import FolderLock

pytestmark = pytest.mark.usefixtures("no_fsync", "quick_collection")

JOIN_S = 120


@pytest.fixture
def images(toy: ModuleType, tmp_path: Path) -> list[Path]:
    return toy.write_images(tmp_path / "images", 9)


def open_toy_store(toy: ModuleType, cache: Path) -> FeatureStore:
    extractor = toy.ToyExtractor()
    identity = extractor.identity
    return FeatureStore.open(cache / "features" / f"toy-{identity.key()}", vars(identity), extractor.dim)


def image_set(toy: ModuleType, paths: list[Path], tmp_path: Path) -> ImageSet:
    return ImageSet(toy.ToyDataset(paths), ImageIndex(tmp_path / "images.json"))


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_killed_again_and_again_it_completes_and_loses_a_batch_at_most(
    toy: ModuleType, start: Callable[..., Any], logged: Callable[[], list[str]], tmp_path: Path
) -> None:
    """SIGKILL at each kind of point: half-written shard or manifest, before and after fsync and rename."""
    images = toy.write_images(tmp_path / "more", 18)
    cache = tmp_path / "cache"
    committed: set[str] = set()
    extracted = 0
    # A batch of two shards has 5 points for each of its three files, and 2 for the folder.
    for kill_at in (0, 1, 3, 5, 8, 10, 13, 16, 17, 19, 22, 14, 4):
        process = start(images=images, kill_at=kill_at)
        process.join(JOIN_S)
        assert process.exitcode == -signal.SIGKILL
        store = open_toy_store(toy, cache)
        assert list(store.verify()) == []
        kept = set(store.manifest.images)
        assert kept >= committed, "finished images were lost"
        again = logged()[extracted:]
        assert not committed.intersection(again), "finished images were extracted again"
        assert len(again) - len(kept - committed) <= toy.ToyExtractor.batch_size, "more than a batch was lost"
        committed, extracted = kept, len(logged())
    assert 0 < len(committed) < len(images)
    process = start(images=images)
    process.join(JOIN_S)
    assert process.exitcode == 0
    store = open_toy_store(toy, cache)
    assert list(store.verify()) == [] and len(store.manifest.images) == len(images)
    assert not committed.intersection(logged()[extracted:])
    assert temporaries(cache) == []
    extractor, dataset = toy.ToyExtractor(), toy.ToyDataset(images)
    for i in range(len(images)):
        image = dataset.get_numpy_image(i)
        expected = extractor.extract([image])[0].numpy().astype(np.float16)
        np.testing.assert_array_equal(store.load(image_key(image)).values, expected)


def test_killed_while_codes_are_made_it_completes(
    toy: ModuleType, images: list[Path], start: Callable[..., Any], tmp_path: Path
) -> None:
    first = start(images=images)
    first.join(JOIN_S)
    assert first.exitcode == 0
    for kill_at in (0, 2, 5, 6, 9, 12, 20, 40):
        process = start(images=images, codes=8, kill_at=kill_at)
        process.join(JOIN_S)
        assert process.exitcode == -signal.SIGKILL
    last = start(images=images, codes=8)
    last.join(JOIN_S)
    assert last.exitcode == 0 and Path(last.done).read_text().count(", 8)") == len(images)
    assert temporaries(tmp_path / "cache") == []


def test_two_processes_extract_each_image_once(
    processes: Any, images: list[Path], start: Callable[..., Any], logged: Callable[[], list[str]]
) -> None:
    extracting, waiting = processes.Event(), processes.Event()
    first = start(images=images, extracting=extracting, wait_for=waiting)
    assert extracting.wait(JOIN_S)
    # The first one goes on once the second has found the lock taken.
    second = start(images=images, on_lock_checked=waiting)
    for process in (first, second):
        process.join(JOIN_S)
        assert process.exitcode == 0
    assert len(logged()) == len(images) and set(Counter(logged()).values()) == {1}
    assert Path(first.done).read_text() == Path(second.done).read_text()


def test_other_ranks_wait_for_rank_0(
    processes: Any, images: list[Path], start: Callable[..., Any], logged: Callable[[], list[str]]
) -> None:
    """For features and PCA codes, while rank 0 is in the middle of extracting."""
    waiting = processes.Event()
    zero_extracts = processes.Event()
    zero = start(images=images, codes=8, rank=0, world=2, extracting=zero_extracts, wait_for=waiting)
    assert zero_extracts.wait(JOIN_S)
    one = start(images=images, codes=8, rank=1, world=2, on_lock_checked=waiting)
    for process in (one, zero):
        process.join(JOIN_S)
        assert process.exitcode == 0
    assert len(logged()) == len(images)
    assert Path(one.done).read_text() == Path(zero.done).read_text()


def test_processes_of_a_run_share_the_work(
    processes: Any,
    toy: ModuleType,
    images: list[Path],
    start: Callable[..., Any],
    logged: Callable[[], list[str]],
    tmp_path: Path,
) -> None:
    """Each extracts its share; rank 0 begins late, when the other has done its own."""
    one_extracts = processes.Event()
    one = start(images=images, codes=8, rank=1, world=2, together=2, extracting=one_extracts, log=tmp_path / "one.txt")
    assert one_extracts.wait(JOIN_S)
    zero = start(images=images, codes=8, rank=0, world=2, together=2)
    for process in (one, zero):
        process.join(JOIN_S)
        assert process.exitcode == 0
    dataset = toy.ToyDataset(images)
    keys = [image_key(dataset.get_numpy_image(i)) for i in range(len(images))]
    shares = [logged(), (tmp_path / "one.txt").read_text().split()]
    assert [sorted(share) for share in shares] == [sorted(keys[0::2]), sorted(keys[1::2])]
    store = open_toy_store(toy, tmp_path / "cache")
    assert set(store.manifest.images) == set(keys) and list(store.verify()) == []
    assert Path(one.done).read_text() == Path(zero.done).read_text()
    assert temporaries(tmp_path / "cache") == []


def test_what_a_killed_process_of_a_run_has_extracted_is_kept(
    processes: Any,
    toy: ModuleType,
    images: list[Path],
    start: Callable[..., Any],
    logged: Callable[[], list[str]],
    tmp_path: Path,
) -> None:
    waits = processes.Event()
    one = start(images=images, rank=1, world=2, together=2, waits_for_first=waits, log=tmp_path / "one.txt")
    assert waits.wait(JOIN_S)
    one.kill()
    one.join(JOIN_S)
    zero = start(images=images)  # alone now, without sharing
    zero.join(JOIN_S)
    assert zero.exitcode == 0
    assert len(logged()) + len((tmp_path / "one.txt").read_text().split()) == len(images)
    assert len(open_toy_store(toy, tmp_path / "cache").manifest.images) == len(images)


def test_a_killed_holder_leaves_the_lock_free(
    processes: Any, images: list[Path], start: Callable[..., Any], toy: ModuleType, tmp_path: Path
) -> None:
    extracting, never = processes.Event(), processes.Event()
    process = start(images=images, extracting=extracting, wait_for=never)
    assert extracting.wait(JOIN_S)
    lock = FolderLock(open_toy_store(toy, tmp_path / "cache").root / "lock")
    assert lock.is_held()
    process.kill()
    process.join(JOIN_S)
    assert not lock.is_held()


def test_waiting_gives_up_when_nobody_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(extraction.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(extraction.time, "sleep", lambda seconds: None)
    said: list[float] = []
    with pytest.raises(FeatureStoreError, match="rank 0"):
        extraction.wait_until(lambda: False, FolderLock(tmp_path / "lock"), said.append)
    assert said and said[-1] <= 600


def test_waiting_says_so_now_and_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say = extraction.say_waiting(tmp_path, "rank 0 of 4")
    for waited_s in (0.0, 1.0, 29.0, 31.0, 40.0, 61.5):
        say(waited_s)
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("Waiting for rank 0 of 4") == 3 and "(62 s)" in text


def run(toy: ModuleType, store: FeatureStore, images: ImageSet, **options: Any) -> int:
    extractor = options.pop("extractor", None) or toy.ToyExtractor()
    return extraction.extract_missing(extractor, store, [images], name="toy", **options)


def test_extracts_only_what_is_missing(toy: ModuleType, images: list[Path], tmp_path: Path) -> None:
    assert run(toy, open_toy_store(toy, tmp_path), image_set(toy, images[:4], tmp_path)) == 4
    again = image_set(toy, images, tmp_path)
    assert run(toy, open_toy_store(toy, tmp_path), again) == 5
    assert set(again.dataset.decoded) == {4, 5, 6, 7, 8}, "known images were decoded again"
    assert run(toy, open_toy_store(toy, tmp_path), image_set(toy, images, tmp_path)) == 0


def test_same_pixels_under_two_names_are_extracted_once(toy: ModuleType, images: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "images" / "copy.png"
    shutil.copy(images[0], copy)
    log = tmp_path / "log.txt"
    paths = [copy, *images[:3], images[0]]
    assert (
        run(toy, open_toy_store(toy, tmp_path), image_set(toy, paths, tmp_path), extractor=toy.ToyExtractor(log)) == 3
    )
    assert len(log.read_text().split()) == 3


def test_memory_holds_two_batches(toy: ModuleType, images: list[Path], tmp_path: Path) -> None:
    """Decoding never runs further ahead than a batch."""
    images_of = image_set(toy, images, tmp_path)
    store = open_toy_store(toy, tmp_path)
    ahead: list[int] = []

    def before() -> None:
        ahead.append(len(images_of.dataset.decoded) - len(store.manifest.images))

    run(toy, store, images_of, extractor=toy.ToyExtractor(before=before))
    assert len(ahead) == 5 and max(ahead) <= 2 * toy.ToyExtractor.batch_size


def test_disk_full_says_what_is_needed_and_keeps_the_rest(
    toy: ModuleType, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_toy_store(toy, tmp_path)
    real, written = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal written
        written += 1
        if written > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(FeatureStoreError) as caught:
        run(toy, store, image_set(toy, images, tmp_path))
    message = str(caught.value)
    assert "disk is full" in message and str(store.root) in message and "MiB more" in message
    assert "--features.cache-dir" in message and "\n" not in message
    monkeypatch.undo()
    kept = open_toy_store(toy, tmp_path)
    assert len(kept.manifest.images) >= 2 and list(kept.verify()) == []
    assert temporaries(tmp_path) == []
    missing = len(images) - len(kept.manifest.images)
    assert run(toy, kept, image_set(toy, images, tmp_path)) == missing > 0
    assert len(open_toy_store(toy, tmp_path).manifest.images) == len(images)


def test_too_small_a_disk_is_refused_before_work_begins(
    toy: ModuleType, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(extraction.shutil, "disk_usage", lambda path: usage._replace(free=100))
    log = tmp_path / "log.txt"
    with pytest.raises(FeatureStoreError, match="need about"):
        run(toy, open_toy_store(toy, tmp_path), image_set(toy, images, tmp_path), extractor=toy.ToyExtractor(log))
    assert not log.exists()


def test_read_only_store_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(FeatureStoreError, match="cannot be written"), extraction.disk_errors(tmp_path, lambda: 0):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(OSError, match="weird"), extraction.disk_errors(tmp_path, lambda: 0):
        raise OSError(errno.EIO, "weird")


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    toy: ModuleType, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def before() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            toy,
            open_toy_store(toy, tmp_path),
            image_set(toy, images, tmp_path),
            extractor=toy.ToyExtractor(before=before),
        )
    store = open_toy_store(toy, tmp_path)
    assert len(store.manifest.images) == 4 and list(store.verify()) == []
    text = " ".join(capsys.readouterr().out.split())
    assert "4 of 9" in text


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_repair_makes_damaged_shards_again(
    toy: ModuleType, images: list[Path], tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_toy_store(toy, tmp_path)
    run(toy, store, image_set(toy, images, tmp_path))
    key = list(store.manifest.images)[3]
    path, good = store.path(key), store.path(key).read_bytes()
    {
        "truncate": lambda: path.write_bytes(good[:-1]),
        "flip": lambda: path.write_bytes(good[:-1] + bytes([good[-1] ^ 1])),
        "delete": path.unlink,
    }[damage]()
    log = tmp_path / "log.txt"
    capsys.readouterr()
    again = run(
        toy,
        open_toy_store(toy, tmp_path),
        image_set(toy, images, tmp_path),
        extractor=toy.ToyExtractor(log),
        repair=True,
    )
    assert again == 1 and log.read_text().split() == [key]
    assert path.read_bytes() == good and list(open_toy_store(toy, tmp_path).verify()) == []
    assert path.name in capsys.readouterr().out.replace("\n", "")


def test_without_repair_a_truncated_shard_is_an_error_and_a_deleted_one_is_made(
    toy: ModuleType, images: list[Path], tmp_path: Path
) -> None:
    store = open_toy_store(toy, tmp_path)
    run(toy, store, image_set(toy, images, tmp_path))
    path = store.path(next(iter(store.manifest.images)))
    path.write_bytes(b"")
    with pytest.raises(FeatureStoreError, match="truncated"):
        run(toy, open_toy_store(toy, tmp_path), image_set(toy, images, tmp_path))
    path.unlink()
    assert run(toy, open_toy_store(toy, tmp_path), image_set(toy, images, tmp_path)) == 1


class Broken:
    """An extractor with one thing wrong."""

    def __init__(self, toy: ModuleType, fault: str):
        self._toy, self.fault = toy.ToyExtractor(), fault
        self.identity, self.dim, self.batch_size = self._toy.identity, self._toy.dim, 2
        self.patch_grid = self._toy.patch_grid

    def extract(self, images: list[np.ndarray]) -> list[torch.Tensor]:
        maps = self._toy.extract(images)
        if self.fault == "count":
            return maps[:-1]
        if self.fault == "shape":
            return [values[:, :, :-1] for values in maps]
        return [values * float(self.fault) for values in maps]


@pytest.mark.parametrize(
    ("fault", "word"), [("count", "1 maps for 2"), ("shape", "of shape"), ("nan", "finite"), ("1e9", "finite")]
)
def test_extractors_that_break_their_contract_are_named(
    toy: ModuleType, images: list[Path], tmp_path: Path, fault: str, word: str
) -> None:
    with pytest.raises(ExtractorError, match=f"toy.*{word}"):
        run(
            toy,
            open_toy_store(toy, tmp_path),
            image_set(toy, images, tmp_path),
            extractor=Broken(toy, fault),
        )
    assert open_toy_store(toy, tmp_path).manifest.images == {}


def test_unreadable_image_is_named(toy: ModuleType, images: list[Path], tmp_path: Path) -> None:
    images[3].write_bytes(images[3].read_bytes()[:60])
    with pytest.raises(CaptureError, match=images[3].name):
        run(toy, open_toy_store(toy, tmp_path), image_set(toy, images, tmp_path))
    assert len(open_toy_store(toy, tmp_path).manifest.images) == 2, "what came before it is kept"


def test_an_extractor_that_needs_the_files_is_given_them(toy: ModuleType, images: list[Path], tmp_path: Path) -> None:
    class ByFile(toy.ToyExtractor):
        def extract(self, given: Any) -> list[torch.Tensor]:
            raise AssertionError("files are not told")

        def extract_files(self, given: Any, files: Any) -> list[torch.Tensor]:
            for pixels, file in zip(given, files, strict=True):
                np.testing.assert_array_equal(pixels, toy.ToyDataset([file]).get_numpy_image(0))
            asked.extend(files)
            return [self._one(pixels) for pixels in given]

    asked: list[Path] = []
    store = open_toy_store(toy, tmp_path / "cache")
    extraction.extract_missing(ByFile(), store, [image_set(toy, images, tmp_path)], name="toy")
    assert asked == images

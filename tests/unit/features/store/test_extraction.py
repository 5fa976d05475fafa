"""Extraction: resumable after a kill at any point, done once whoever asks, clear when the disk is full."""

import errno
import os
import shutil
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.errors import CaptureError, ExtractorError, FeatureStoreError
from f3rm_ext.features.extractors.registry import build_extractor
from f3rm_ext.features.store import extraction
from f3rm_ext.features.store.images import image_key
from f3rm_ext.utils import atomic_files as atomic
from f3rm_ext.utils.atomic_files import FolderLock

pytestmark = pytest.mark.usefixtures("no_fsync", "quick_collection")

JOIN_S = 120


@pytest.fixture
def images(lab) -> list[Path]:
    return lab.toy.write_images(lab.folder / "images", 9)


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def finish(*processes: Any) -> list[str]:
    """Waits for processes, which must end well; returns what they say of the features."""
    for process in processes:
        process.join(JOIN_S)
        assert process.exitcode == 0
    return [Path(process.done).read_text() for process in processes]


def end_killed(process: Any) -> None:
    process.join(JOIN_S)
    assert process.exitcode == -signal.SIGKILL


def test_an_image_that_is_too_small_is_named(lab, images):
    image_set = lab.image_set(images)
    image_set.dataset.cameras.height[3] = 20
    with pytest.raises(ExtractorError, match=f"{images[3].name}.*20x32"):
        extraction.extract_missing(
            build_extractor("dense-daisy", device=torch.device("cpu")), lab.store(), [image_set], name="daisy"
        )


def test_killed_again_and_again_it_completes_and_loses_a_batch_at_most(lab, start):
    """SIGKILL at each kind of point: half-written shard or manifest, before and after fsync and rename."""
    images = lab.toy.write_images(lab.folder / "more", 18)
    committed: set[str] = set()
    extracted = 0
    # A batch of two shards has 5 points for each of its three files, and 2 for the folder.
    for kill_at in (0, 1, 3, 5, 8, 10, 13, 16, 17, 19, 22, 14, 4):
        end_killed(start(images=images, kill_at=kill_at))
        store = lab.store()
        assert list(store.verify()) == []
        kept = set(store.manifest.images)
        assert kept >= committed, "finished images were lost"
        again = lab.logged()[extracted:]
        assert not committed.intersection(again), "finished images were extracted again"
        assert len(again) - len(kept - committed) <= lab.toy.ToyExtractor.batch_size, "more than a batch was lost"
        committed, extracted = kept, len(lab.logged())
    assert 0 < len(committed) < len(images)
    finish(start(images=images))
    store = lab.store()
    assert list(store.verify()) == [] and len(store.manifest.images) == len(images)
    assert not committed.intersection(lab.logged()[extracted:])
    assert temporaries(lab.cache) == []
    extractor, dataset = lab.toy.ToyExtractor(), lab.toy.ToyDataset(images)
    for i in range(len(images)):
        image = dataset.get_numpy_image(i)
        expected = extractor.extract([image])[0].numpy().astype(np.float16)
        np.testing.assert_array_equal(store.load(image_key(image)).values, expected)


def test_killed_while_codes_are_made_it_completes(lab, images, start):
    finish(start(images=images))
    for kill_at in (0, 2, 5, 6, 9, 12, 20, 40):
        end_killed(start(images=images, codes=8, kill_at=kill_at))
    (found,) = finish(start(images=images, codes=8))
    assert found.count(", 8)") == len(images)
    assert temporaries(lab.cache) == []


def test_two_processes_extract_each_image_once(lab, processes, images, start):
    extracting, waiting = processes.Event(), processes.Event()
    first = start(images=images, extracting=extracting, wait_for=waiting)
    assert extracting.wait(JOIN_S)
    # The first one goes on once the second has found the lock taken.
    second = start(images=images, on_lock_checked=waiting)
    assert len(set(finish(first, second))) == 1
    assert len(lab.logged()) == len(set(lab.logged())) == len(images)


def test_other_ranks_wait_for_rank_0(lab, processes, images, start):
    """For features and PCA codes, while rank 0 is in the middle of extracting."""
    waiting = processes.Event()
    zero_extracts = processes.Event()
    zero = start(images=images, codes=8, rank=0, world=2, extracting=zero_extracts, wait_for=waiting)
    assert zero_extracts.wait(JOIN_S)
    one = start(images=images, codes=8, rank=1, world=2, on_lock_checked=waiting)
    assert len(set(finish(one, zero))) == 1 and len(lab.logged()) == len(images)


def test_processes_of_a_run_share_the_work(lab, processes, images, start):
    """Each extracts its share; rank 0 begins late, when the other has done its own."""
    one_extracts = processes.Event()
    one = start(
        images=images, codes=8, rank=1, world=2, together=2, extracting=one_extracts, log=lab.folder / "one.txt"
    )
    assert one_extracts.wait(JOIN_S)
    zero = start(images=images, codes=8, rank=0, world=2, together=2)
    assert len(set(finish(one, zero))) == 1
    dataset = lab.toy.ToyDataset(images)
    keys = [image_key(dataset.get_numpy_image(i)) for i in range(len(images))]
    shares = [lab.logged(), (lab.folder / "one.txt").read_text().split()]
    assert [sorted(share) for share in shares] == [sorted(keys[0::2]), sorted(keys[1::2])]
    store = lab.store()
    assert set(store.manifest.images) == set(keys) and list(store.verify()) == []
    assert temporaries(lab.cache) == []


def test_what_a_killed_process_of_a_run_has_extracted_is_kept(lab, processes, images, start):
    waits = processes.Event()
    one = start(images=images, rank=1, world=2, together=2, waits_for_first=waits, log=lab.folder / "one.txt")
    assert waits.wait(JOIN_S)
    one.kill()
    one.join(JOIN_S)
    finish(start(images=images))  # alone now, without sharing
    assert len(lab.logged()) + len((lab.folder / "one.txt").read_text().split()) == len(images)
    assert len(lab.store().manifest.images) == len(images)


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


def test_extracts_only_what_is_missing(lab, images):
    assert lab.extract(images[:4]) == 4
    again = lab.image_set(images)
    assert extraction.extract_missing(lab.toy.ToyExtractor(), lab.store(), [again], name="toy") == 5
    assert set(again.dataset.decoded) == {4, 5, 6, 7, 8}, "known images were decoded again"
    assert lab.extract(images) == 0


def test_same_pixels_under_two_names_are_extracted_once(lab, images):
    copy = lab.folder / "images" / "copy.png"
    shutil.copy(images[0], copy)
    assert lab.extract([copy, *images[:3], images[0]]) == 3 == len(lab.logged())


def test_memory_holds_two_batches(lab, images):
    """Decoding never runs further ahead than a batch."""
    images_of, store = lab.image_set(images), lab.store()
    ahead: list[int] = []

    def before() -> None:
        ahead.append(len(images_of.dataset.decoded) - len(store.manifest.images))

    extraction.extract_missing(lab.toy.ToyExtractor(before=before), store, [images_of], name="toy")
    assert len(ahead) == 5 and max(ahead) <= 2 * lab.toy.ToyExtractor.batch_size


def test_disk_full_says_what_is_needed_and_keeps_the_rest(lab, images, monkeypatch):
    real, written = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal written
        written += 1
        if written > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(FeatureStoreError) as caught:
        lab.extract(images)
    for part in ("disk is full", str(lab.store().root), "--features.cache-dir"):
        assert part in str(caught.value)
    monkeypatch.undo()
    kept = lab.store()
    assert len(kept.manifest.images) >= 2 and list(kept.verify()) == []
    assert temporaries(lab.folder) == []
    missing = len(images) - len(kept.manifest.images)
    assert lab.extract(images) == missing > 0
    assert len(lab.store().manifest.images) == len(images)


def test_too_small_a_disk_is_refused_before_work_begins(lab, images, set_free_space):
    set_free_space(100)
    with pytest.raises(FeatureStoreError, match="need about"):
        lab.extract(images)
    assert not lab.logged()


def test_read_only_store_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(FeatureStoreError, match="cannot be written"), extraction.disk_errors(tmp_path, lambda: 0):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(OSError, match="weird"), extraction.disk_errors(tmp_path, lambda: 0):
        raise OSError(errno.EIO, "weird")


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(lab, images, capsys):
    calls = 0

    def before() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.extract(images, lab.toy.ToyExtractor(before=before))
    store = lab.store()
    assert len(store.manifest.images) == 4 and list(store.verify()) == []
    assert "4 of 9" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_repair_makes_damaged_shards_again(lab, images, damage, capsys):
    lab.extract(images)
    store = lab.store()
    key = list(store.manifest.images)[3]
    path, good = store.path(key), store.path(key).read_bytes()
    {
        "truncate": lambda: path.write_bytes(good[:-1]),
        "flip": lambda: path.write_bytes(good[:-1] + bytes([good[-1] ^ 1])),
        "delete": path.unlink,
    }[damage]()
    capsys.readouterr()
    assert lab.extract(images, repair=True) == 1 and lab.logged()[len(images) :] == [key]
    assert path.read_bytes() == good and list(lab.store().verify()) == []
    assert path.name in capsys.readouterr().out.replace("\n", "")


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
def test_extractors_that_break_their_contract_are_named(lab, images, fault, word):
    with pytest.raises(ExtractorError, match=f"toy.*{word}"):
        lab.extract(images, Broken(lab.toy, fault))
    assert lab.store().manifest.images == {}


def test_unreadable_image_is_named(lab, images):
    images[3].write_bytes(images[3].read_bytes()[:60])
    with pytest.raises(CaptureError, match=images[3].name):
        lab.extract(images)
    assert len(lab.store().manifest.images) == 2, "what came before it is kept"


def test_an_extractor_that_needs_the_files_is_given_them(lab, images):
    class ByFile(lab.toy.ToyExtractor):
        def extract(self, given: Any) -> list[torch.Tensor]:
            raise AssertionError("files are not told")

        def extract_files(self, given: Any, files: Any) -> list[torch.Tensor]:
            for pixels, file in zip(given, files, strict=True):
                np.testing.assert_array_equal(pixels, lab.toy.ToyDataset([file]).get_numpy_image(0))
            asked.extend(files)
            return [self._one(pixels) for pixels in given]

    asked: list[Path] = []
    lab.extract(images, ByFile())
    assert asked == images


def test_without_repair_a_truncated_shard_is_an_error_and_a_deleted_one_is_made(lab, images):
    lab.extract(images)
    store = lab.store()
    path = store.path(next(iter(store.manifest.images)))
    path.write_bytes(b"")
    with pytest.raises(FeatureStoreError, match="truncated"):
        lab.extract(images)
    path.unlink()
    assert lab.extract(images) == 1

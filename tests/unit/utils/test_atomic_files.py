"""Atomic writes keep the old file when they fail; a lock excludes others and is released."""

from collections.abc import Callable
from pathlib import Path

import pytest

from f3rm_ext.utils.atomic_files import FolderLock, write_atomic


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path: Path, fill_disk: Callable[[], None]) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    fill_disk()
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_lock_excludes_and_is_free_afterwards(tmp_path: Path) -> None:
    lock, other = FolderLock(tmp_path / "store" / "lock"), FolderLock(tmp_path / "store" / "lock")
    assert not lock.is_held()
    with lock.hold():
        assert other.is_held()

        def give_up(waited_s: float) -> None:
            raise TimeoutError

        with pytest.raises(TimeoutError), other.hold(give_up):
            pytest.fail("two holders")
    assert not other.is_held()
    with other.hold(give_up):
        pass

"""Files written in pieces, whole or not at all."""

import io
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.scripts.common import require_own_file
from f3rm_ext.utils.output_file import NpzWriter, replace_file

ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)


def test_arrays_and_chunks_are_what_numpy_reads(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "a.npz"
    with replace_file(path) as stream, NpzWriter(stream) as archive:
        archive.array("text", np.asarray("grüße"))
        archive.rows("rows", (10, 3), np.dtype(np.float16), iter([ROWS[:4], ROWS[4:4], ROWS[4:]]))
        archive.array("turned", ROWS.T)
    with np.load(path, allow_pickle=False) as found:
        assert str(found["text"]) == "grüße" and found["rows"].dtype == np.float16
        np.testing.assert_array_equal(found["rows"], ROWS)
        np.testing.assert_array_equal(found["turned"], ROWS.T)
    assert [file.name for file in path.parent.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("chunks", [[ROWS[:9]], [ROWS, ROWS[:1]], [ROWS[:, :2]]], ids=["few", "many", "narrow"])
def test_chunks_that_are_not_what_was_announced(chunks: list[np.ndarray]) -> None:
    with pytest.raises(ValueError), NpzWriter(io.BytesIO()) as archive:
        archive.rows("rows", (10, 3), np.dtype(np.float16), chunks)


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replace_file(path) as stream:
        stream.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(ConfigError, match=re.escape(str(tmp_path / "file"))),
        replace_file(tmp_path / "file" / "a"),
    ):
        pass


@contextmanager
def no_privileges() -> Iterator[None]:
    """Permissions count for root, too."""
    if os.getuid():
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.parametrize("mode", [0o000, 0o555], ids=["closed", "read-only"])
def test_a_folder_without_permission_is_named_before_the_work(mode: int, tmp_path: Path) -> None:
    require_own_file(tmp_path / "a.json", "f3rm-ext eval mesh")  # imports, for which it takes privileges
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, mode)
        for path in (Path(folder, "a.json"), Path(folder, "inside", "a.json")):
            with no_privileges(), pytest.raises(ConfigError, match=rf"{path} cannot be written"):
                require_own_file(path, "f3rm-ext eval mesh")

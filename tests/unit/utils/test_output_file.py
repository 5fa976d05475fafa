"""Files written in pieces, whole or not at all."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.output_file import NpzWriter, comments_of, replacing, require_ours
from f3rm_ext.utils.ply import write_ply

ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)


def npz(path: Path, provenance: str) -> Path:
    with replacing(path) as stream, NpzWriter(stream) as archive:
        archive.array("provenance", np.asarray(provenance))
    return path


def ply(path: Path, *comments: str) -> Path:
    with replacing(path) as stream:
        write_ply(stream, {"x": np.zeros(1, np.float32)}, comments)
    return path


def test_arrays_and_chunks_are_what_numpy_reads(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.npz"
    with replacing(path) as stream, NpzWriter(stream) as archive:
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
    with pytest.raises(RuntimeError), replacing(path) as stream:
        stream.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(ConfigError, match=r"cannot be written \(.*\): free some space"),
        replacing(tmp_path / "file" / "a"),
    ):
        pass


def test_ours_is_replaced(tmp_path: Path) -> None:
    require_ours(tmp_path / "none.ply", "us")
    require_ours(ply(tmp_path / "a.ply", "other", "made_by: us"), "us")
    require_ours(npz(tmp_path / "a.npz", json.dumps({"made_by": "us"})), "us")


def test_what_is_not_ours_is_not(tmp_path: Path) -> None:
    (tmp_path / "text.ply").write_text("notes")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 half an archive")
    (tmp_path / "folder.ply").mkdir()
    np.savez(tmp_path / "plain.npz", a=np.zeros(2))
    ply(tmp_path / "theirs.ply", "made_by: them")
    ply(tmp_path / "nobody.ply")
    npz(tmp_path / "list.npz", "[1]")
    files = list(tmp_path.iterdir())
    assert len(files) == 7
    for path in files:
        with pytest.raises(ConfigError, match="was not written by `us`"):
            require_ours(path, "us")


def test_provenance_as_comments() -> None:
    assert comments_of({"step": 3, "method": "m", "queries": [{"name": "ü"}]}) == [
        "step: 3",
        "method: m",
        'queries: [{"name": "\\u00fc"}]',
    ]

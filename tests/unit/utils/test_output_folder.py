"""The folder of answers: what is written, and what is left alone."""

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.embeddings import Embeddings, load_vectors, to_save
from f3rm_ext.query.video import Videos
from f3rm_ext.utils.output_folder import OutputFolder, file_names

RECORD = {"made_by": "f3rm-ext query", "step": 3, "queries": [{"name": "grüße"}]}
PICTURE = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


def folder(path: Path) -> OutputFolder:
    return OutputFolder(path, RECORD)


def test_names_of_files() -> None:
    given = ["blue mug", "blue/mug", "Blue Mug", "labels", "чашка", "..", "a" * 300, "0001.jpg:12,3"]
    names = file_names(given, taken=("labels",))
    assert names[:6] == ["blue_mug", "blue_mug_2", "Blue_Mug_3", "labels_2", "чашка", "query"]
    assert len(names[6]) == 60 and names[7] == "0001.jpg_12_3"


def test_everything_says_where_it_comes_from(tmp_path: Path) -> None:
    out = folder(tmp_path / "new" / "answers")
    out.plan(["a/b.png", "c.npz", "d.npy"])
    out.png("a/b.png", PICTURE)
    out.npz("c.npz", {"scores": np.ones((2, 2), np.float16)})
    out.npy("d.npy", np.zeros(3, np.float32))
    out.summary({"complete": True})
    with Image.open(out.folder / "a" / "b.png") as image:
        assert json.loads(image.info["f3rm-ext"]) == RECORD
        np.testing.assert_array_equal(np.asarray(image), PICTURE)
    with np.load(out.folder / "c.npz", allow_pickle=False) as found:
        assert json.loads(str(found["provenance"])) == RECORD and found["scores"].dtype == np.float16
    summary = json.loads((out.folder / "summary.json").read_text())
    assert summary["complete"] and summary["files"] == ["a/b.png", "c.npz", "d.npy"] and summary["step"] == 3
    assert np.load(out.folder / "d.npy", allow_pickle=False).shape == (3,)
    left = sorted(str(path.relative_to(out.folder)) for path in out.folder.rglob("*") if path.is_file())
    assert left == ["a/b.png", "c.npz", "d.npy", "summary.json"]


def test_our_own_files_are_replaced_also_those_of_an_unfinished_run(tmp_path: Path) -> None:
    first = folder(tmp_path)
    first.plan(["a.png"])
    first.png("a.png", PICTURE)
    second = folder(tmp_path)
    second.plan(["b.png"])
    second.png("b.png", PICTURE)
    third = folder(tmp_path)
    third.plan(["a.png", "b.png"])
    third.png("a.png", PICTURE[::-1])
    assert json.loads((tmp_path / "summary.json").read_text())["complete"] is False
    with Image.open(tmp_path / "a.png") as image:
        np.testing.assert_array_equal(np.asarray(image), PICTURE[::-1])


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "a.png").write_text("mine")
    out = folder(tmp_path)
    out.plan(["b.png"])
    with pytest.raises(ConfigError, match=r"a\.png is there already and was not written by `f3rm-ext query`"):
        folder(tmp_path).plan(["b.png", "a.png"])
    assert (tmp_path / "a.png").read_text() == "mine" and (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", ["notes", "[]", "{}", '{"made_by": "f3rm-ext demo", "files": []}'])
def test_a_summary_of_others(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match="will not be overwritten"):
        folder(tmp_path)
    assert (tmp_path / "summary.json").read_text() == content


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to \(.+\): choose another one with --out"):
        folder(tmp_path / "file" / "answers")


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from f3rm_ext.utils import output_folder as files

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    out = folder(tmp_path)
    monkeypatch.setattr(files, "write_atomic", full)
    with pytest.raises(ConfigError, match=r"a\.png cannot be written \(No space left on device\)"):
        out.png("a.png", PICTURE)


# --- vectors ---------------------------------------------------------------------------------------------------------


def test_saved_vectors_come_back(tmp_path: Path) -> None:
    given = Embeddings.of_full(torch.randn(2, 9, generator=torch.Generator().manual_seed(0)), ("a", "b"))
    np.save(tmp_path / "v.npy", to_save(given))
    torch.testing.assert_close(load_vectors(tmp_path / "v.npy", 9, None).values, given.values)


def test_saved_codes_come_back_with_what_they_leave_out(tmp_path: Path) -> None:
    basis = torch.linalg.qr(torch.randn(9, 4, generator=torch.Generator().manual_seed(1)))[0].T.contiguous()
    given = Embeddings.of_full(torch.randn(2, 9, generator=torch.Generator().manual_seed(0)), ("a", "b"), basis)
    assert (given.values.norm(dim=1) < 0.95).all()
    np.save(tmp_path / "v.npy", to_save(given))
    torch.testing.assert_close(load_vectors(tmp_path / "v.npy", 4, basis).values, given.values)


# --- videos ----------------------------------------------------------------------------------------------------------


def pictures_of(path: Path, fps: int) -> np.ndarray:
    with av.open(str(path)) as video:
        assert video.streams.video[0].base_rate == fps
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def test_videos(tmp_path: Path) -> None:
    out = folder(tmp_path)
    frames = np.zeros((3, 33, 65, 3), dtype=np.uint8)
    frames[1:, :, :, 0] = 255
    with Videos(out, {"a": "a.mp4", "b": "b.mp4"}, fps=10.0, comment='{"step": 3}') as videos:
        for frame in frames:
            videos.add({"a": frame, "b": frame[..., ::-1].copy()})
    a, b = (pictures_of(tmp_path / name, fps=10) for name in ("a.mp4", "b.mp4"))
    assert a.shape == (3, 32, 64, 3)
    assert a[2, 5, 5, 0] > 200 and a[0, 5, 5, 0] < 50 and b[2, 5, 5, 2] > 200 and b[2, 5, 5, 0] < 50
    assert b'{"step": 3}' in (tmp_path / "a.mp4").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "b.mp4"]


def test_no_half_videos(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), Videos(folder(tmp_path), {"a": "a.mp4"}, 10.0, "") as videos:
        videos.add({"a": np.zeros((32, 32, 3), dtype=np.uint8)})
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())

"""The folder of a command: what is written, and what is left alone."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.errors import ConfigError
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
    out = folder(tmp_path / "new" / "results")
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
    with pytest.raises(ConfigError, match=r"a\.png.*f3rm-ext query"):
        folder(tmp_path).plan(["b.png", "a.png"])
    assert (tmp_path / "a.png").read_text() == "mine" and (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", ["notes", "[]", "{}", '{"made_by": "f3rm-ext demo", "files": []}'])
def test_a_summary_of_others(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match=r"summary\.json"):
        folder(tmp_path)
    assert (tmp_path / "summary.json").read_text() == content


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"results.*--out"):
        folder(tmp_path / "file" / "results")


def test_a_disk_that_is_full(tmp_path: Path, fill_disk: Callable[[], None]) -> None:
    out = folder(tmp_path)
    fill_disk()
    with pytest.raises(ConfigError, match=r"a\.png.*No space left"):
        out.png("a.png", PICTURE)

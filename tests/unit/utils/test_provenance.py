"""Who may overwrite what: files and folders that say that the same command made them, and no others."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.output_file import NpzWriter, replace_file
from f3rm_ext.utils.ply import write_ply
from f3rm_ext.utils.provenance import (
    comment_lines,
    require_ours,
    require_own_folder,
    sign_gzip,
    sign_png,
    sign_text,
)


def npz(path: Path, provenance: str) -> None:
    with replace_file(path) as stream, NpzWriter(stream) as archive:
        archive.array("provenance", np.asarray(provenance))


def ply(path: Path, *comments: str) -> None:
    with replace_file(path) as stream:
        write_ply(stream, {"x": np.zeros(1, np.float32)}, comments)


def png(path: Path, *makers: str) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(stream, "PNG")
    data = stream.getvalue()
    for maker in makers:
        data = sign_png(data, {"made_by": maker, "note": "ü"})
    path.write_bytes(data)


WRITERS: dict[str, Callable[[Path, str], object]] = {
    ".npz": lambda path, maker: npz(path, json.dumps({"made_by": maker})),
    ".ply": lambda path, maker: ply(path, "other", f"made_by: {maker}"),
    ".obj": lambda path, maker: path.write_text(f"# made_by: {maker}\n# x: 1\nv 0 0 0\n"),
    ".mtl": lambda path, maker: path.write_text(f"# made_by: {maker}\n\nnewmtl a\n"),
    ".json": lambda path, maker: path.write_text(json.dumps({"made_by": maker, "psnr": 1})),
    ".md": lambda path, maker: path.write_bytes(sign_text("# Table\n", maker)),
    ".html": lambda path, maker: path.write_bytes(sign_text("<p>" + 9999 * "x", maker)),
    ".png": png,
    ".jgz": lambda path, maker: path.write_bytes(sign_gzip(b"[]", maker)),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_command_replaces_its_own_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    require_ours(path, "us")
    WRITERS[suffix](path, "us")
    require_ours(path, "us")
    require_ours(path, ("them", "us"))
    with pytest.raises(ConfigError, match="--table"):
        require_ours(path, "them", "--table")


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    for suffix in (*WRITERS, ".glb", ".txt", ""):
        (tmp_path / f"text{suffix}").write_text("made_by: us")
        (tmp_path / f"binary{suffix}").write_bytes(b"PK\x03\x04\x89PNG\xff half of something")
        (tmp_path / f"empty{suffix}").write_bytes(b"")
        (tmp_path / f"folder{suffix}").mkdir()
    png(tmp_path / "nobody.png")
    npz(tmp_path / "list.npz", "[1]")
    np.savez(tmp_path / "plain.npz", a=np.zeros(2))
    (tmp_path / "plain.jgz").write_bytes(gzip.compress(b"us"))
    (tmp_path / "other.ply").write_bytes(b"plywood")
    (tmp_path / "header.ply").write_bytes(b"ply\nformat ascii 1.0\ncomment made_by: us\nelement vertex 0\n")
    (tmp_path / "list.json").write_text('[{"made_by": "us"}]')
    (tmp_path / "deep.json").write_text(100_000 * "[")
    (tmp_path / "notes.md").write_bytes(sign_text("Figures", "us") + b"My notes on them.\n" * 20)
    for path in tmp_path.iterdir():
        with pytest.raises(ConfigError, match=path.name):
            require_ours(path, "us")


def test_a_signed_picture_is_the_same_picture(tmp_path: Path) -> None:
    png(tmp_path / "a.png", "us")
    with Image.open(tmp_path / "a.png") as image:
        image.load()
        assert image.size == (3, 2) and image.getpixel((2, 1)) == (1, 2, 3)


def test_a_folder_is_new_or_was_made_by_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert require_own_folder(folder, "run.json", "us") is None
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / ".run.json.1.tmp").touch()
    assert require_own_folder(folder, "run.json", "us") is None
    (folder / "photo.jpg").touch()
    with pytest.raises(ConfigError, match=r"photo\.jpg.*--data"):
        require_own_folder(folder, "run.json", "us", "--data")
    (folder / "run.json").write_text('{"made_by": "us", "steps": 3}')
    assert require_own_folder(folder, "run.json", "us") == {"made_by": "us", "steps": 3}
    for content in ('{"made_by": "them"}', "{", "[]", ""):
        (folder / "run.json").write_text(content)
        with pytest.raises(ConfigError, match=r"run\.json"):
            require_own_folder(folder, "run.json", "us")
    with pytest.raises(ConfigError, match="is a file"):
        require_own_folder(folder / "photo.jpg", "run.json", "us")


def test_provenance_as_comments() -> None:
    assert comment_lines({"step": 3, "method": "m", "queries": [{"name": "ü"}]}) == [
        "step: 3",
        "method: m",
        'queries: [{"name": "\\u00fc"}]',
    ]
    (line,) = comment_lines({"query": "ü\nmug " * 300})
    assert line.isascii() and "\n" not in line and len(line) == 1000

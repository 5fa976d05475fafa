"""Which format a file has, and what is written over."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from f3rm_ext.errors import ConfigError, SplatFileError
from f3rm_ext.splat.files import SUFFIXES, SplatInfo, formats, read_splats, write_splats
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.utils.output_file import replace_file
from f3rm_ext.utils.ply import write_ply

Make = Callable[..., Gaussians]
ALL = [f"a{suffix}" for suffix in SUFFIXES]
NAMES = [f"a{suffix}" for suffix, kind in SUFFIXES.items() if kind not in formats.WRITE_ONLY]
OURS = SplatInfo(comments=("made_by: f3rm-ext export splats",))


@pytest.mark.parametrize("name", NAMES)
def test_format_goes_by_the_name_when_written_and_by_the_content_when_read(
    name: str, make: Make, tmp_path: Path
) -> None:
    written = write_splats(tmp_path / name, make(), SplatInfo())
    assert written.format == SUFFIXES[name[1:]]
    other = tmp_path / ("b.splat" if name.endswith(".splat") else "b.bin")
    shutil.move(tmp_path / name, other)
    assert read_splats(other)[1].format == written.format


@pytest.mark.parametrize("name", ["a.gltf", "ply", "a", "a.ply.gz"])
def test_name_without_a_format(name: str, make: Make, tmp_path: Path) -> None:
    with pytest.raises(SplatFileError, match=rf"{name} .*\.compressed\.ply"):
        write_splats(tmp_path / name, make(), SplatInfo())


def test_files_that_hold_no_splats(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("notes")
    (tmp_path / "empty.ply").write_text("")
    (tmp_path / "folder.ply").mkdir()
    for name, message in (
        ("a.txt", "a.txt .*.compressed.ply, .ply, .spz, .sog, .splat"),
        ("empty.ply", "empty.ply "),
        ("folder.ply", "folder.ply .*Is a directory"),
        ("missing.ply", "missing.ply .*No such file"),
    ):
        with pytest.raises(SplatFileError, match=message):
            read_splats(tmp_path / name)


@pytest.mark.parametrize("name", [name for name in ALL if name != "a.splat"])
def test_ours_is_replaced(name: str, make: Make, tmp_path: Path) -> None:
    write_splats(tmp_path / name, make(6), OURS)
    whole = (tmp_path / name).read_bytes()
    for count in (5, 6):
        assert write_splats(tmp_path / name, make(count), OURS).count == count
    assert (tmp_path / name).read_bytes() == whole, "bytes do not depend on the time"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("maker", ["made_by: them", "made_by: f3rm-ext export features", "hello"])
def test_what_is_not_ours_stays(name: str, maker: str, make: Make, tmp_path: Path) -> None:
    """Also every ``.splat``, which cannot say whose it is."""
    write_splats(tmp_path / name, make(5), SplatInfo(comments=(maker,)))
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ConfigError, match="f3rm-ext export splats"):
        write_splats(tmp_path / name, make(6), OURS)
    assert (tmp_path / name).read_bytes() == before


def test_point_clouds_and_folders_stay(make: Make, tmp_path: Path) -> None:
    with replace_file(tmp_path / "a.ply") as stream:
        write_ply(stream, {"x": torch.zeros(1).numpy()}, ["made_by: f3rm-ext export features"])
    (tmp_path / "b.ply").mkdir()
    for name in ("a.ply", "b.ply"):
        with pytest.raises(ConfigError, match=name):
            write_splats(tmp_path / name, make(5), OURS)


@pytest.mark.parametrize("kind", SUFFIXES.values())
def test_stored_order_is_a_permutation_that_stays(kind: str, make: Make) -> None:
    gaussians = make(700)
    gaussians.means[10:20] = gaussians.means[10]
    order = formats.storage_order(gaussians, kind)  # type: ignore[arg-type]
    assert torch.equal(order.sort()[0], torch.arange(700))
    again = formats.storage_order(gaussians[order], kind)  # type: ignore[arg-type]
    assert torch.equal(again, torch.arange(700))

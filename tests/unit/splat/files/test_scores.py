"""Scores of queries in files of splats, and beside them."""

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.files import SUFFIXES, SplatInfo, convert_splats, read_splats, write_splats
from f3rm_ext.splat.files.formats import SCORED, WRITE_ONLY, require_replaceable
from f3rm_ext.splat.files.scores import GaussianScores, sidecar_path
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
READ = [f"a{suffix}" for suffix, kind in SUFFIXES.items() if kind not in WRITE_ONLY]
BESIDE = [f"a{suffix}" for suffix, kind in SUFFIXES.items() if kind not in SCORED]
MADE_BY = ("made_by: f3rm-ext export splats",)


@pytest.fixture
def scored(make: Make) -> tuple[Gaussians, SplatInfo]:
    """40 Gaussians; the score of "blue mug" is the rank of x, that of "blue-mug" its negative."""
    gaussians = make()
    rank = (gaussians.means[:, 0].argsort().argsort() / 40).numpy().astype(np.float32)
    scores = GaussianScores.of_queries({"blue mug": rank, "blue-mug": -rank}, threshold=0.5)
    return gaussians, SplatInfo(comments=MADE_BY, scores=scores)


def assert_follow(gaussians: Gaussians, scores: GaussianScores | None) -> None:
    """Checks that each Gaussian has its own scores, whatever the order."""
    assert scores is not None and scores.names == ("blue mug", "blue-mug")
    order = scores.scores[:, 0].argsort()
    assert (np.diff(gaussians.means[:, 0].numpy()[order]) > 0).all()
    np.testing.assert_array_equal(scores.scores[:, 1], -scores.scores[:, 0])
    np.testing.assert_array_equal(scores.labels, np.where(scores.scores[:, 0] >= 0.5, 0, -1))


@pytest.mark.parametrize("name", READ)
def test_scores_come_back(name: str, scored: tuple[Gaussians, SplatInfo], tmp_path: Path) -> None:
    written = write_splats(tmp_path / name, *scored)
    found, info = read_splats(tmp_path / name)
    assert_follow(found, info.scores)
    assert info.comments in (MADE_BY, ()) and info.notices == ()
    assert sidecar_path(tmp_path / name).exists() == (name in BESIDE)
    assert any(str(sidecar_path(tmp_path / name)) in line for line in written.notices) == (name in BESIDE)


@pytest.mark.parametrize("target", READ)
@pytest.mark.parametrize("source", READ)
def test_scores_are_carried_over(source: str, target: str, scored: tuple[Gaussians, SplatInfo], tmp_path: Path) -> None:
    write_splats(tmp_path / source, *scored)
    convert_splats(tmp_path / source, tmp_path / f"to-{target}")
    found, info = read_splats(tmp_path / f"to-{target}")
    assert_follow(found, info.scores)


def test_scores_of_gaussians_that_are_dropped_go_too(scored: tuple[Gaussians, SplatInfo], tmp_path: Path) -> None:
    gaussians, info = scored
    gaussians.scales[[3, 30]] = torch.nan
    write_splats(tmp_path / "a.compressed.ply", gaussians, info, bad_values="drop")
    found, info = read_splats(tmp_path / "a.compressed.ply")
    assert len(found) == 38
    assert_follow(found, info.scores)


def test_columns_are_named(scored: tuple[Gaussians, SplatInfo], tmp_path: Path) -> None:
    write_splats(tmp_path / "a.ply", *scored)
    head = (tmp_path / "a.ply").read_bytes().split(b"end_header")[0].decode()
    for line in ("property float score_blue_mug", "property float score_blue_mug_2", "property float label"):
        assert f"{line}\n" in head
    assert "comment score_blue_mug: blue mug\n" in head and "comment score_blue_mug_2: blue-mug\n" in head


def test_queries_in_another_script_come_back(scored: tuple[Gaussians, SplatInfo], tmp_path: Path) -> None:
    gaussians, info = scored
    assert info.scores is not None
    write_splats(tmp_path / "a.ply", gaussians, replace(info, scores=replace(info.scores, names=("猫", "犬"))))
    found, again = read_splats(tmp_path / "a.ply")
    assert again.scores is not None and not again.notices
    assert_follow(found, replace(again.scores, names=info.scores.names))


def test_columns_of_others_are_left_out(scored: tuple[Gaussians, SplatInfo], tmp_path: Path) -> None:
    """Columns that no comment explains may be anything."""
    write_splats(tmp_path / "a.ply", *scored)
    data = (tmp_path / "a.ply").read_bytes()
    (tmp_path / "a.ply").write_bytes(data.replace(b"comment score_", b"comment words_"))
    info = read_splats(tmp_path / "a.ply")[1]
    assert info.scores is None and "score_blue_mug, score_blue_mug_2, label" in info.notices[0]


def test_scores_of_another_file_are_left_out(scored: tuple[Gaussians, SplatInfo], tmp_path: Path) -> None:
    write_splats(tmp_path / "a.spz", *scored)
    write_splats(tmp_path / "a.spz", scored[0][:9], SplatInfo(comments=MADE_BY))
    _, info = read_splats(tmp_path / "a.spz")
    assert info.scores is None and "a.spz.queries.npz" in info.notices[0]


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("scores.npy", bytes(1_000_000))


def swapped(path: Path) -> None:
    """Scores of fewer Gaussians, of the right file."""
    with path.open("rb") as stream:
        arrays = dict(np.load(stream))
    np.savez(path, provenance=arrays["provenance"], scores=arrays["scores"][:-1], labels=arrays["labels"])


@pytest.mark.parametrize("spoil", [bomb, swapped, lambda path: path.write_bytes(b"words")])
def test_damaged_scores_are_left_out(
    spoil: Callable[[Path], object], scored: tuple[Gaussians, SplatInfo], tmp_path: Path
) -> None:
    write_splats(tmp_path / "a.splat", *scored)
    spoil(sidecar_path(tmp_path / "a.splat"))
    found, info = read_splats(tmp_path / "a.splat")
    assert len(found) == 40 and info.scores is None and "a.splat.queries.npz" in info.notices[0]


def test_scores_of_others_are_not_replaced(scored: tuple[Gaussians, SplatInfo], tmp_path: Path) -> None:
    beside = sidecar_path(tmp_path / "a.spz")
    write_splats(tmp_path / "a.spz", *scored)
    write_splats(tmp_path / "a.spz", *scored)
    beside.write_bytes(b"words")
    with pytest.raises(ConfigError, match=r"a\.spz\.queries\.npz"):
        write_splats(tmp_path / "a.spz", *scored)
    assert beside.read_bytes() == b"words"
    require_replaceable(tmp_path / "a.spz")

"""`f3rm-ext splats clean` as a user types it, on a run of splats with features and with floaters put into it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FAR, NEAR = slice(0, 5), 5
"""Gaussians that no view shows, and one that hangs before a camera."""


@pytest.fixture(scope="module")
def dirty(labelled_splats: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.yml of a copy of the run with floaters."""
    from f3rm_ext.data.pinhole_cameras import PinholeCameras
    from f3rm_ext.export.splats import load_splat_run

    views = PinholeCameras.of(load_splat_run(labelled_splats.config).manager.train_dataset.cameras)
    folder = tmp_path_factory.mktemp("dirty") / "e" / "sugar-ext-lite" / "t"
    shutil.copytree(labelled_splats.folder, folder)
    (file,) = folder.glob("nerfstudio_models/*.ckpt")
    content = torch.load(file, weights_only=True, map_location="cpu")
    values = {name: content["pipeline"][f"_model.gauss_params.{name}"] for name in ("means", "scales", "opacities")}
    values["means"][FAR] = torch.tensor([[60.0, 0.0, 0.0]]) + 5 * torch.eye(5, 3)
    values["means"][NEAR] = views.positions[0] + 0.3 * views.forward[0]
    values["scales"][: NEAR + 1] = -4.0
    values["opacities"][: NEAR + 1] = 3.0
    content["pipeline"]["_model.gauss_params.features_dc"][NEAR] = torch.tensor([5.0, -5.0, 5.0])
    torch.save(content, file)
    return folder / "config.yml"


@pytest.fixture(scope="module")
def clean(dirty: Path, run_command: Callable[..., Any]) -> tuple[Path, str]:
    """Folder of the run without floaters, and what the command said."""
    done = run_command("f3rm-ext", "splats", "clean", "--load-config", dirty).succeeds()
    return dirty.parent.with_name("t-clean"), done.text


def test_floaters_go_and_the_rest_is_a_run_with_its_features(clean: tuple[Path, str], dirty: Path) -> None:
    from f3rm_ext.engine.config_file import read_config
    from f3rm_ext.export.splats import load_splat_run

    folder, said = clean
    before, after = load_splat_run(dirty).model, load_splat_run(folder / "config.yml").model
    assert after.num_gaussians < before.num_gaussians
    assert after.gaussians.means.norm(dim=1).max() < 50, "those far away are gone"
    gone = before.gaussians.means[NEAR]
    assert (after.gaussians.means - gone).norm(dim=1).min() > 0, "so is the one before the camera"
    heads = before.query_heads()
    assert heads.keys() == after.query_heads().keys() and heads
    kept = (before.gaussians.means[:, None, 0] == after.gaussians.means[None, :, 0]).any(dim=1)
    for name, head in heads.items():
        assert torch.equal(after.query_heads()[name].codes, head.codes[kept])
    assert torch.equal(after.filter_3d, before.filter_3d[kept])
    config = read_config(folder / "config.yml")
    assert config.get_checkpoint_dir().resolve() == (folder / "nerfstudio_models").resolve(), "where ns-eval looks"
    assert f"of {before.num_gaussians} Gaussians are removed" in said


def test_what_went_has_reasons(clean: tuple[Path, str]) -> None:
    from f3rm_ext.splat.cleaning import Reason
    from f3rm_ext.splat.files import read_splats

    folder, _ = clean
    removed, info = read_splats(folder / "removed.ply")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"]
    assert summary["gaussians"] > sum(summary["removed"].values()) == len(removed)
    assert info.scores is not None
    assert info.scores.names == tuple(reason.value for reason in Reason)
    assert (info.scores.scores.sum(axis=1) == 1).all(), "one reason each"
    counts = dict(zip(info.scores.names, info.scores.scores.sum(axis=0), strict=True))
    assert counts == summary["removed"]
    assert counts["isolated"] >= 5
    page = (folder / "report.html").read_text()
    assert page.count("<img") >= 3
    assert all(reason.value in page for reason in Reason)


def test_the_command_replaces_what_it_wrote_and_nothing_else(
    clean: tuple[Path, str], dirty: Path, f3rm_ext: Callable[..., Any], remember: Callable[[Path], Any], tmp_path: Path
) -> None:
    run, cleaned = remember(dirty.parent), remember(clean[0])
    said = f3rm_ext("splats", "clean", "--load-config", dirty, "--dry-run", "--out", tmp_path / "new")
    assert said.code == 0 and "are removed" in said.stdout
    assert not (tmp_path / "new").exists()

    f3rm_ext("splats", "clean", "--load-config", dirty).succeeds()
    assert cleaned.now().keys() == cleaned.content.keys()
    assert run.is_as_it_was()

    (tmp_path / "diary.txt").write_text("mine")
    for out in (tmp_path, dirty.parent, tmp_path / "diary.txt"):
        refused = f3rm_ext("splats", "clean", "--load-config", dirty, "--out", out)
        refused.refuses(re.escape(str(out)))
    assert run.is_as_it_was()
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]


def test_a_run_in_any_folder_can_be_evaluated(
    dirty: Path, run_command: Callable[..., Any], f3rm_ext: Callable[..., Any], tmp_path: Path
) -> None:
    f3rm_ext("splats", "clean", "--load-config", dirty, "--out", tmp_path / "tidy").succeeds()
    run_command(
        "ns-eval", "--load-config", tmp_path / "tidy/config.yml", "--output-path", tmp_path / "e.json"
    ).succeeds()
    result = json.loads((tmp_path / "e.json").read_text())
    summary = json.loads((tmp_path / "tidy" / "summary.json").read_text())
    assert result["results"]["gaussian_count"] == summary["gaussians"] - sum(summary["removed"].values())


def test_bad_input_is_one_sentence(f3rm_ext: Callable[..., Any]) -> None:
    refused = f3rm_ext("splats", "clean", "--load-config", "nothing/config.yml")
    refused.refuses(r"nothing/config\.yml")


def test_a_field_has_no_splats(untrained: Any, f3rm_ext: Callable[..., Any], tmp_path: Path) -> None:
    refused = f3rm_ext("splats", "clean", "--load-config", untrained.config, "--out", tmp_path / "out")
    refused.refuses("f3rm-ext-lite")
    assert not (tmp_path / "out").exists()


def test_the_end_of_training_cleans_by_the_same_code(dirty: Path, train_splats: Any, tmp_path: Path) -> None:
    """A step from a run with floaters: they go before the last checkpoint, and are kept beside it."""
    from f3rm_ext.export.splats import load_splat_run
    from f3rm_ext.splat.files import read_splats

    (checkpoint,) = dirty.parent.glob("nerfstudio_models/*.ckpt")
    folder = tmp_path / "e" / "sugar-ext-lite" / "t"
    done = train_splats(
        tmp_path,
        *("--pipeline.model.start-from", checkpoint, "--pipeline.model.start-stage", "regularized"),
        *("--pipeline.model.clean", True, "--pipeline.model.densify.strategy", "none", "--max-num-iterations", 1),
    ).succeeds()
    before, run = load_splat_run(dirty).model, load_splat_run(folder / "config.yml")
    removed, info = read_splats(folder / "removed.ply")
    count = before.num_gaussians
    assert run.model.num_gaussians == count - len(removed) < count
    assert f"{len(removed)} of {count} Gaussians are removed" in " ".join(done.text.split())
    assert "dB on held-out photos" in " ".join(done.text.split())
    assert run.model.gaussians.means.norm(dim=1).max() < 50 < removed.means.norm(dim=1).max()
    assert info.scores is not None and "against_photos" in info.scores.names

"""`f3rm-ext splats confidence` as a user types it, and where the confidence then goes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def measured(labelled_splats: Any, run_command: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a copy of the run whose confidence was measured."""
    folder = tmp_path_factory.mktemp("confidence") / "e" / "sugar-ext-lite" / "t"
    shutil.copytree(labelled_splats.folder, folder)
    done = run_command(
        "f3rm-ext", "splats", "confidence", "--load-config", folder / "config.yml", "--photos", 2
    ).succeeds()
    assert "Stand" in done.text
    return folder


def _checkpoint(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("nerfstudio_models/*.ckpt")
    return torch.load(file, weights_only=True, map_location="cpu")


def test_the_checkpoint_has_the_confidence_and_the_model_shows_it(measured: Path, labelled_splats: Any) -> None:
    from f3rm_ext.export.splats import load_splat_run

    before, after = _checkpoint(labelled_splats.folder)["pipeline"], _checkpoint(measured)["pipeline"]
    assert after.keys() - before.keys() == {"_model.confidence"}
    run = load_splat_run(measured / "config.yml")
    confidence = run.model.confidence
    assert confidence is not None and len(confidence) == run.model.num_gaussians
    assert 0 <= confidence.min() < 0.1 < 0.5 < confidence.max() < 1
    camera = run.manager.train_dataset.cameras[:1]
    outputs = run.model.get_outputs_for_camera(camera)
    assert outputs["confidence"].shape == outputs["accumulation"].shape
    assert 0 < outputs["confidence"].max() < 1
    assert (outputs["confidence"] <= outputs["accumulation"] + 1e-5).all()
    run.model.confidence = None
    assert "confidence" not in run.model.get_outputs_for_camera(camera)


def test_the_advice_can_be_read(measured: Path) -> None:
    from f3rm_ext.capture.frame import CaptureFrame
    from f3rm_ext.data.pinhole_cameras import PinholeCameras
    from f3rm_ext.export.splats import load_splat_run
    from f3rm_ext.query.run import read_camera_path

    report = measured.with_name("t-confidence")
    summary = json.loads((report / "summary.json").read_text())
    frames = json.loads((report / "next_photos.json").read_text())["frames"]
    assert summary["complete"] and 0 < summary["mean_confidence"] < 1
    assert [frame["words"] for frame in frames] == [photo["words"] for photo in summary["next_photos"]]
    assert 1 <= len(frames) <= 2
    page = (report / "report.html").read_text()
    assert page.count("<img") == 3 * (len(frames) + 4) and all(frame["words"] in page for frame in frames)
    outputs = load_splat_run(measured / "config.yml").manager.train_dataparser_outputs
    frame = CaptureFrame.from_outputs(outputs, Path(outputs.metadata.get("data", ".")))
    path = PinholeCameras.of(read_camera_path(report / "camera_path.json").cameras)
    for place, found in zip(path.positions.numpy(), frames, strict=True):
        capture = frame.to_capture(place)
        assert capture == pytest.approx([row[3] for row in found["transform_matrix"][:3]], abs=1e-4)


def test_exports_and_parts_of_the_run_keep_it(measured: Path, f3rm_ext: Callable[..., Any], tmp_path: Path) -> None:
    from f3rm_ext.splat.files import read_splats

    config, out = measured / "config.yml", tmp_path / "splats.ply"
    f3rm_ext("export", "splats", "--load-config", config, "--out", out).succeeds()
    _, info = read_splats(out)
    assert info.scores is not None and info.scores.names == ("confidence",)
    expected = _checkpoint(measured)["pipeline"]["_model.confidence"]
    assert torch.equal(torch.from_numpy(info.scores.scores[:, 0]), expected)
    box = ("--box", -0.4, -0.4, -9, 0.4, 0.4, 9, "--keep")
    f3rm_ext("splats", "select", "--load-config", config, *box, "--out", tmp_path / "part").succeeds()
    part = _checkpoint(tmp_path / "part")["pipeline"]
    assert 0 < len(part["_model.confidence"]) == len(part["_model.gauss_params.means"]) < len(expected)


def test_training_on_drops_it(measured: Path, train_splats: Callable[..., Any], tmp_path: Path) -> None:
    train_splats(tmp_path, "--load-dir", measured / "nerfstudio_models", steps=62).succeeds()
    files = sorted(tmp_path.glob("e/sugar-ext-lite/t/nerfstudio_models/*.ckpt"))
    assert "_model.confidence" not in torch.load(files[-1], weights_only=True, map_location="cpu")["pipeline"]


def test_bad_input_is_one_sentence(
    measured: Path, f3rm_ext: Callable[..., Any], untrained: Any, tmp_path: Path
) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    before = _checkpoint(measured)["pipeline"]["_model.confidence"]
    refused = f3rm_ext("splats", "confidence", "--load-config", measured / "config.yml", "--out", tmp_path)
    refused.refuses(str(tmp_path))
    refused = f3rm_ext("splats", "confidence", "--load-config", untrained.config, "--out", tmp_path / "out")
    refused.refuses("f3rm-ext-lite")
    assert torch.equal(_checkpoint(measured)["pipeline"]["_model.confidence"], before)

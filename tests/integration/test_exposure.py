"""Photos of varying exposure: train → resume → eval → export, as the commands a user types, on the CPU."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

STOPS = "_model.exposures.stops"
METHODS = ("f3rm-ext-lite", "sugar-ext-lite")
Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def varied(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny capture with every other photo two stops darker, as EXIF says."""
    out = tmp_path_factory.mktemp("varied") / "room"
    shutil.copytree(tiny_capture, out)
    for index, path in enumerate(sorted((out / "images").iterdir())):
        exif = Image.Exif()
        exif[0x010F] = "Maker"
        exif.get_ifd(0x8769).update({0x829A: 0.04 / 4 ** (index % 2), 0x829D: 2.0, 0x8827: 100})
        colors = np.asarray(Image.open(path).convert("RGB")) / 255
        Image.fromarray(np.rint(colors * (0.53 ** (index % 2)) * 255).astype(np.uint8)).save(path, exif=exif)
    return out


@pytest.fixture(scope="module")
def train_varied(train: Callable[..., Any], train_splats: Callable[..., Any], varied: Path) -> Runs:
    """Trains a method; gives the folder of the run."""

    def run(method: str, out: Path, steps: int, *arguments: object) -> Path:
        if method == "f3rm-ext-lite":
            ends = (f"--optimizers.{name}.scheduler.max-steps" for name in ("fields", "proposal-networks", "exposure"))
            schedule = [word for end in ends for word in (end, 14)]
            train(out, steps, *schedule, *arguments, "--data", varied, "--pipeline.datamanager.features.extractors")
        else:
            schedule = ["--schedule-steps", 14, "--data", varied]
            train_splats(out, *schedule, *arguments, steps=steps).succeeds()
        return out / "e" / method / "t"

    return run


@pytest.fixture(scope="module", params=METHODS)
def run(request: pytest.FixtureRequest, train_varied: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 14 steps."""
    return train_varied(request.param, tmp_path_factory.mktemp("run"), 14)


def state_of(run: Path) -> dict[str, Any]:
    (path,) = (run / "nerfstudio_models").glob("*.ckpt")
    return torch.load(path, weights_only=True)["pipeline"]


def test_exif_turns_it_on_and_later_commands_know(run: Path) -> None:
    text = (run / "config.yml").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("    exposure: "))
    assert yaml.safe_load(line) == {"exposure": "on"}
    stops = state_of(run)[STOPS]
    assert stops.mean(dim=0).abs().max() < 1e-6
    assert len(torch.unique(stops.round())) == 2 and (stops.amax(dim=0) - stops.amin(dim=0) > 1.5).all()


def test_resume_follows_the_very_same_path(run: Path, train_varied: Runs, tmp_path: Path) -> None:
    method = run.parent.name
    first = train_varied(method, tmp_path / "first", 7)
    second = train_varied(method, tmp_path / "second", 14, "--load-dir", first / "nerfstudio_models")
    one, two = state_of(run), state_of(second)
    assert torch.equal(one[STOPS], two[STOPS]) and not torch.equal(one[STOPS], state_of(first)[STOPS])
    assert not [
        key for key, value in one.items() if isinstance(value, torch.Tensor) and not torch.equal(value, two[key])
    ]


def test_held_out_photos_are_judged_by_exif(run: Path, run_command: Callable[..., Any], tmp_path: Path) -> None:
    run_command("ns-eval", "--load-config", run / "config.yml", "--output-path", tmp_path / "e.json").succeeds()
    results = json.loads((tmp_path / "e.json").read_text())["results"]
    assert results["exposure_from_exif"] == 1
    assert np.isfinite([results["psnr"], results["psnr_at_mean_exposure"]]).all()
    assert results["psnr"] != results["psnr_at_mean_exposure"]


def test_exports_have_no_exposure(run: Path, f3rm_ext: Callable[..., Any], tmp_path: Path) -> None:
    if run.parent.name != "sugar-ext-lite":
        pytest.skip("Fields export by rendering, which tests/unit/nerf/test_model.py compares.")
    (path,) = (run / "nerfstudio_models").glob("*.ckpt")
    before, files = path.read_bytes(), [tmp_path / "one.ply", tmp_path / "two.ply"]
    try:
        for file in files:
            f3rm_ext("export", "splats", "--load-config", run / "config.yml", "--out", file).succeeds()
            state = torch.load(path, weights_only=True)
            state["pipeline"][STOPS] += 1
            torch.save(state, path)
    finally:
        path.write_bytes(before)
    assert files[0].read_bytes() == files[1].read_bytes()

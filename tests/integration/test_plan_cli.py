"""``f3rm-ext plan`` as a user types it."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from f3rm_ext.planning.question import parse

WINDOWS = (
    "--pipeline.datamanager.train-num-images-to-sample-from=4",
    "--pipeline.datamanager.train-num-times-to-repeat-images=7",
)
RUN = (*("--experiment-name", "e", "--timestamp", "t", "--vis", "tensorboard"), "--logging.local-writer.enable=False")
SIZES = ("--images", "9", "--width-px", "64", "--height-px", "48")
LITE = "--pipeline.datamanager.train-num-rays-per-batch=256"
SPLATS = ("--pipeline.model.num-random=500", "--regularization=none", "--pipeline.datamanager.num-downscales=1")

RANDOM = (*SPLATS, "--pipeline.datamanager.stereo-points=never")


def enlarge(capture: Path, out: Path) -> Path:
    """Writes a capture without points, with photos of three times its size."""
    meta = json.loads((capture / "transforms.json").read_text())
    meta.pop("ply_file_path", None)
    for item in (meta, *meta["frames"]):
        item.update({name: 3 * item[name] for name in ("fl_x", "fl_y", "cx", "cy", "w", "h") if name in item})
    for frame in meta["frames"]:
        path = out / frame["file_path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(capture / frame["file_path"]).resize((meta["w"], meta["h"])).save(path)
        for name in frame.keys() & {"depth_file_path", "mask_path"}:
            del frame[name]
    (out / "transforms.json").write_text(json.dumps(meta))
    return out


@pytest.fixture
def plan(run_command: Callable[..., Any]) -> Callable[..., Any]:
    """Types ``f3rm-ext plan ...``."""

    def run(*arguments: object, **options: Any) -> Any:
        return run_command("f3rm-ext", "plan", *arguments, **options)

    return run


@pytest.mark.parametrize(
    ("method", "more"),
    [("f3rm-ext-lite", (LITE,)), ("sugar-ext-lite", SPLATS), ("sugar-ext-lite", RANDOM)],
    ids=["fields", "splats", "random splats"],
)
def test_coverage_is_what_the_run_logs(
    plan: Callable[..., Any],
    run_command: Callable[..., Any],
    tiny_capture: Path,
    tmp_path: Path,
    method: str,
    more: tuple[str, ...],
) -> None:
    capture = tiny_capture if more is not RANDOM else enlarge(tiny_capture, tmp_path / "large")
    arguments = ("--data", capture, "--output-dir", tmp_path, "--max-num-iterations=40", *RUN, *WINDOWS, *more)
    planned = plan(method, *arguments, "--json").succeeds()
    found = json.loads(planned.stdout)
    run_command("ns-train", *shlex.split(found["command"])[1:]).succeeds()
    logged = json.loads((tmp_path / "e" / method / "t" / "coverage.json").read_text())
    for name in ("images", "images_seen", "appearances_min", "appearances_max", "rays"):
        assert found["coverage"][name] == logged[name], name
    assert found["coverage"]["epochs"] == pytest.approx(logged["effective_epochs"], rel=1e-12)
    assert found["capture"]["train_images"] == len(logged["per_image"])


@pytest.mark.parametrize("gib", [24, 16, 12, 8])
def test_the_garden_on_four_cards(plan: Callable[..., Any], gib: int) -> None:
    done = plan("sugar-ext", "--gaussians", 6_000_000, "--sh-degree", 3, "--vram-gib", gib).succeeds()
    command = shlex.split(done.stdout.strip().splitlines()[-1])
    assert command[:2] == ["ns-train", "sugar-ext"]
    model: Any = parse("sugar-ext", command[2:]).pipeline.model
    asked = "It does not fit as it is." in done.stdout
    assert asked is (command != ["ns-train", "sugar-ext", "--sh-degree", "3"]) and model.sh_degree == 3
    assert not asked or gib == 8


def test_the_advised_run_is_started(plan: Callable[..., Any], tiny_capture: Path, tmp_path: Path) -> None:
    done = plan("f3rm-ext-lite", "--apply", "--data", tiny_capture, "--output-dir", tmp_path, LITE, *RUN,
                "--max-num-iterations=3", "--pipeline.datamanager.features.extractors")  # fmt: skip
    done.succeeds()
    assert "It fits" in done.stdout
    assert json.loads((tmp_path / "e" / "f3rm-ext-lite" / "t" / "coverage.json").read_text())["step"] == 2


def test_a_run_that_cannot_fit_is_not_started(plan: Callable[..., Any], tmp_path: Path) -> None:
    size = ("--images", 9, "--width-px", 640, "--height-px", 480, "--gaussians", 20_000, "--vram-gib", 0.1)
    done = plan("sugar-ext-lite", "--apply", "--output-dir", tmp_path, *size, "--regularization=none")
    done.refuses("does not fit with any options")
    assert not list(tmp_path.iterdir())


def test_a_probe_measures_and_leaves_nothing(plan: Callable[..., Any], tiny_capture: Path, tmp_path: Path) -> None:
    done = plan(
        "sugar-ext-lite", "--probe", "--json", "--data", tiny_capture, *SPLATS, "--output-dir", tmp_path
    ).succeeds()
    time = json.loads(done.stdout)["time"]
    assert time["source"] == "measured here in 20 steps of each of 2 stages"
    assert time["eta_s"] == pytest.approx(3000 / time["steps_per_s"]) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nerfacto",), "There is no method 'nerfacto' to plan"),
        (("sugar-ext-refine",), "give the mesh by --mesh, or --gaussians"),
        (("f3rm-ext", "--gpu", "voodoo"), "No card named 'voodoo' is known"),
        (("f3rm-ext", "--vram-gib", "-1"), "--vram-gib is -1.0"),
        (("f3rm-ext", "--data", "/nowhere/at-all"), "/nowhere/at-all"),
        (("f3rm-ext", "--images", "9"), "--width-px"),
        (("f3rm-ext", "--epochs", "0"), "--epochs is 0.0"),
        (("f3rm-ext", "--gpu", "4090", "--probe"), "--probe measures this machine"),
        (("sugar-ext", "--gaussians", str(10**14)), "--gaussians"),
        (("f3rm-ext", "--max-num-iterations", "-10"), "--max-num-iterations"),
        (("f3rm-ext", "--machine.num-devices", "0"), "--machine.num-devices"),
        (("f3rm-ext", "--gaussians", "5"), "--gaussians is of splats, and f3rm-ext trains a field"),
        (("f3rm-ext", "--points", "5", *SIZES), "--points is of splats, and f3rm-ext trains a field"),
        (("sugar-ext", "--points", "5"), "--points is the number of points of a capture that is given by --images"),
        (("sugar-ext", "--points", "5", "--data", "x"), "--points is the number of points of a capture that is given"),
        (("f3rm-ext", "--load-dir", "x"), "--load-dir"),
        (("f3rm-ext", "--load-checkpoint", "x"), "--load-checkpoint"),
        (("f3rm-ext", "--machine.device-type", "cpu", "--vram-gib", "8"), "--machine.device-type is cpu"),
        (("f3rm-ext", "--machine.device_type=cpu", "--gpu", "4090"), "--machine.device-type is cpu"),
    ],
)
def test_bad_input_is_one_sentence(plan: Callable[..., Any], arguments: tuple[str, ...], words: str) -> None:
    done = plan(*arguments)
    assert done.code == 2 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.text


def test_help_teaches(plan: Callable[..., Any]) -> None:
    for arguments in ((), ("--help",), ("sugar-ext", "--help")):
        done = plan(*arguments)
        assert done.code == 0 and "f3rm-ext plan sugar-ext --gaussians 6000000" in done.stdout

"""What a plan says training will see is what a run logs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.planning.coverage import plan_coverage
from f3rm_ext.planning.question import parse
from f3rm_ext.planning.request import ImageSizes

WINDOW = (
    "--pipeline.datamanager.train-num-images-to-sample-from=4",
    "--pipeline.datamanager.train-num-times-to-repeat-images=7",
)
SMALL_FIRST = ("--pipeline.datamanager.resolution-schedule=20", "--pipeline.datamanager.num-downscales=2")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("arguments", [(), WINDOW], ids=["all", "windows"])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("f3rm-ext-lite", ("--pipeline.datamanager.train-num-rays-per-batch=65",)),
        ("sugar-ext", SMALL_FIRST),
        ("sugar-ext", ("--resolution-scale=0.4",)),
    ],
)
def test_figures_are_those_of_a_run(
    tiny_capture: Path, tmp_path: Path, method: str, more: tuple[str, ...], arguments: tuple[str, ...], processes: int
) -> None:
    steps = 50
    config = parse(method, ["--data", str(tiny_capture), f"--max-num-iterations={steps}", *arguments, *more])
    planned = plan_coverage(config, ImageSizes.from_capture(config), processes)

    options: Any = config.pipeline.datamanager
    options.features.extractors = ()
    torch.manual_seed(config.machine.seed)
    manager = options.setup(device="cpu", test_mode="val", world_size=processes, local_rank=0)
    for step in range(steps):
        manager.next_train(step)
    path = tmp_path / "coverage.json"
    manager.streams()["train"].coverage.write(path, step=steps - 1, names=[""] * planned.images)
    manager.close()
    logged = json.loads(path.read_text())
    for name in ("images", "images_seen", "appearances_min", "appearances_max", "rays"):
        assert getattr(planned, name) == logged[name], name
    assert planned.epochs == pytest.approx(logged["effective_epochs"], rel=1e-12)


def brief(images: int, *arguments: str) -> Any:
    config = parse("f3rm-ext", ["--max-num-iterations=120000", *arguments])
    return plan_coverage(config, ImageSizes.from_numbers(config, images, 1024, 1024))


def test_the_figures_of_the_guide() -> None:
    found = brief(100, "--pipeline.datamanager.train-num-rays-per-batch=8192")
    assert (found.steps_per_epoch, found.epochs, found.epochs_to_steps(10)) == (12_800, 9.375, 128_000)
    assert found.repeat_for_one_pass is None and found.coverage == 1


@pytest.mark.parametrize(("images", "times"), [(100, (75, 76)), (200, (37, 38))])
def test_windows_show_images_equally_often(images: int, times: tuple[int, int]) -> None:
    found = brief(
        images,
        "--pipeline.datamanager.train-num-images-to-sample-from=32",
        "--pipeline.datamanager.train-num-times-to-repeat-images=512",
    )
    assert found.windows == 235 and (found.appearances_min, found.appearances_max) == times
    assert found.repeat_for_one_pass == 120_000 // -(-images // 32)


def test_images_that_no_window_shows_count() -> None:
    found = brief(100, "--pipeline.datamanager.train-num-images-to-sample-from=32")
    assert found.coverage == 0.32 and found.appearances_min == 0 and found.repeat is None


@pytest.mark.parametrize(("scope", "device", "all_devices"), [("global", 2048, 8192), ("per-device", 8192, 32768)])
def test_a_batch_over_four_devices(scope: str, device: int, all_devices: int) -> None:
    arguments = [
        "--pipeline.datamanager.train-num-rays-per-batch=8192",
        f"--pipeline.datamanager.ray-batch-scope={scope}",
    ]
    config = parse("f3rm-ext", [*arguments, "--max-num-iterations=10"])
    found = plan_coverage(config, ImageSizes.from_numbers(config, 10, 64, 64), 4)
    assert (found.rays_per_step_device, found.rays_per_step) == (device, all_devices)


def test_sizes_of_a_capture_need_no_pixels(tiny_capture: Path) -> None:
    config = parse("sugar-ext", ["--data", str(tiny_capture), "--resolution-scale=0.5"])
    sizes = ImageSizes.from_capture(config)
    summary = sizes.summary()
    assert (summary.width_px, summary.height_px) == (32, 24)
    assert summary.train_images + summary.eval_images == 12 and summary.points > 0
    assert config.pipeline.datamanager.data == tiny_capture, "the options are left alone"


def test_the_largest_image_decides() -> None:
    sizes = ImageSizes(np.array([10, 30]), np.array([50, 20]), 0)
    assert (sizes.summary().width_px, sizes.summary().height_px) == (20, 30)

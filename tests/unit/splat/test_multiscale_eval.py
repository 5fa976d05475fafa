"""Pictures of several sizes: which can be compared, with what, and what the command writes."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.models.base_model import Model
from PIL import Image

from f3rm_ext.data.undistort import PinholeIntrinsics
from f3rm_ext.export.splats import SplatRun, load_splat_run
from f3rm_ext.scripts import eval_scales
from f3rm_ext.scripts.cli import main
from f3rm_ext.splat import multiscale_eval
from f3rm_ext.splat.multiscale_eval import (
    GAP_PX,
    HEIGHT_PX,
    LABEL_PX,
    ScaleResult,
    evaluate_scales,
    image_size,
    select_scales,
    strip_png,
)

ALL = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def view(width: int, height: int) -> PinholeIntrinsics:
    return PinholeIntrinsics(width, height, 100.0, 100.0, width / 2, height / 2)


@pytest.mark.parametrize(
    ("trained", "kept"), [(1.0, ALL[:4]), (0.5, ALL[:5]), (0.125, ALL), (0.3, ALL[:5]), (1 / 3, ALL[:5])]
)
def test_images_are_no_larger_than_the_files(trained: float, kept: tuple[float, ...]) -> None:
    scales, left_out = select_scales(ALL, [view(1600, 1200)], trained)
    assert tuple(scales) == kept and len(left_out) == len(ALL) - len(kept)
    assert all("1600 × 1200" in sentence and sentence.count(". ") == 0 for sentence in left_out)


def test_what_is_left_out_says_why_and_how_to_measure_it() -> None:
    _, (sentence,) = select_scales((4.0,), [view(640, 480), view(480, 640)], 0.5)
    for words in ("×4 ", "1280 × 1280", "640 × 640", "--pipeline.datamanager.camera-res-scale-factor 0.25 "):
        assert words in sentence
    scales, (sentence,) = select_scales((0.25, 1.0, 0.125, 1.0), [view(200, 160), view(88, 200)], 0.5)
    assert scales == [0.25, 1.0]
    assert "×0.125 " in sentence and " 6 px" in sentence
    assert image_size(view(200, 160), 0.25, 0.5) == (20, 25)


@pytest.fixture(scope="module")
def run(splat_config: Path) -> SplatRun:
    return load_splat_run(splat_config)


class Fake(Model):
    """A model that renders black and records the cameras and photos it was given."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.cameras: list[Cameras] = []
        self.truths: list[torch.Tensor] = []

    def get_outputs_for_camera(self, camera: Cameras) -> dict[str, torch.Tensor]:
        self.cameras.append(camera)
        return {"rgb": torch.zeros(int(camera.height), int(camera.width), 3)}

    def get_image_metrics_and_images(
        self, outputs: dict[str, torch.Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        assert outputs["rgb"].shape == batch["image"].shape
        self.truths.append(batch["image"])
        metrics = {"psnr": float(batch["image_idx"]), "ssim": 0.5, "l1": 0.1, "gaussian_count": 3.0}
        return metrics, {"img": torch.cat([batch["image"], outputs["rgb"]], dim=1)}


def test_truths_are_areas_of_the_files_and_cameras_go_with_them(run: SplatRun, tiny_capture: Path) -> None:
    model = Fake()
    results = evaluate_scales(model, run.photos, (0.5, 1.0, 2.0), example=1)
    assert [(r.width_px, r.height_px) for r in results] == [(16, 12), (32, 24), (64, 48)]
    file = np.asarray(Image.open(run.photos.image_filenames[2]).convert("RGB"))
    for index, (width, height) in enumerate([(16, 12), (32, 24), (64, 48)]):
        camera, truth = model.cameras[6 + index], model.truths[6 + index]  # of the third photo
        expected = cv2.resize(file, (width, height), interpolation=cv2.INTER_AREA)
        assert np.abs(truth.numpy() * 255 - expected).max() < 1e-3
        full = run.photos.views[2]
        torch.testing.assert_close(float(camera.fx) / width, full.fx / full.width)
        torch.testing.assert_close(float(camera.cy) / height, full.cy / full.height)
        assert torch.equal(camera.camera_to_worlds, run.photos.cameras.camera_to_worlds[2:3])
    assert results[0].means() == pytest.approx({"psnr": 1.0, "ssim": 0.5, "l1": 0.1}), (
        "0, 1 and 2; LPIPS was not measured"
    )
    assert results[2].example is not None and results[2].example.shape == (48, 128, 3)


def test_the_trained_size_gives_the_figures_of_ns_eval(run: SplatRun) -> None:
    (result,) = evaluate_scales(run.model, run.photos, (1.0,))
    loader = run.manager.fixed_indices_eval_dataloader
    for (camera, batch), found in zip(loader, result.per_image, strict=True):
        expected, _ = run.model.get_image_metrics_and_images(run.model.get_outputs_for_camera(camera), batch)
        assert found["psnr"] == pytest.approx(expected["psnr"], abs=1e-5)
        assert found["ssim"] == pytest.approx(expected["ssim"], abs=1e-5)


@pytest.mark.parametrize(
    ("per_image", "means", "psnr"),
    [
        ([{"psnr": 1.0, "lpips": 0.5}, {"psnr": 3.0}], {"psnr": 2.0}, [1.0, 3.0]),
        ([{"psnr": 20.0, "ssim": 0.5, "l1": 0.1}, {}], {"psnr": 20.0, "ssim": 0.5, "l1": 0.1}, [20.0, None]),
        ([{}], {}, [None]),
    ],
)
def test_means_leave_out_masked_images_and_incomplete_lpips(per_image: Any, means: Any, psnr: Any) -> None:
    result = ScaleResult(1.0, 4, 3, per_image)
    assert result.means() == means and result.record()["psnr_of_images"] == psnr


def test_the_strip_has_all_scales_at_one_height() -> None:
    def example(height: int, width: int) -> torch.Tensor:
        photo, drawing = torch.zeros(height, width, 3), torch.zeros(height, width, 3)
        photo[..., 0], drawing[..., 2] = 1.0, 1.0
        return torch.cat([photo, drawing], dim=1)

    results = [
        ScaleResult(s, w, h, example=example(h, w)) for s, h, w in ((0.5, 30, 40), (1.0, 60, 80), (8.0, 480, 640))
    ]
    results.append(ScaleResult(2.0, 9, 9))
    strip = np.asarray(Image.open(io.BytesIO(strip_png(results))))
    column = round(HEIGHT_PX * 4 / 3)
    assert strip.shape == (LABEL_PX + 2 * HEIGHT_PX + GAP_PX, 3 * column + 2 * GAP_PX, 3)
    for index in range(3):
        x = index * (column + GAP_PX) + column // 2
        assert tuple(strip[LABEL_PX + HEIGHT_PX // 2, x]) == (255, 0, 0)
        assert tuple(strip[LABEL_PX + GAP_PX + 3 * HEIGHT_PX // 2, x]) == (0, 0, 255)
        label = strip[:LABEL_PX, index * (column + GAP_PX) :][:, :column]
        assert (label.min(axis=2) < 100).any(), "no label"


@pytest.fixture
def evaluate(
    make_splat_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, Path]]:
    """Exit code of the command on a run of its own, what it said, and the run's folder."""
    config = make_splat_run(tmp_path / "runs")

    def run(*arguments: object) -> tuple[int, str, Path]:
        capsys.readouterr()
        code = main(["eval", "scales", "--load-config", str(config), *map(str, arguments)])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split()), config.parent

    return run


def test_the_command_writes_table_record_and_picture(evaluate: Any) -> None:
    code, said, folder = evaluate()
    assert code == 0, said
    record = json.loads((folder / "scales.json").read_text())
    assert [row["scale"] for row in record["scales"]] == [0.5, 1.0, 2.0]
    assert [row["width_px"] for row in record["scales"]] == [16, 32, 64]
    assert all(row["images"] == len(row["psnr_of_images"]) == 3 for row in record["scales"])
    assert all(0 < row["psnr"] < 60 and -1 <= row["ssim"] <= 1 for row in record["scales"])
    assert len(record["left_out"]) == 4 and all(sentence in said for sentence in record["left_out"])
    assert record["step"] == 7 and record["trained_at"] == 0.5 and record["gaussians"] == 300
    assert record["trained_with"] == record["drawn_with"] == {"filter_2d": True, "filter_3d": True}
    for words in ("×0.5", "64 × 48", "PSNR", f"{record['scales'][1]['psnr']:.2f}"):
        assert words in said
    assert Image.open(folder / "scales.png").height == LABEL_PX + 2 * HEIGHT_PX + GAP_PX
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_switched_filters_change_the_figures_and_the_name(evaluate: Any) -> None:
    assert evaluate("--scales", 0.5, 2)[0] == 0
    code, said, folder = evaluate("--scales", 2, 0.5, "--filter-2d", "off", "--filter-3d", "off")
    assert code == 0, said
    as_trained = json.loads((folder / "scales.json").read_text())
    switched = json.loads((folder / "scales-2d-off-3d-off.json").read_text())
    assert switched["trained_with"] == {"filter_2d": True, "filter_3d": True}
    assert switched["drawn_with"] == {"filter_2d": False, "filter_3d": False}
    for one, other in zip(as_trained["scales"], switched["scales"], strict=True):
        assert one["scale"] == other["scale"] and abs(one["psnr"] - other["psnr"]) > 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scales", 0), "--scales is 0"),
        (("--scales", "nan"), "--scales is nan"),
        (("--scales", 4, 8), "None of the --scales"),
        (("--view", 3), " 3 held-out"),
        (("--view", -1), "--view is -1: give a number of 0 or more"),
        (("--out", "figures.txt"), ".json"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(evaluate: Any, arguments: tuple[object, ...], message: str) -> None:
    code, said, folder = evaluate(*arguments)
    assert code == 2 and message in said
    assert not list(folder.glob("scales*"))


def test_a_name_that_cannot_be_written_is_found_out_before_the_work(
    evaluate: Any, tmp_path: Path, watch_calls: Callable[..., Any]
) -> None:
    begun = watch_calls(multiscale_eval, "evaluate_scales")
    (tmp_path / "a.png").mkdir()
    code, said, _ = evaluate("--out", tmp_path / "a.json")
    assert code == 2 and "a.png" in said and "--out" in said and not begun


def test_no_scales_at_all(tmp_path: Path) -> None:
    with pytest.raises(eval_scales.ConfigError, match="no scales"):
        eval_scales.EvalScales(tmp_path / "config.yml", scales=())

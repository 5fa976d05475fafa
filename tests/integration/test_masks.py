"""An object capture with masks: trained both ways by both methods, and judged by what the masks keep alone."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.query.run import load_run

METHODS = ("f3rm-ext-lite", "sugar-ext-lite")
STEPS = {"f3rm-ext-lite": 250, "sugar-ext-lite": 100}
"""As many as it takes to learn where nothing is."""
SMALL = {
    "f3rm-ext-lite": (
        *("--pipeline.datamanager.train-num-rays-per-batch", 256),
        *("--pipeline.datamanager.features.extractors", "dense-daisy:short_side_px=48"),
        *(f"--pipeline.model.{name}.log2-hashmap-size=13" for name in ("grid", "feature-grid", "proposals.0.grid")),
    ),
    "sugar-ext-lite": (
        *("--pipeline.model.num-random", 500, "--pipeline.model.densify.max-gaussians", 800),
        *("--pipeline.model.regularization", "none", "--pipeline.datamanager.num-downscales", 0),
        *("--pipeline.model.features", "dense-daisy:short_side_px=48"),
    ),
}
PICTURES = ("psnr", "ssim", "l1", "lpips")


def masked(capture: Path, out: Path) -> Path:
    """A synthetic room whose masks keep a table and what is on it, and nothing of the last held-out photo."""
    shutil.copytree(capture, out)
    meta = json.loads((out / "transforms.json").read_text())
    scene = json.loads((out / "scene.json").read_text())
    objects = [t["label"] for t in scene["objects"] if t["kind"] == "object" and t.get("name", "") != "rug"]
    (out / "masks").mkdir()
    for frame in meta["frames"]:
        labels = np.asarray(Image.open(out / frame["label_file_path"]))
        kept = np.isin(labels, objects) & (frame["file_path"] != sorted(meta["test_filenames"])[-1])
        frame["mask_path"] = f"masks/{Path(frame['file_path']).name}"
        Image.fromarray(kept.astype(np.uint8) * 255).save(out / frame["mask_path"])
    (out / "transforms.json").write_text(json.dumps(meta))
    return out


@pytest.fixture(scope="module")
def capture(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return masked(tiny_capture, tmp_path_factory.mktemp("masked") / "objects")


@pytest.fixture(scope="module")
def train(
    run_command: Callable[..., Any], capture: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`ns-train` on the capture; gives the folder of the run."""
    out = tmp_path_factory.mktemp("runs")

    def run(method: str, *arguments: object) -> Path:
        name = "-".join(map(str, arguments[-1:])) or "plain"
        run_command(
            *("ns-train", method, "--data", capture, "--output-dir", out),
            *("--experiment-name", "e", "--timestamp", name),
            *("--vis", "tensorboard", "--logging.local-writer.enable", "False", "--max-num-iterations", STEPS[method]),
            *SMALL[method],
            *arguments,
        ).succeeds()
        return out / "e" / method / name

    return run


@pytest.fixture(scope="module")
def ignoring(train: Callable[..., Path]) -> Callable[[str], Path]:
    """The folder of a run of a method that ignores masked pixels."""
    return functools.cache(lambda method: train(method, "--pipeline.datamanager.masked-pixels", "ignore"))


@pytest.fixture(scope="module")
def evaluate(run_command: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`ns-eval`: its figures, its pictures and what it says."""

    def run(folder: Path) -> tuple[dict[str, float], Path, str]:
        out = tmp_path_factory.mktemp("eval")
        done = run_command(
            *("ns-eval", "--load-config", folder / "config.yml", "--output-path", out / "eval.json"),
            *("--render-output-path", out / "images"),
        ).succeeds()
        return json.loads((out / "eval.json").read_text())["results"], out / "images", done.text

    return run


@pytest.mark.parametrize("method", METHODS)
def test_nothing_that_masks_leave_out_is_judged(
    method: str, train: Callable[..., Path], evaluate: Callable[..., Any], capture: Path
) -> None:
    run = train(method, "--pipeline.datamanager.masked-pixels", "ignore", "--max-num-iterations", 20)
    figures, images, said = evaluate(run)
    assert all(np.isfinite(value) for value in figures.values())
    assert {"psnr", "ssim", "l1", "feature_cosine_dense-daisy"} <= set(figures)
    assert "1 of 3 evaluation images are not measured" in " ".join(said.split())
    meta = json.loads((capture / "transforms.json").read_text())
    shown = sorted(meta["test_filenames"])[:2]
    assert len(list(images.glob("eval_img_*.png"))) == 2
    for index, name in enumerate(shown):
        kept = np.asarray(Image.open(capture / "masks" / Path(name).name)) > 0
        for kind in ("img", "depth", "accumulation"):
            picture = np.asarray(Image.open(images / f"eval_{kind}_{index:04d}.png").convert("RGB")).astype(int)
            for part in np.split(picture, picture.shape[1] // kept.shape[1], axis=1):
                assert (abs(part[~kept] - 127.5) <= 1).all() and (abs(part[kept] - 127.5) > 1).any()
    # The photos of another world behind the objects: the same figures. Without classes nothing is queried, which takes
    # most of an evaluation.
    before = {name: (capture / name).read_bytes() for name in (*shown, "transforms.json")}
    del meta["classes"]
    try:
        (capture / "transforms.json").write_text(json.dumps(meta))
        for name in shown:
            photo = np.asarray(Image.open(capture / name).convert("RGB")).copy()
            photo[np.asarray(Image.open(capture / "masks" / Path(name).name)) == 0] = (255, 0, 255)
            Image.fromarray(photo).save(capture / name)
        changed, _, _ = evaluate(run)
    finally:
        for name, content in before.items():
            (capture / name).write_bytes(content)
    same = [key for key in PICTURES if key in figures]
    assert {key: changed[key] for key in same} == pytest.approx({key: figures[key] for key in same}, rel=1e-4)


def light_in_masks(run: Path, capture: Path) -> float:
    """Mean brightness that a run renders where masks leave out, 0 to 1, over its background, black."""
    opened = load_run(run / "config.yml")
    found = []
    for index, file in enumerate(opened.files("test")):
        rgb = opened.model.render_camera(opened.cameras("test")[index : index + 1], {})["rgb"]
        found.append(rgb.cpu().numpy()[np.asarray(Image.open(capture / "masks" / file.name)) == 0])
    return float(np.concatenate(found).mean())


@pytest.mark.parametrize("method", [pytest.param(METHODS[0], marks=pytest.mark.release), METHODS[1]])
def test_masks_of_an_object_are_trained_as_background_by_default(
    method: str,
    train: Callable[..., Path],
    ignoring: Callable[[str], Path],
    evaluate: Callable[..., Any],
    capture: Path,
) -> None:
    run = train(method)
    assert " masked_pixels: background\n" in (run / "config.yml").read_text(), "later commands need not decide again"
    figures, _, _ = evaluate(run)
    assert all(np.isfinite(value) for value in figures.values()) and figures["psnr"] > 8
    # A quarter of a field's rays at most go to what is empty, so a short run leaves some light there.
    assert light_in_masks(run, capture) < 0.7 * light_in_masks(ignoring(method), capture)


def test_background_without_masks_is_refused(
    run_command: Callable[..., Any], tiny_capture: Path, tmp_path: Path
) -> None:
    done = run_command(
        *("ns-train", "sugar-ext-lite", "--data", tiny_capture, "--output-dir", tmp_path, "--vis", "tensorboard"),
        *("--pipeline.datamanager.masked-pixels", "background"),
    )
    assert done.code == 2, done.text[-3000:]
    said = " ".join(done.text.split())
    assert "masked-pixels" in said and "Traceback" not in said

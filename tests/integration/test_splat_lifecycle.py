"""Splats: train → eval → kill → resume → start from a file, as the commands a user types, on the CPU."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from f3rm_ext.utils.ply import write_ply

METHOD = "sugar-ext-lite"
STEPS = 60
SMALL = (
    *("--vis", "tensorboard", "--logging.local-writer.enable", "False"),
    *("--pipeline.model.num-random", 500, "--pipeline.model.densify.max-gaussians", 800),
    *("--pipeline.model.surface.samples", 500, "--pipeline.datamanager.num-downscales", 0),
    # Every part of the schedule has its turn: growth, entropy, pruning, regularisation.
    *("--pipeline.model.densify.every", 5, "--pipeline.model.surface.prune-opacity", 0.05),
    *("--optimizers.means.scheduler.max-steps", STEPS, "--max-num-iterations", STEPS, "--steps-per-save", 20),
)


@pytest.fixture(scope="module")
def train_splats(run_command: Callable[..., Any], tiny_capture: Path) -> Callable[..., Path]:
    """`ns-train sugar-ext-lite` on the tiny capture; gives the folder of the run."""

    def run(output_dir: Path, *arguments: object, expect: int = 0) -> Any:
        done = run_command(
            "ns-train",
            METHOD,
            *("--data", tiny_capture, "--output-dir", output_dir, "--experiment-name", "e", "--timestamp", "t"),
            *SMALL,
            *arguments,
        )
        assert done.code == expect, done.text[-4000:]
        return output_dir / "e" / METHOD / "t" if expect == 0 else done

    return run


@pytest.fixture(scope="module")
def splats(train_splats: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with every part of the schedule."""
    # On a new machine the first run compiles kernels, whose last bits differ from those of the cached code that later
    # runs load: numba optimises what is called in parallel once for this process, and once more for the cache.
    train_splats(tmp_path_factory.mktemp("first"))
    return train_splats(tmp_path_factory.mktemp("splats"))


def final(folder: Path) -> dict[str, Any]:
    """Parameters and state of the last checkpoint, read without f3rm_ext's help."""
    path = folder / "nerfstudio_models" / f"step-{STEPS - 1:09d}.ckpt"
    return torch.load(path, weights_only=True, map_location="cpu")["pipeline"]


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    return [
        key
        for key, value in one.items()
        if isinstance(value, torch.Tensor)
        and (value.shape != two[key].shape or not torch.allclose(value, two[key], atol=1e-5, rtol=1e-3))
    ]


def test_eval_reports_pictures_gaussians_memory_and_speed(splats: Path, run_command: Any, tmp_path: Path) -> None:
    run_command(
        "ns-eval",
        *("--load-config", splats / "config.yml", "--output-path", tmp_path / "eval.json"),
        *("--render-output-path", tmp_path / "images"),
    ).succeeds()
    metrics = json.loads((tmp_path / "eval.json").read_text())["results"]
    for key in ("psnr", "ssim", "l1", "gaussian_count", "mean_opacity", "num_rays_per_sec", "fps"):
        assert np.isfinite(metrics[key]), key
    assert metrics["psnr"] > 10
    assert metrics["gaussian_count"] == len(final(splats)["_model.gauss_params.means"]) <= 800
    assert metrics["train_peak_memory_mib"] > 100 and metrics["eval_peak_memory_mib"] > 100
    assert metrics["train_it_per_s"] > 0
    kinds = {path.name.split("_0")[0] for path in (tmp_path / "images").glob("*.png")}
    assert {"eval_img", "eval_depth", "eval_accumulation", "eval_normal"} <= kinds


def test_the_splats_are_exported(splats: Path, run_command: Any, tmp_path: Path) -> None:
    config = splats / "config.yml"
    run_command("f3rm-ext", "export", "splats", "--load-config", config, "--output", tmp_path / "a.ply").succeeds()
    head = (tmp_path / "a.ply").read_bytes()[:2000].decode("latin-1")
    assert f"element vertex {len(final(splats)['_model.gauss_params.means'])}" in head
    for comment in ("filter_3d: fused", "SplatRenderMode: mip", f"step: {STEPS - 1}", "method: sugar-ext-lite"):
        assert comment in head


def test_a_killed_run_goes_the_way_of_one_that_was_not(
    splats: Path, train_splats: Any, command_server: Any, tiny_capture: Path, tmp_path: Path, wait_until: Any
) -> None:
    folder = tmp_path / "e" / METHOD / "t" / "nerfstudio_models"
    arguments = ["--data", tiny_capture, "--output-dir", tmp_path, "--experiment-name", "e", "--timestamp", "t"]
    process = command_server.start("ns-train", METHOD, *arguments, *SMALL)
    wait_until(lambda: bool(list(folder.glob("*.ckpt"))) or not psutil.pid_exists(process), 200, "a checkpoint")
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    done = command_server.finish(60)
    assert list(folder.glob("*.ckpt")), done.text[-2000:]
    for path in folder.glob(f"step-{STEPS - 1:09d}.ckpt"):
        path.unlink()  # It was quicker than the signal.
    resumed = train_splats(tmp_path / "resumed", "--load-dir", folder)
    assert not differences(final(splats), final(resumed))


@pytest.fixture(scope="module")
def part(train_splats: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 40 steps of a schedule of 60."""
    folder = tmp_path_factory.mktemp("part")
    # The last --max-num-iterations counts.
    return train_splats(folder, "--max-num-iterations", 40, "--schedule-steps", STEPS)


def test_a_part_of_a_schedule_goes_the_way_of_the_whole(
    splats: Path, part: Path, train_splats: Any, tmp_path: Path
) -> None:
    resumed = train_splats(tmp_path, "--load-dir", part / "nerfstudio_models")
    assert not differences(final(splats), final(resumed))


def test_a_run_goes_on_with_another_degree(part: Path, train_splats: Any, tmp_path: Path) -> None:
    folder = train_splats(
        tmp_path, "--load-dir", part / "nerfstudio_models", "--sh-degree", 1, "--optimize_memory", "True"
    )
    parameters = final(folder)
    rest = parameters["_model.gauss_params.features_rest"]
    assert rest.shape == (len(parameters["_model.gauss_params.means"]), 3, 3) and rest.isfinite().all()
    state = torch.load(folder / "nerfstudio_models" / f"step-{STEPS - 1:09d}.ckpt", weights_only=True)
    moments = state["optimizers"]["features_rest"]["state"][0]["exp_avg"]
    assert moments.shape == rest.shape and moments.any()


def test_a_short_run_ends_although_nothing_is_opaque(
    train_splats: Any, tiny_capture: Path, tmp_path: Path, run_command: Any
) -> None:
    capture = tmp_path / "capture"
    shutil.copytree(tiny_capture, capture)
    places = np.random.default_rng(0).uniform(-1, 1, (200, 3)).astype(np.float32)
    with (capture / "sparse_pc.ply").open("wb") as stream:
        write_ply(stream, dict(zip("xyz", places.T, strict=True)))
    meta = json.loads((capture / "transforms.json").read_text())
    (capture / "transforms.json").write_text(json.dumps(meta | {"ply_file_path": "sparse_pc.ply"}))
    done = run_command(
        "ns-train",
        METHOD,
        *("--data", capture, "--output-dir", tmp_path, "--experiment-name", "e", "--timestamp", "t"),
        *(
            *SMALL,
            "--pipeline.model.surface.prune-opacity",
            0.99,
            "--dense-points",
            "never",
            "--regularization",
            "dn_consistency",
        ),
    ).succeeds()
    said = " ".join(done.text.split())
    assert "Starting with 200 Gaussians at the 200 points of" in said
    assert said.count("Pruning by opacity is skipped: only 0 of") == 1
    config = (tmp_path / "e" / METHOD / "t" / "config.yml").read_text()
    assert "regularization: dn-consistency" in config and "dn_consistency" not in config
    assert len(final(tmp_path / "e" / METHOD / "t")["_model.gauss_params.means"]) > 100


def test_a_run_starts_from_the_splats_of_another(splats: Path, train_splats: Any, tmp_path: Path) -> None:
    checkpoint = splats / "nerfstudio_models" / f"step-{STEPS - 1:09d}.ckpt"
    folder = train_splats(
        tmp_path,
        *("--pipeline.model.start-from", checkpoint, "--pipeline.model.start-stage", "regularized"),
        *("--pipeline.model.sh-degree", 1, "--max-num-iterations", 1),
        *("--optimizers.means.optimizer.lr", 1e-9, "--pipeline.model.densify.strategy", "none"),
        *("--pipeline.model.surface.planar-prune-opacity", 0),
    )
    before = final(splats)["_model.gauss_params.means"]
    path = folder / "nerfstudio_models" / "step-000000000.ckpt"
    after = torch.load(path, weights_only=True, map_location="cpu")["pipeline"]
    torch.testing.assert_close(after["_model.gauss_params.means"], before, atol=1e-4, rtol=0)
    assert after["_model.gauss_params.features_rest"].shape[1] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pipeline.model.start-from", "none.ply"), "none.ply"),
        (("--pipeline.model.densify.prune-opacity", "1.5"), "--pipeline.model.densify.prune-opacity is 1.5"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(
    train_splats: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = train_splats(tmp_path, *arguments, expect=2)
    assert message in " ".join(done.text.split()) and "Traceback" not in done.text


def test_a_checkpoint_of_another_method(
    splats: Path, trained: Any, run_command: Any, tiny_capture: Path, tmp_path: Path
) -> None:
    done = run_command(
        "ns-train",
        METHOD,
        *("--data", tiny_capture, "--output-dir", tmp_path, "--load-dir", trained.checkpoints),
        *("--max-num-iterations", 100, "--vis", "tensorboard"),
    )
    assert done.code == 2, done.text[-3000:]
    said = " ".join(done.text.split())
    assert "it lacks _model.background" in said and "resume with the options of the run" in said
    assert "Traceback" not in done.text

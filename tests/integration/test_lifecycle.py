"""train → eval → kill → resume → render, as the commands a user types, on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image


def test_eval_reports_images_features_memory_and_speed(evaluated: Path) -> None:
    results = json.loads((evaluated / "eval.json").read_text())
    assert results["method_name"] == "f3rm-ext-lite"
    metrics = results["results"]
    for key in ("psnr", "ssim", "l1", "feature_cosine_dense-daisy", "feature_mse_dense-daisy", "num_rays_per_sec"):
        assert np.isfinite(metrics[key]), key
    assert metrics["train_peak_memory_mib"] > 100 and metrics["eval_peak_memory_mib"] > 100
    assert metrics["train_it_per_s"] > 0
    # 60 steps of 256 rays find the room's colours, and the features' mean direction.
    assert metrics["psnr"] > 9 and metrics["feature_cosine_dense-daisy"] > 0.5


def test_eval_without_lpips_weights_says_so_in_one_line(
    untrained: Any, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_command(
        "ns-eval",
        "--load-config",
        untrained.config,
        "--output-path",
        tmp_path / "e.json",
        TORCH_HOME=str(tmp_path / "none"),
    ).succeeds()
    assert "psnr" in json.loads((tmp_path / "e.json").read_text())["results"]
    # Consoles wrap; the sentence is one message nevertheless.
    assert len(re.findall(r"LPIPS[^.]*(?:missing|left out|cannot|not )", " ".join(done.text.split()))) >= 1
    assert "Traceback" not in done.text


def test_the_checkpoint_is_plain_and_small(trained: Any) -> None:
    (path,) = trained.checkpoints.glob("*.ckpt")
    code = (
        "import sys, torch; state = torch.load(sys.argv[1], weights_only=True, map_location='cpu');"
        "keys = state['pipeline']; assert not [k for k in keys if 'lpips' in k.lower()], keys.keys();"
        "print(sorted(state))"
    )
    # A process without f3rm_ext: no safe globals are registered.
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_resume_follows_the_very_same_path(train: Callable[..., Any], tmp_path: Path) -> None:
    cycling = (
        *("--pipeline.datamanager.train-num-images-to-sample-from", 4),
        *("--pipeline.datamanager.train-num-times-to-repeat-images", 3),
        # The first part must not decay over its own length.
        *("--optimizers.fields.scheduler.max-steps", 14, "--optimizers.feature-field.scheduler.max-steps", 14),
        *("--optimizers.proposal-networks.scheduler.max-steps", 14),
    )
    through = train(tmp_path / "through", 14, *cycling)
    first = train(tmp_path / "first", 7, *cycling)
    second = train(tmp_path / "second", 14, "--load-dir", first.checkpoints, *cycling)
    (a,), (b,) = (sorted(run.checkpoints.glob("*.ckpt")) for run in (through, second))
    assert a.name == b.name == "step-000000013.ckpt", "resuming ends at max-num-iterations"
    one, two = (torch.load(path, weights_only=True)["pipeline"] for path in (a, b))
    different = [
        key
        for key, value in one.items()
        if isinstance(value, torch.Tensor) and not torch.allclose(value, two[key], atol=1e-6, rtol=1e-4)
    ]
    assert not different


def test_a_finished_run_has_nothing_left_to_do(
    trained: Any, run_command: Callable[..., Any], tiny_capture: Path, tmp_path: Path
) -> None:
    done = run_command(
        "ns-train",
        "f3rm-ext-lite",
        *("--data", tiny_capture, "--output-dir", tmp_path, "--load-dir", trained.checkpoints),
        *("--max-num-iterations", 60, "--vis", "tensorboard"),
    ).succeeds()
    assert "nothing" in done.text.lower()


def test_kill_minus_nine_and_resume(
    command_server: Any,
    tiny_capture: Path,
    tmp_path: Path,
    run_command: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    folder = tmp_path / "e" / "f3rm-ext-lite" / "t"
    common = ["f3rm-ext-lite", "--data", str(tiny_capture), "--output-dir", str(tmp_path), "--experiment-name", "e"]
    common += ["--vis", "tensorboard", "--pipeline.datamanager.train-num-rays-per-batch", "64"]
    endless = ("--timestamp", "t", "--steps-per-save", 3, "--max-num-iterations", 100_000)
    process = command_server.start("ns-train", *common, *endless)
    wait_until(lambda: len(list(folder.glob("nerfstudio_models/*.ckpt"))) > 0, 240, "a checkpoint")
    os.kill(process, signal.SIGKILL)
    assert command_server.finish(60).code == -signal.SIGKILL
    last = max(int(path.stem.split("-")[1]) for path in folder.glob("nerfstudio_models/*.ckpt"))
    run_command(
        "ns-train",
        *common,
        *("--timestamp", "again", "--load-dir", folder / "nerfstudio_models", "--max-num-iterations", last + 5),
    ).succeeds()
    (final,) = (folder.parent / "again" / "nerfstudio_models").glob("*.ckpt")
    assert final.name == f"step-{last + 4:09d}.ckpt"


def test_render_writes_images_of_every_output(trained: Any, run_command: Callable[..., Any], tmp_path: Path) -> None:
    run_command(
        "ns-render",
        "dataset",
        *("--load-config", trained.config, "--output-path", tmp_path, "--split", "test"),
        *("--rendered-output-names", "rgb", "depth", "feature_pca", "--image-format", "png"),
    ).succeeds()
    for output in ("rgb", "depth", "feature_pca"):
        images = sorted((tmp_path / "test" / output).rglob("*.png"))
        assert images, output
        picture = np.asarray(Image.open(images[0]))
        assert picture.shape[:2] == (48, 64) and picture.std() > 1, output


def test_render_writes_a_video_where_no_ffmpeg_is_installed(
    trained: Any, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    run_command(
        "ns-render",
        "interpolate",
        *("--load-config", trained.config, "--output-path", tmp_path / "path.mp4", "--rendered-output-names", "rgb"),
        *("--interpolation-steps", 2, "--pose-source", "eval"),
        fresh=True,
        F3RM_EXT_CACHE=str(tmp_path / "cache"),
        PATH=str(tmp_path / "no-programs"),
    ).succeeds()
    with av.open(str(tmp_path / "path.mp4")) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) >= 2 and frames[0].shape == (48, 64, 3) and frames[0].std() > 1


def test_render_needs_no_extractor_and_no_store(trained: Any, run_command: Callable[..., Any], tmp_path: Path) -> None:
    run_command(
        "ns-render",
        "interpolate",
        *("--load-config", trained.config, "--output-path", tmp_path / "path", "--output-format", "images"),
        *("--rendered-output-names", "feature_pca", "--interpolation-steps", 2, "--pose-source", "eval"),
        F3RM_EXT_CACHE=str(tmp_path / "empty-cache"),
    ).succeeds()
    assert list((tmp_path / "path").glob("*.jpg"))
    assert not (tmp_path / "empty-cache" / "features").exists()


def test_several_extractors_and_losses(train: Callable[..., Any], tmp_path: Path) -> None:
    run = train(
        tmp_path,
        3,
        *("--pipeline.datamanager.features.extractors", "dense-daisy", "dense-daisy:short_side_px=64"),
        *("--pipeline.model.feature-loss", "cosine", "--pipeline.model.camera-optimizer.mode", "SO3xR3"),
        method="f3rm-ext",
    )
    state = torch.load(next(iter(run.checkpoints.glob("*.ckpt"))), weights_only=True)["pipeline"]
    heads = {key.split(".heads.")[1].split(".")[0] for key in state if ".heads." in key}
    assert heads == {"dense-daisy", "dense-daisy_2"}

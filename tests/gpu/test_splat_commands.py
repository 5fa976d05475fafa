"""`ns-train sugar-ext` on CUDA as a user types it: growth, resuming, start-from, CUDA's allocator, a missing nvcc."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

STEPS = 40
Type = Callable[..., str]
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def command(tiny_capture: Path, device: torch.device) -> Callable[..., list[object]]:
    """`ns-train sugar-ext` on the tiny capture with every part of the schedule, as a list of words."""

    def words(root: Path, *arguments: object) -> list[object]:
        return [
            *("ns-train", "sugar-ext", "--data", tiny_capture, "--output-dir", root),
            *("--experiment-name", "e", "--timestamp", "t", "--machine.device-type", device.type),
            *("--vis", "tensorboard", "--logging.local-writer.enable", "False", "--max-num-iterations", STEPS),
            *("--steps-per-save", STEPS // 2, "--save-only-latest-checkpoint", "False"),
            *("--pipeline.model.num-random", 1000, "--pipeline.model.surface.samples", 1000),
            *("--pipeline.model.surface.prune-opacity", 0.05, "--pipeline.model.densify.every", 5),
            *("--pipeline.datamanager.num-downscales", 0, *arguments),
        ]

    return words


@pytest.fixture(scope="module")
def train_splats(
    type_command: Type, command: Callable[..., list[object]], tmp_path_factory: pytest.TempPathFactory
) -> Train:
    """Runs that command; gives the run's folder, with what was said in said.txt."""

    def train(*arguments: object) -> Path:
        root = tmp_path_factory.mktemp("splats")
        said = type_command(*command(root, *arguments))
        folder = root / "e" / "sugar-ext" / "t"
        (folder / "said.txt").write_text(said)
        return folder

    return train


@pytest.fixture(scope="module")
def run(train_splats: Train) -> Path:
    """A run with the default regularisation and a checkpoint halfway."""
    return train_splats()


def gaussians_of(folder: Path, step: int = STEPS - 1) -> dict[str, torch.Tensor]:
    path = folder / "nerfstudio_models" / f"step-{step:09d}.ckpt"
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)["pipeline"]
    prefix = "_model.gauss_params."
    found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    assert found and all(torch.isfinite(value.float()).all() for value in found.values())
    return found


def test_a_resumed_run_goes_on_where_the_first_one_was(run: Path, train_splats: Train, device: torch.device) -> None:
    resumed = train_splats("--load-dir", run / "nerfstudio_models", "--load-step", STEPS // 2)
    one, two = gaussians_of(run), gaussians_of(resumed)
    if device.type == "cpu":
        torch.testing.assert_close(one["means"], two["means"], atol=1e-5, rtol=1e-3)
    # The order of atomics decides about Gaussians near a threshold.
    assert len(two["means"]) == pytest.approx(len(one["means"]), rel=0.05)
    assert float((one["opacities"].mean() - two["opacities"].mean()).abs()) < 0.1


def test_mcmc_grows_to_its_limit(train_splats: Train) -> None:
    limit = ("--pipeline.model.densify.max-gaussians", 1050)
    folder = train_splats("--pipeline.model.densify.strategy", "mcmc", *limit)
    assert 1000 < len(gaussians_of(folder)["means"]) <= 1050


def test_absgrad_and_antialiasing(train_splats: Train) -> None:
    folder = train_splats("--pipeline.model.densify.absgrad", "True", "--pipeline.model.mip.filter-2d", "True")
    assert len(gaussians_of(folder)["means"]) > 0


@pytest.mark.parametrize("kind", ["checkpoint", "ply"])
def test_a_run_starts_from_splats(
    kind: str, run: Path, train_splats: Train, type_command: Type, tmp_path: Path
) -> None:
    start = run / "nerfstudio_models" / f"step-{STEPS - 1:09d}.ckpt"
    if kind == "ply":
        start = tmp_path / "splats.ply"
        type_command("f3rm-ext", "export", "splats", "--load-config", run / "config.yml", "--output", start)
    folder = train_splats(
        *("--pipeline.model.start-from", start, "--pipeline.model.start-stage", "regularized"),
        *("--pipeline.model.densify.strategy", "none", "--pipeline.model.surface.prune-opacity", 0),
    )
    assert "Starting from" in " ".join((folder / "said.txt").read_text().split())
    assert len(gaussians_of(folder)["means"]) == len(gaussians_of(run)["means"])


def test_mixed_precision_is_turned_off_and_said(train_splats: Train, device: torch.device) -> None:
    folder = train_splats("--mixed-precision", "True")
    gaussians_of(folder)
    if device.type == "cuda":  # Elsewhere there is none in the first place.
        assert "Splats train in single precision" in " ".join((folder / "said.txt").read_text().split())


def test_expandable_segments_take_effect(cuda: torch.device, tiny_capture: Path, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
import torch
from f3rm_ext.method_configs.splat_presets import make_splat_config
config = make_splat_config("sugar-ext")
config.data = config.pipeline.datamanager.data = Path({str(tiny_capture)!r})
config.output_dir, config.experiment_name, config.timestamp = Path({str(tmp_path)!r}), "e", "t"
config.vis = "tensorboard"
config.pipeline.model.memory.optimize_memory = True
config.save_config()
trainer = config.setup(local_rank=0, world_size=1)
trainer.setup()
segments = torch.cuda.memory_snapshot()
assert segments, "nothing is allocated"
print("expandable", all(segment["is_expandable"] for segment in segments))
"""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert "expandable True" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]


def test_a_missing_compiler_is_said_in_one_sentence(
    cuda: torch.device, type_command: Type, command: Callable[..., list[object]], tmp_path: Path
) -> None:
    if importlib.util.find_spec("gsplat.csrc") is not None:
        pytest.skip("gsplat is installed with compiled kernels")
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if not shutil.which("nvcc", path=folder)]
    said = type_command(
        *command(tmp_path / "runs"),
        code=2,
        PATH=os.pathsep.join(folders),
        CUDA_HOME="",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
    )
    assert "gsplat has no kernels here" in " ".join(said.split()) and "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_absolute_gradients_leave_no_memory_behind(cuda: torch.device) -> None:
    from f3rm_ext.splat.gaussians import Ellipsoids
    from f3rm_ext.splat.rasterize import rasterize
    from f3rm_ext.splat.rasterize.camera import Camera

    count = 50_000
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "means": torch.rand(count, 3, generator=generator) - torch.tensor([0.5, 0.5, -2.0]),
        "quats": torch.randn(count, 4, generator=generator),
        "sizes": torch.full((count, 3), 0.01),
        "alphas": torch.full((count,), 0.5),
        "colors": torch.rand(count, 3, generator=generator),
    }
    leaves: dict[str, Any] = {name: value.to(cuda).requires_grad_() for name, value in inputs.items()}
    *shapes, colors = leaves.values()
    K = torch.tensor([[80.0, 0.0, 40.0], [0.0, 80.0, 30.0], [0.0, 0.0, 1.0]], device=cuda)
    camera, held = Camera(torch.eye(4, device=cuda), K, 80, 60), []
    for _ in range(6):
        seen = rasterize(Ellipsoids(*shapes), colors, camera, absgrad=True)
        seen.colors.sum().backward()
        assert seen.means2d.absgrad is not None  # type: ignore[attr-defined]
        del seen
        for leaf in leaves.values():
            leaf.grad = None
        held.append(torch.cuda.memory_allocated(cuda))
    # Four (N, 2) tensors would add 1.6 MB a step.
    assert held[-1] - held[1] < 100_000, held

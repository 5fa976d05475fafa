"""sugar-ext on CUDA from training to evaluation, and what it draws there beside what the CPU draws."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import SceneBox

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.densify import DensifyOptions, make_densifier
from f3rm_ext.splat.model import SplatModel, SplatModelConfig
from f3rm_ext.splat.regularization import make_regularizer
from f3rm_ext.splat.regularization.multiview import NeighbourViews
from f3rm_ext.splat.regularization.options import Mode, RegularizationOptions
from f3rm_ext.splat.schedule import Schedule

STEPS = 100
VISIBLE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
"""Commands of other tests see no GPU."""


@pytest.fixture(scope="module")
def train_splats(
    run_command: Callable[..., Any], tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`ns-train sugar-ext` on the tiny capture, 100 steps; gives the run's config.yml."""

    def train(*arguments: object) -> Path:
        root = tmp_path_factory.mktemp("splats")
        run_command(
            "ns-train",
            "sugar-ext",
            *("--data", tiny_capture, "--output-dir", root, "--experiment-name", "e", "--timestamp", "t"),
            *("--vis", "tensorboard", "--logging.local-writer.enable", "False", "--max-num-iterations", STEPS),
            *("--pipeline.model.num-random", 3000, "--pipeline.model.surface.samples", 5000),
            *("--pipeline.model.surface.prune-opacity", 0.05, "--pipeline.model.densify.every", 10),
            *("--pipeline.datamanager.num-downscales", 0, *arguments),
            fresh=True,
            **VISIBLE,
        ).succeeds()
        return root / "e" / "sugar-ext" / "t" / "config.yml"

    return train


@pytest.fixture(scope="module")
def config(train_splats: Callable[..., Path]) -> Path:
    """A run with every part of the schedule."""
    return train_splats("--pipeline.model.regularization", "dn-consistency")


def state_of(config: Path) -> dict[str, Any]:
    path = config.parent / "nerfstudio_models" / f"step-{STEPS - 1:09d}.ckpt"
    return torch.load(path, map_location="cpu", weights_only=True)["pipeline"]


def test_a_run_ends_with_numbers_and_is_evaluated(
    config: Path, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    for name, value in state_of(config).items():
        if isinstance(value, torch.Tensor):
            assert torch.isfinite(value.float()).all(), name
    out = tmp_path / "eval.json"
    run_command("ns-eval", "--load-config", config, "--output-path", out, fresh=True, **VISIBLE).succeeds()
    metrics = json.loads(out.read_text())["results"]
    assert metrics["psnr"] > 10
    assert 0 < metrics["eval_peak_memory_mib"] <= metrics["train_peak_memory_mib"]


@pytest.mark.parametrize("mode", ["none", "density", "sdf"])
def test_other_regularisations(train_splats: Callable[..., Path], mode: str) -> None:
    state = state_of(train_splats("--pipeline.model.regularization", mode))
    assert all(torch.isfinite(value).all() for key, value in state.items() if "gauss_params" in key)


@pytest.mark.parametrize("arguments", [("--pipeline.model.optimize-memory", "True")])
def test_memory_options(train_splats: Callable[..., Path], arguments: tuple[object, ...]) -> None:
    state = state_of(train_splats(*arguments))
    rest = state["_model.gauss_params.features_rest"]
    assert rest.dtype == torch.float16 and rest.any() and torch.isfinite(rest).all()


def test_both_devices_draw_the_same(config: Path, cuda: torch.device) -> None:
    from f3rm_ext.export.splats import load_splat_run

    run = load_splat_run(config)
    camera = run.photos.cameras[:1]
    assert run.model.device.type == cuda.type
    there = {name: value.cpu() for name, value in run.model.get_outputs_for_camera(camera.to(cuda)).items()}
    here = run.model.to("cpu").get_outputs_for_camera(camera.to("cpu"))
    torch.testing.assert_close(there["rgb"], here["rgb"], atol=2e-3, rtol=0)
    torch.testing.assert_close(there["accumulation"], here["accumulation"], atol=2e-3, rtol=0)


def test_the_filter_and_the_export_do_not_depend_on_the_device(config: Path, tmp_path: Path) -> None:
    from f3rm_ext.export.splats import export_run, load_splat_run
    from f3rm_ext.splat.files import read_splats

    run = load_splat_run(config)
    export_run(run, tmp_path / "cuda.ply")
    run.model.to("cpu")
    export_run(run, tmp_path / "cpu.ply")
    one, two = (read_splats(tmp_path / f"{name}.ply")[0] for name in ("cuda", "cpu"))
    for name, value in one.tensors().items():
        torch.testing.assert_close(two.tensors()[name], value, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("mode", "step", "most"),
    [("none", 601, 3), ("density", 9601, 6), ("dn-consistency", 9601, 6), ("planar", 9601, 6)],
)
def test_a_step_hardly_waits_for_the_gpu(mode: Mode, step: int, most: int, cuda: torch.device) -> None:
    """Between rounds of densification; splatfacto waits about eight times."""
    torch.manual_seed(0)
    model: SplatModel = SplatModelConfig(num_random=2000).setup(
        scene_box=SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])), num_train_data=2, metadata={}
    )
    model.to(cuda).train()
    model.schedule = Schedule.from_options(15_000, RegularizationOptions())
    model.current_sh_degree, model.extent = 3, 1.0
    model.densifier = make_densifier(DensifyOptions(), 1.0)
    model.regularizer = make_regularizer(RegularizationOptions(mode=mode, samples=5000))
    parameters = model.get_param_groups()
    optimizers = {name: torch.optim.Adam(group) for name, group in parameters.items() if name != "features_rest"}
    poses = torch.eye(4)[:3].repeat(2, 1, 1)
    poses[1, 0, 3] = 0.3
    cameras = Cameras(poses, fx=60.0, fy=60.0, cx=32.0, cy=24.0, width=64, height=48)
    model.nearby = NeighbourViews(PinholeCameras.of(cameras), cuda)
    camera = cameras[:1]
    camera.metadata = {"cam_idx": 0}
    batch = {"image": torch.rand(48, 64, 3, device=cuda)}
    for _ in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model.step = step
                outputs = model.get_outputs(camera)
                torch.stack(list(model.get_loss_dict(outputs, batch).values())).sum().backward()
                assert model._rasterization is not None
                model.densifier.step_post_backward(step, model._rasterization, model.gauss_params, optimizers)
                model.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        step += 1
    waits = [str(item.message) for item in said if "synchronizing" in str(item.message)]
    assert len(waits) <= most, waits

"""Pictures on CUDA: the CPU's, at a memory that does not depend on the features' dimension, also when it runs out."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.nerf.model import F3rmModel

MakeModel = Callable[..., F3rmModel]
MakeSpec = Callable[..., FeatureSpec]
MakeCamera = Callable[[int], Cameras]
MIB = 1024**2


def _assert_same_picture(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], atol: float) -> None:
    """Colours agree in all but a few pixels, at silhouettes, where a sample may fall on the other side."""
    for name in ("rgb", "accumulation", "feature_pca"):
        off = (one[name].cpu() - two[name].cpu()).abs().amax(dim=-1)
        assert float((off > atol).float().mean()) < 0.01, f"{name}: {float(off.max()):.4f}"


def test_a_checkpoint_from_the_cpu_renders_the_same_picture(
    make_model: MakeModel, make_spec: MakeSpec, make_camera: MakeCamera, cuda: torch.device, tmp_path: Path
) -> None:
    on_cpu = make_model((make_spec("a", 32),), backend="numba").eval()
    torch.save(on_cpu.state_dict(), tmp_path / "model.ckpt")
    # As ns-viewer opens it: without specs, heads grow from the file; on whatever backend this device has.
    on_cuda = make_model(()).to(cuda).eval()
    on_cuda.load_state_dict(torch.load(tmp_path / "model.ckpt", weights_only=True, map_location="cpu"))
    camera = make_camera(96)
    wanted = on_cpu.get_outputs_for_camera(camera)
    found = on_cuda.get_outputs_for_camera(camera.to(cuda))
    assert found["rgb"].is_cuda and wanted["rgb"].std() > 0.01 and wanted["feature_pca"].std() > 0.01
    _assert_same_picture(found, wanted, atol=1e-2)


def test_a_run_trained_on_the_cpu_opens_on_cuda(trained: Any, cuda: torch.device) -> None:
    from nerfstudio.utils.eval_utils import eval_setup

    def with_torch(config: Any) -> Any:
        config.pipeline.model.backend = "torch"  # half precision, tiny-cuda-nn's, is another matter
        return config

    _, pipeline, _, _ = eval_setup(trained.config, test_mode="test", update_config_callback=with_torch)
    assert pipeline.model.device.type == "cuda"
    camera = pipeline.datamanager.eval_dataset.cameras[0:1]  # type: ignore[attr-defined]
    pictures = []
    for device in (cuda, torch.device("cpu")):
        pipeline.model.to(device).eval()
        pictures.append(pipeline.model.get_outputs_for_camera(camera.to(device)))
    assert pictures[1]["rgb"].std() > 0.02
    _assert_same_picture(pictures[0], pictures[1], atol=2e-2)


def _peak_mib(model: F3rmModel, camera: Cameras, device: torch.device) -> float:
    model = model.to(device).eval()
    with torch.no_grad():
        model.get_outputs_for_camera(camera)  # libraries make their work spaces the first time
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        outputs = model.get_outputs_for_camera(camera)
    assert outputs["feature_pca"].shape == (camera.height.item(), camera.width.item(), 3)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def test_memory_of_a_picture_does_not_depend_on_the_feature_dimension(
    make_model: MakeModel, make_spec: MakeSpec, make_camera: MakeCamera, cuda: torch.device
) -> None:
    camera = make_camera(512).to(cuda)
    narrow, wide = (_peak_mib(make_model((make_spec("a", dim),)), camera, cuda) for dim in (64, 768))
    assert narrow > 1
    # All 768 channels of all pixels would be 768 MiB, those of one chunk 96 MiB.
    assert wide - narrow < 4


def test_memory_of_training_grows_by_rays_times_dimension_not_by_samples(
    make_model: MakeModel, make_spec: MakeSpec, make_rays: Callable[[int], Any], cuda: torch.device
) -> None:
    peaks = []
    for dim in (64, 768):
        model = make_model((make_spec("a", dim),), num_samples=48).to(cuda).train()
        batch = {"image": torch.rand(4096, 3, device=cuda), "features": {"a": torch.rand(2048, dim, device=cuda)}}
        peak = 0.0
        for _ in range(2):
            rays = make_rays(4096).to(cuda)
            torch.cuda.reset_peak_memory_stats(cuda)
            before = torch.cuda.memory_allocated(cuda)
            outputs = model(rays)
            losses = model.get_loss_dict(outputs, batch, model.get_metrics_dict(outputs, batch))
            torch.stack(list(losses.values())).sum().backward()
            peak = (torch.cuda.max_memory_allocated(cuda) - before) / MIB
            del outputs, losses, rays
        peaks.append(peak)
    # 2048 rays × 704 more channels × 4 bytes = 5.5 MiB per copy; per sample it would be 264 MiB.
    assert peaks[1] - peaks[0] < 60


@pytest.fixture
def limit_memory(cuda: torch.device) -> Iterator[Callable[[float], None]]:
    """Lets torch allocate only so many MiB more than it holds now."""
    total = torch.cuda.get_device_properties(cuda).total_memory

    def limit(extra_mib: float) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(cuda) + extra_mib * MIB) / total, cuda)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, cuda)


def test_running_out_of_memory_halves_the_chunk_and_finishes_the_picture(
    make_model: MakeModel,
    make_spec: MakeSpec,
    make_camera: MakeCamera,
    cuda: torch.device,
    limit_memory: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    camera = make_camera(256).to(cuda)
    whole = 256 * 256
    model = make_model((make_spec("a", 64),), eval_num_rays_per_chunk=whole).to(cuda).eval()
    peak = _peak_mib(model, camera, cuda)
    wanted = {name: value.cpu() for name, value in model.get_outputs_for_camera(camera).items()}
    assert model.chunked.chunk == whole, "the picture fits without a limit"
    limit_memory(peak / 3)
    found = model.get_outputs_for_camera(camera)
    assert whole / 64 <= model.chunked.chunk < whole
    assert "Out of memory" in capsys.readouterr().out
    _assert_same_picture(found, wanted, atol=1e-3)
    # The next picture starts with what fitted, and says nothing.
    chunk = model.chunked.chunk
    model.get_outputs_for_camera(camera)
    assert model.chunked.chunk == chunk and "Out of memory" not in capsys.readouterr().out


def test_normals_on_cuda_are_those_of_the_cpu(
    make_model: MakeModel, make_camera: MakeCamera, cuda: torch.device
) -> None:
    camera = make_camera(48)
    on_cpu = make_model(render_normals=True, backend="torch").eval()
    wanted = on_cpu.get_outputs_for_camera(camera)["normals"] * 2 - 1
    found = on_cpu.to(cuda).get_outputs_for_camera(camera.to(cuda))["normals"].cpu() * 2 - 1
    cosine = (wanted * found).sum(dim=-1)
    assert float((cosine < 0.99).float().mean()) < 0.02

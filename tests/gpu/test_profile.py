"""The tensor profiler on a GPU: its categories against torch's allocator, and the driver's count beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from f3rm_ext.profiling.profile_file import NAME, read_profile

METHODS = {
    "f3rm-ext-lite": ("--pipeline.datamanager.train-num-rays-per-batch", 1024),
    "sugar-ext-lite": ("--pipeline.model.num-random", 20_000, "--pipeline.datamanager.num-downscales", 0),
}


@pytest.mark.parametrize("method", METHODS)
def test_categories_explain_what_torch_has_allocated(
    type_command: Callable[..., str], device: torch.device, tiny_capture: Path, tmp_path: Path, method: str
) -> None:
    type_command(
        *("ns-train", method, "--data", tiny_capture, "--output-dir", tmp_path, "--experiment-name", "e"),
        *("--vis", "tensorboard", "--machine.device-type", device.type, "--max-num-iterations", 30),
        *("--timestamp", "t", "--profile-tensors", "True", "--profile-tensors-every", 10, *METHODS[method]),
        *(("--pipeline.datamanager.features.cache-dir", tmp_path / "cache") if method.startswith("f3rm") else ()),
    )
    profile = read_profile(tmp_path / "e" / method / "t" / NAME)
    assert profile.end == "finished" and profile.device == device.type
    for snapshot in profile.snapshots:
        assert snapshot.suspect == []
        if device.type == "cuda":
            assert snapshot.allocated is not None and snapshot.device_used is not None, "is NVML there?"
            # Torch rounds every tensor up to 512 bytes; kernels of libraries may keep workspace.
            assert snapshot.total <= snapshot.allocated <= 1.1 * snapshot.total + (64 << 20)
            assert snapshot.device_used >= (snapshot.reserved or 0)
    assert set(profile.peaks()) >= {"train", "between steps"}
    assert min(profile.peaks().values()) > 0

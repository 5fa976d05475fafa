"""The interface: which backend runs, what it refuses, and that it is light to import."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.rasterize import Rasterization, resolve_backend


def test_backends_by_device() -> None:
    cpu, cuda, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")
    assert resolve_backend("auto", cpu) == "numba"
    assert resolve_backend("auto", cuda) == "gsplat"
    assert resolve_backend("auto", other) == "torch"
    assert resolve_backend("torch", cuda) == "torch"


@pytest.mark.parametrize(("backend", "device"), [("gsplat", "cpu"), ("numba", "cuda")])
def test_a_backend_that_cannot_work_there_is_refused(backend: Any, device: str) -> None:
    with pytest.raises(ConfigError, match=f"'{backend}' works on"):
        resolve_backend(backend, torch.device(device))


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_shapes_and_graph(backend: Any, make_scene: Any) -> None:
    scene = make_scene(channels=5)
    rendered = scene.draw(scene.leaves(torch.float32), backend=backend)
    assert isinstance(rendered, Rasterization)
    assert rendered.colors.shape == (29, 37, 5)
    assert rendered.depth.shape == rendered.alpha.shape == (29, 37)
    assert rendered.radii.dtype == torch.int32 and not rendered.radii.requires_grad
    rendered.means2d.retain_grad()
    rendered.colors.sum().backward()
    assert rendered.means2d.grad is not None and rendered.means2d.grad.shape == (40, 2)
    assert not hasattr(rendered.means2d, "absgrad")  # it was not asked for


def test_importing_is_cheap() -> None:
    code = "import sys, f3rm_ext.splat.rasterize; sys.exit('numba' in sys.modules or 'gsplat' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

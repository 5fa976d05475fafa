"""A pretended GPU for the tests, and small models on it; see :mod:`pretend.tensors`."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox

from f3rm_ext.nerf import hash_backends
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig, ProposalOptions

sys.path.insert(0, str(Path(__file__).parent))  # for the package `pretend`, which benchmarks use too

from pretend.gsplat_kernels import Kernels, gsplat_kernels
from pretend.gsplat_versions import VERSIONS, download, imported_from
from pretend.steps import write_capture
from pretend.tensors import autocast, pretended


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A CUDA device that is none; gradients are off."""
    with pytest.MonkeyPatch.context() as patch, pretended() as device:
        patch.setitem(hash_backends._TRIALS, "triton", _no_kernels)
        hash_backends.forget()
        try:
            yield device
        finally:
            hash_backends.forget()


def _no_kernels(device: torch.device) -> None:
    """A kernel on a real GPU would read from nowhere."""
    raise RuntimeError("these tensors are none")


@pytest.fixture
def cuda_autocast() -> Callable[..., AbstractContextManager[None]]:
    """``torch.autocast("cuda")``, which torch turns off where there is no GPU."""
    return autocast


@pytest.fixture(scope="session")
def noise_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six photos of noise with labels."""
    return write_capture(tmp_path_factory.mktemp("noise") / "capture")


@pytest.fixture
def small_grid() -> GridOptions:
    """A hash grid of a few thousand rows."""
    return GridOptions(num_levels=4, features_per_level=2, base_res=4, max_res=32, log2_hashmap_size=10)


@pytest.fixture
def small_field(cuda: torch.device, small_grid: GridOptions) -> F3rmModel:
    """A radiance field of five images, without features."""
    torch.manual_seed(0)
    proposals = (ProposalOptions(num_samples=16, grid=small_grid),)
    config = F3rmModelConfig(grid=small_grid, feature_grid=small_grid, proposals=proposals, num_samples=12)
    box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
    model: F3rmModel = config.setup(scene_box=box, num_train_data=5, metadata={})
    return model.to(cuda)


@pytest.fixture
def make_rays() -> Callable[..., RayBundle]:
    """Rays from the origin into all directions, of five images in turn."""

    def make(count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> RayBundle:
        directions = torch.randn(count, 3, generator=torch.Generator().manual_seed(2))
        return RayBundle(
            origins=torch.zeros(count, 3, device=device, dtype=dtype),
            directions=torch.nn.functional.normalize(directions, dim=-1).to(device, dtype),
            pixel_area=torch.full((count, 1), 1e-4, device=device, dtype=dtype),
            camera_indices=(torch.arange(count) % 5)[:, None].to(device),
        )

    return make


@pytest.fixture(scope="module", params=VERSIONS)
def gsplat_version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A version of gsplat; its Python code is what is imported."""
    if request.param == importlib.metadata.version("gsplat"):
        yield request.param
        return
    folder = tmp_path_factory.mktemp("gsplat")
    reason = download(request.param, folder)
    if reason:
        pytest.skip(f"gsplat {request.param} cannot be had from the package index: {reason}")
    with imported_from(folder):
        yield request.param


@pytest.fixture
def kernels(gsplat_version: str) -> Iterator[Kernels]:
    """Its kernels, on a pretended GPU."""
    import gsplat

    assert gsplat.__version__ == gsplat_version
    with pretended("backward"), gsplat_kernels() as found:
        yield found

"""CUDA tensors without CUDA: they say they are on a GPU, and hold their numbers in the memory of the CPU.

Where torch's FakeTensorMode has shapes and types only, these have values too, so that what CUDA code computes (under
CUDA's autocast, in half precision) can be compared with the truth. Operators on tensors of both devices and numpy views
of CUDA tensors fail as they do on a GPU. There is no backward pass: autograd asks CUDA's driver for its streams.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from f3rm_ext.nerf import hash_backends
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig, ProposalOptions

aten = torch.ops.aten
BOTH_DEVICES = (aten.copy_, aten._to_copy, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
"""Operators that take tensors of both devices."""


class PretendCuda(torch.Tensor):
    """A tensor that says it is on ``cuda:0``."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "PretendCuda":
        """Makes one around a CPU tensor."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=torch.device("cuda", 0)
        )
        made.held = held
        return made

    def numpy(self, *, force: bool = False) -> Any:
        """What torch says of real ones."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        """Values, as of real ones."""
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendCuda({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator on what the tensors hold."""
        return _run(function, args, kwargs or {})


class PretendCudaMode(TorchDispatchMode):
    """While this is entered, tensors can be made on and moved to ``cuda``."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator on what the tensors hold."""
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator, on the CPU; its results are on CUDA where its tensors are or where it is told so."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [isinstance(leaf, PretendCuda) for leaf in tensors]
    operator = function.overloadpacket
    if any(there) and operator not in BOTH_DEVICES:
        # As on a GPU, a single number on the CPU goes with everything.
        if any(not here and leaf.dim() for leaf, here in zip(tensors, there, strict=True)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {function} got cuda:0 and cpu.")
    wanted = kwargs.get("device")
    if wanted is None:
        on_cuda = there[0] if operator is aten.copy_ else any(there)
    else:
        on_cuda = torch.device(wanted).type == "cuda"
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
    held_args, held_kwargs = pytree.tree_map_only(PretendCuda, lambda leaf: leaf.held, (args, kwargs))
    found = function(*held_args, **held_kwargs)
    if not on_cuda:
        return found
    # An operator that changes its input gives that very input back.
    inputs = {id(leaf.held): leaf for leaf in tensors if isinstance(leaf, PretendCuda)}
    return pytree.tree_map_only(torch.Tensor, lambda leaf: _found(leaf, inputs), found)


def _found(held: torch.Tensor, inputs: dict[int, PretendCuda]) -> PretendCuda:
    return inputs[id(held)] if id(held) in inputs else PretendCuda(held)


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A CUDA device that is none; gradients are off."""
    torch._C._ensureCUDADeviceGuardSet()
    lifted = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), PretendCudaMode():
        # As FakeTensorMode does: torch is not to look for a driver.
        torch._C._set_only_lift_cpu_tensors(True)
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        # A module that is moved gets new parameters: the old ones would only take over the device.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        patch.setitem(hash_backends._TRIALS, "triton", _no_kernels)
        hash_backends.forget()
        try:
            yield torch.device("cuda", 0)
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)
            hash_backends.forget()


def _no_kernels(device: torch.device) -> None:
    """A kernel on a real GPU would read from nowhere."""
    raise RuntimeError("these tensors are none")


@contextmanager
def _autocast(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.fixture
def cuda_autocast() -> Callable[..., AbstractContextManager[None]]:
    """``torch.autocast("cuda")``, which torch turns off where there is no GPU."""
    return _autocast


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

"""Which kernels are used: numba's on the CPU; on CUDA those of Triton, where it is installed and can compile them.

A module of Triton kernels has a function ``try_out``, which runs each of them on a few rows and checks the results.
Without a GPU, Triton's interpreter runs them on tensors of the CPU.
"""

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.memory.shapes import kernel_device, lacks_values
from f3rm_ext.utils.kernel_trials import explain_choice, reason_against


def choose_kernels(modules: tuple[str, str], *tensors: Tensor) -> Any:
    """Returns the module of kernels for float32 tensors, numba's or Triton's; None where torch computes.

    Tensors without values get numba's module, which only allocates then: what both do.

    Args:
        modules: names of numba's module and of Triton's, which have the same functions.
    """
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return None
    if all(lacks_values(tensor) or kernel_device(tensor) == "cpu" for tensor in tensors):
        return importlib.import_module(modules[0])
    return find_kernels(modules[1], tensors[0].device)


class KernelLoss(torch.autograd.Function):
    """A loss whose kernel computes its gradients with it; differentiable once.

    The forward pass saves the gradients by its first arguments, which the backward pass only multiplies; an empty one
    stands for no gradient.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        known = [grads[0] * saved if saved.numel() else None for saved in ctx.saved_tensors]
        return *known, *[None] * (len(ctx.needs_input_grad) - len(known))


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel of Triton on the device of its tensors, which it gets contiguous."""
    arguments = tuple(value.contiguous() if isinstance(value, Tensor) else value for value in arguments)
    device = next(value for value in arguments if isinstance(value, Tensor))
    if min(programs):
        with torch.cuda.device_of(device):
            kernel[programs](*arguments, **constants)


def find_kernels(module: str, device: torch.device) -> Any:
    """Returns a module of Triton kernels if they work on a device, else None. Says once why they do not."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _load_kernels(module, torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _load_kernels(module: str, index: int) -> Any:
    device = torch.device("cuda", index)
    reason = reason_against("triton", lambda: importlib.import_module(module).try_out(device))
    if reason is None:
        return importlib.import_module(module)
    _explain(reason, index)
    return None


@lru_cache
def _explain(reason: str, index: int) -> None:
    explain_choice("Splats", torch.device("cuda", index), "torch", {"triton": reason})

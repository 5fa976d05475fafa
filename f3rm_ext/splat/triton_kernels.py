"""Whether kernels written for Triton are used: on CUDA, where Triton is installed and can compile them.

A module of kernels has a function ``try_out``, which runs each of them on a few rows and checks the results. Without a
GPU, Triton's interpreter runs them on tensors of the CPU.
"""

import importlib
from functools import lru_cache
from typing import Any

import torch

from f3rm_ext.utils.kernel_trials import explain_choice, reason_against


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

"""Whether kernels written for Triton are used: on CUDA, where Triton is installed and can compile them.

Triton comes with torch on Linux and needs a C compiler, but no CUDA toolkit. A module of kernels has a function
``try_out``, which runs each of them on a few rows and checks the results. Without a GPU, Triton's interpreter runs them
on tensors of the CPU.
"""

import importlib
from functools import lru_cache
from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.markup import escape

from f3rm_ext.errors import reason_of


def find_kernels(module: str, device: torch.device) -> Any:
    """Returns a module of Triton kernels if they work on a device, else None. Says once why they do not.

    Args:
        module: full name of the module.
        device: of the tensors.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _tried(module, torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _tried(module: str, index: int) -> Any:
    try:
        found = importlib.import_module(module)
        with torch.inference_mode(False):
            found.try_out(torch.device("cuda", index))
    except ModuleNotFoundError as error:
        _explain(f"{error.name} is not installed")
    except Exception as error:  # of compilers and drivers
        _explain(reason_of(error)[:300])
    else:
        return found
    return None


@lru_cache
def _explain(reason: str) -> None:
    CONSOLE.log(
        f"[yellow]{escape(f'Splats train on plain torch instead of Triton, which is slower ({reason}).')} Triton comes "
        "with PyTorch on Linux and needs a C compiler such as gcc."
    )

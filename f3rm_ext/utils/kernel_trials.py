"""Whether kernels that are loaded or compiled at first use work here: each is tried before it is taken.

A package that can be imported need not work: tiny-cuda-nn may be built for another GPU, and Triton may find no C
compiler. Triton comes with PyTorch on Linux and needs no CUDA toolkit.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.markup import escape

from f3rm_ext.errors import reason_of

Kernels = Literal["tcnn", "triton"]
NOT_INSTALLED = "it is not installed"
NAMES: dict[str, str] = {"tcnn": "tiny-cuda-nn", "triton": "Triton", "torch": "plain torch, which is slower"}
REMEDIES: dict[Kernels, str] = {
    "tcnn": "build it for this GPU (github.com/NVlabs/tiny-cuda-nn)",
    "triton": "put it in order (it comes with PyTorch on Linux, and needs a C compiler such as gcc and Python.h)",
}
"""What to do where they do not work, as the middle of a sentence."""
_PACKAGES: dict[Kernels, str] = {"tcnn": "tinycudann", "triton": "triton"}


def reason_against(kernels: Kernels, trial: Callable[[], None]) -> str | None:
    """Returns why kernels do not work here, as the middle of a sentence; None if they do.

    Args:
        kernels: what they are made with.
        trial: runs each of them on a few rows, and raises if one fails or its results are wrong.
    """
    try:
        with torch.inference_mode(False):
            trial()
    except ModuleNotFoundError as error:
        return NOT_INSTALLED if error.name == _PACKAGES[kernels] else str(error)
    except Exception as error:  # of loaders, compilers and drivers
        return reason_of(error)[:300]
    return None


def explain_choice(what: str, device: torch.device, taken: str, reasons: Mapping[Kernels, str]) -> None:
    """Says that faster kernels are passed over, and why.

    Args:
        what: runs on the device, in the plural.
        device: with its index.
        taken: key of :data:`NAMES`.
        reasons: see :func:`reason_against`; at least one.
    """
    why = " and ".join(f"{NAMES[name]} does not work here ({reason})" for name, reason in reasons.items())
    advice = " `f3rm-ext doctor` says what to do." if taken == "torch" else ""
    CONSOLE.log(f"[yellow]{escape(f'{what} on {device} run on {NAMES[taken]}, since {why}.{advice}')}")

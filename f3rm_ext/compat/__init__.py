"""The one place that knows versions: workarounds for torch, nerfstudio 1.1.5, viser and gsplat.

Here are torch and numpy (checkpoints, devices, CUDA's allocator) and nerfstudio (registered methods, help, warnings);
gsplat and nerfstudio's viewer on viser have modules of their own. Importing this package imports only the standard
library.
"""

import functools
import importlib.metadata
import inspect
import os
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from f3rm_ext.compat.gsplat import (
    check_gsplat_kernels,
    describe_gsplat,
    has_gsplat_kernels,
    tolerate_missing_gsplat,
)
from f3rm_ext.compat.later import shorten_imports, shorten_registration
from f3rm_ext.compat.viewer import (
    LOCAL_HOST,
    end_viewer_threads_at_exit,
    interrupt_at_calls,
    is_new_page,
    is_viewer_thread,
    local_viewer_host,
    open_server,
    place_page,
    release_viewer_locks,
    render_in_passes,
    show_splats,
    viewer_cameras,
    viewer_datamanager,
    viewer_interrupts,
    viewer_lock,
    viewer_redraw,
    viewer_show_output,
    viewer_start_view,
)
from f3rm_ext.errors import ConfigError, reason_of

if TYPE_CHECKING:
    import torch
    from nerfstudio.engine.trainer import TrainerConfig

_LIST_ITEM = r"(?:[-*] |\d+\. )"
"""Beginning of a list item in a docstring, as a regular expression."""


# --- checkpoints -----------------------------------------------------------------------------------------------------


def register_safe_globals() -> None:
    """Lets ``torch.load(weights_only=True)`` read checkpoints that nerfstudio writes.

    Nerfstudio's schedulers compute learning rates with numpy, so its checkpoints hold numpy scalars, which torch ≥ 2.6
    refuses by default. Only those types are allowed; ``weights_only`` stays on. Safe to call twice.
    """
    import numpy as np
    import torch
    from torch.torch_version import TorchVersion

    if not hasattr(torch.serialization, "add_safe_globals"):
        return  # torch < 2.4 has no list of safe globals, and loads with weights_only=False by default
    try:
        from numpy._core import multiarray  # numpy 2
    except ImportError:
        from numpy.core import multiarray
    scalar = multiarray.scalar  # type: ignore[attr-defined]
    allowed: list[Any] = [np.dtype, np.dtypes.Float64DType, np.dtypes.Float32DType, np.dtypes.Int64DType]
    if TorchVersion(torch.__version__) < "2.6":
        # It takes (object, name) pairs without complaint, and fails over them where a file has a type of its own.
        allowed.append(scalar)
    else:
        # Both names, so that a checkpoint written with numpy 1 can be read with numpy 2 and vice versa.
        allowed += [(scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar")]
    torch.serialization.add_safe_globals(allowed)


# --- configs ---------------------------------------------------------------------------------------------------------


@functools.cache
def registered_methods() -> "Mapping[str, TrainerConfig]":
    """Returns the methods of installed packages by name, without nerfstudio's own, whose import takes seconds."""
    from nerfstudio.plugins.registry import discover_methods

    return discover_methods()[0]


def method_packages() -> frozenset[str]:
    """Returns the top-level packages whose configs a run may contain: nerfstudio's, ours and registered ones.

    Imports all registered methods and dataparsers.
    """
    from nerfstudio.configs import dataparser_configs

    registered_methods()
    groups = ("nerfstudio.method_configs", "nerfstudio.dataparser_configs", "f3rm_ext.extractors")
    modules = [point.module for group in groups for point in importlib.metadata.entry_points(group=group)]
    for variable in ("NERFSTUDIO_METHOD_CONFIGS", "NERFSTUDIO_DATAPARSER_CONFIGS"):
        definitions = os.environ.get(variable, "").split(",")
        modules += [definition.partition("=")[2].partition(":")[0] for definition in definitions if definition]
    return frozenset({"nerfstudio", "f3rm_ext", *(module.partition(".")[0] for module in modules)} - {""})


# --- devices ---------------------------------------------------------------------------------------------------------


def has_cuda() -> bool:
    """Returns whether torch sees a CUDA GPU, without starting the CUDA runtime if that can be avoided."""
    import torch

    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def default_device_type() -> str:
    """Returns ``cuda`` if there is a CUDA GPU, otherwise ``cpu``.

    Never Apple's ``mps``, whose kernels do not cover everything that nerfstudio uses: users have to choose it.
    """
    return "cuda" if has_cuda() else "cpu"


def open_device(name: str = "auto") -> "torch.device":
    """Returns a device by name, once it has shown that it computes; auto is the GPU if there is one.

    Raises:
        ConfigError: there is no such device, or it does not work.
    """
    import torch

    try:
        device = torch.device(default_device_type() if name == "auto" else name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"The device {name} cannot be used ({reason_of(error)}): use cpu.") from error
    return device


def check_device(device_type: str, num_devices: int = 1) -> None:
    """Checks that this machine has the requested devices.

    Raises:
        ConfigError: the machine has no such device, or not that many.
    """
    import torch

    if num_devices < 1:
        raise ConfigError(
            f"The number of devices is {num_devices}, but training needs one: use --machine.num-devices 1."
        )
    if device_type == "cuda":
        if not has_cuda():
            why = "this PyTorch is built without it" if torch.version.cuda is None else "PyTorch sees no such GPU here"
            raise ConfigError(
                f"The device cuda is not available, because {why}: use --machine.device-type cpu, "
                "or run `f3rm-ext doctor` to see what is missing."
            )
        if num_devices > torch.cuda.device_count():
            raise ConfigError(
                f"--machine.num-devices is {num_devices}, but there are {torch.cuda.device_count()} CUDA devices: "
                f"use --machine.num-devices {torch.cuda.device_count()}."
            )
    elif device_type == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(
                "The device mps is not available, because this machine has no Apple GPU that PyTorch can use: "
                "use --machine.device-type cpu."
            )
    elif num_devices > 1:
        raise ConfigError(
            f"--machine.num-devices is {num_devices}, but nerfstudio starts several processes with CUDA only, not with "
            f"{device_type}: use --machine.num-devices 1, or let `torchrun --nproc-per-node {num_devices} --no-python "
            "ns-train ...` start them."
        )


def autocast_dtype(device_type: str) -> "torch.dtype":
    """Returns the type in which autocast computes matrix products on a device; float32 where autocast is off."""
    import torch

    if hasattr(torch, "get_autocast_dtype"):  # torch ≥ 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float32
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else torch.float32
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else torch.float32


def has_bfloat16_matrix_units() -> bool:
    """Returns whether this CPU multiplies bfloat16 matrices in hardware (AMX), so that they are faster than float32."""
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):
        return False  # older torch cannot tell
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def set_cuda_allocator(settings: str) -> bool:
    """Changes settings of CUDA's allocator while CUDA is already running.

    Args:
        settings: as in ``PYTORCH_CUDA_ALLOC_CONF``. Give all of them: some versions of torch reset the others.

    Returns:
        Whether torch accepted them.
    """
    import torch

    try:
        if hasattr(torch._C, "_accelerator_setAllocatorSettings"):  # torch ≥ 2.9
            torch._C._accelerator_setAllocatorSettings(settings)
        else:
            torch.cuda.memory._set_allocator_settings(settings)
    except (AttributeError, RuntimeError, ValueError):
        return False
    return True


# --- help ------------------------------------------------------------------------------------------------------------


def join_help_lines() -> None:
    """Has tyro wrap help texts to the terminal.

    tyro 1.0 takes the docstring below a field as it stands in the source, where every line but the first is indented,
    and keeps each of these line breaks. Here lines are joined first; empty lines and lists stay. Safe to call twice.
    """
    from tyro import _strings

    # A private function of tyro: where it is gone, help is merely ragged.
    if getattr(_strings, "remove_single_line_breaks", _join_lines) is not _join_lines:
        _strings.remove_single_line_breaks = _join_lines


def _join_lines(helptext: str) -> str:
    """Joins the lines of each paragraph of a docstring, except list items and indented lines (commands)."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(helptext)):
        has_list = re.search(rf"^{_LIST_ITEM}", paragraph, re.MULTILINE) is not None
        line_break = rf"\s*\n\s*(?!{_LIST_ITEM})" if has_list else r"[ ]*\n(?! )"
        paragraphs.append(re.sub(line_break, " ", paragraph))
    return "\n\n".join(paragraphs)


# --- noise -----------------------------------------------------------------------------------------------------------


def quiet_known_warnings() -> None:
    """Silences warnings of other packages that say nothing to users of this one."""
    # Cameras are indexed with lists, which torch has deprecated since 2.1 but still supports.
    warnings.filterwarnings("ignore", message="Using a non-tuple sequence", module=r"nerfstudio\.cameras")
    # Where an old TBB is installed, numba says so and takes OpenMP.
    warnings.filterwarnings("ignore", message=".*The TBB threading layer requires", module=r"numba\.")

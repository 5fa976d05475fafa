"""Triton's kernels pass the trials by which they are chosen; run by tests/cuda_contract/test_splat_triton.py."""

import importlib

import pytest
import torch

from f3rm_ext.splat import losses
from f3rm_ext.splat.memory import packed
from f3rm_ext.splat.regularization import field, kernel_functions


@pytest.mark.parametrize(
    "module",
    [
        losses.KERNELS[1],
        packed.TRITON_KERNELS,
        field.TRITON_KERNELS,
        kernel_functions.PLANES[1],
        kernel_functions.VIEWS[1],
    ],
)
def test_the_trial(module: str) -> None:
    importlib.import_module(module).try_out(torch.device("cpu"))

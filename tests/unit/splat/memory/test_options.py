"""What the memory options come to, and the allocator's settings."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from f3rm_ext.splat.memory.allocator import clear_cache, count_fitting_rows, request_expandable_segments
from f3rm_ext.splat.memory.options import MemoryOptions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("float32", "float32", False)),
        ({"optimize_memory": True}, ("float16", "bfloat16", True)),
        (
            {"optimize_memory": True, "sh_storage": "float32", "sh_moments": "int8", "expandable_segments": False},
            ("float32", "int8", False),
        ),
    ],
)
def test_optimize_memory_decides_what_is_left_at_auto(options: dict[str, Any], expected: tuple[str, str, bool]) -> None:
    resolved = MemoryOptions(**options)
    assert (resolved.storage, resolved.moments, resolved.grow_segments) == expected
    assert resolved.sh_dtype == getattr(torch, expected[0]) and resolved.clear_every == 0


OLD, NEW, SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "expandable_segments:True"


@pytest.mark.parametrize(
    ("given", "answer", "after"),
    [
        ({}, "set", {OLD: SEGMENTS}),
        ({OLD: SEGMENTS}, "kept", {OLD: SEGMENTS}),
        ({NEW: "max_split_size_mb:128"}, "set", {NEW: f"max_split_size_mb:128,{SEGMENTS}"}),
        ({OLD: "expandable_segments:False"}, "kept", {OLD: "expandable_segments:False"}),
        ({OLD: "backend:cudaMallocAsync"}, "kept", {OLD: "backend:cudaMallocAsync"}),
        # Newer torch reads the second where both are there, older torch knows the first alone.
        ({OLD: "a:64", NEW: "a:128"}, "set", {OLD: f"a:64,{SEGMENTS}", NEW: f"a:128,{SEGMENTS}"}),
    ],
)
def test_expandable_segments_are_added_to_the_users_settings(
    environment: pytest.MonkeyPatch, given: dict[str, str], answer: str, after: dict[str, str]
) -> None:
    for name, value in given.items():
        environment.setenv(name, value)
    assert request_expandable_segments() == answer
    assert {name: os.environ[name] for name in (OLD, NEW) if name in os.environ} == after


@pytest.mark.parametrize("obeys", [True, False])
def test_once_cuda_runs_torch_is_asked(environment: pytest.MonkeyPatch, obeys: bool) -> None:
    # tiny-cuda-nn, for one, starts CUDA when it is imported.
    asked: list[str] = []
    environment.setenv(OLD, "max_split_size_mb:64")
    environment.setattr(torch.cuda, "is_initialized", lambda: True)
    environment.setattr("f3rm_ext.compat.set_cuda_allocator", lambda settings: asked.append(settings) or obeys)
    assert request_expandable_segments() == ("set" if obeys else "late")
    assert asked == [f"max_split_size_mb:64,{SEGMENTS}"]
    assert os.environ[OLD] == (asked[0] if obeys else "max_split_size_mb:64")


def test_other_systems_have_no_such_segments(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(sys, "platform", "win32")
    assert request_expandable_segments() == "unsupported"


def test_the_cache_is_cleared_on_cuda_alone_and_on_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append(step))
    for step in range(30):
        clear_cache(step, 10, torch.device("cuda", 0))
        clear_cache(step, 10, torch.device("cpu"))
        clear_cache(step, 0, torch.device("cuda", 0))
    assert cleared == [9, 19, 29]


def test_rows_fit_in_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, set_gpu_memory: Callable[..., None]
) -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_gpu_memory(3600, 10_000, reserved=700, allocated=300)
    assert count_fitting_rows(cuda, 10, 5, 1000) == 100
    assert count_fitting_rows(cuda, 10, 200, 1000) == 200 and count_fitting_rows(cuda, 10, 5, 50) == 50
    assert count_fitting_rows(cpu, 10, 5, 1000) == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert count_fitting_rows(cuda, 10, 5, 1000) == 5

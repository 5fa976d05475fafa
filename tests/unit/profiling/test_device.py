"""NVML, with a pretended library: sampling, the right device, spills, and going on without it."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from f3rm_ext.profiling import device as module
from f3rm_ext.profiling.device import DeviceMemory, DeviceSampler, judge_spill, nvml_reader, start_sampler

GIB = 1 << 30
CUDA = torch.device("cuda:1")


class FakeNvml(SimpleNamespace):
    """The functions of pynvml that are used, for three GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(asked=[], started=False)
        self.used = {0: 1 * GIB, 1: 2 * GIB, 2: 3 * GIB}
        self.ids = {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2}

    def nvmlInit(self) -> None:
        self.started = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.ids:
            raise self.NVMLError("Not Found")
        return self.ids[uuid]

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        assert self.started
        return SimpleNamespace(used=self.used[handle], total=24 * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    return fake


def test_the_device_is_that_of_torch(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml_reader(CUDA)().used == 2 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert nvml_reader(CUDA)().used == 1 * GIB, "CUDA numbers the visible devices only"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-c")
    assert nvml_reader(CUDA)().used == 3 * GIB
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="b"))
    assert nvml_reader(CUDA)() == DeviceMemory(2 * GIB, 24 * GIB), "the UUID decides"


def test_a_peak_between_two_records_is_not_missed() -> None:
    high, sampled = threading.Event(), threading.Event()

    def read() -> DeviceMemory:
        if high.is_set():
            sampled.set()
            return DeviceMemory(9, 10)
        return DeviceMemory(1, 10)

    sampler = DeviceSampler(read, period_s=0.001)
    try:
        assert sampler.take_peak() == 1
        high.set()
        assert sampled.wait(10)
        sampled.clear()
        assert sampled.wait(10), "the first of these samples is recorded by now"
        high.clear()
        assert sampler.take_peak() == 9
        assert sampler.take_peak() == 1
    finally:
        sampler.close()


def test_a_driver_that_goes_away_ends_the_sampling_only() -> None:
    answers = iter([DeviceMemory(1, 10)])

    def read() -> DeviceMemory:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("GPU is lost") from None

    sampler = DeviceSampler(read, period_s=60.0)
    assert sampler.take_peak() == 0 and sampler.problem == "GPU is lost"
    sampler.close()


def test_without_nvml_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler, problem = start_sampler(CUDA)
    assert sampler is None and "install nvidia-ml-py" in problem
    assert start_sampler(torch.device("cpu")) == (None, "")


def test_a_sampler_is_started_where_nvml_works(nvml: FakeNvml) -> None:
    sampler, problem = start_sampler(CUDA)
    assert sampler is not None and not problem
    assert sampler.now.total == 24 * GIB
    sampler.close()


@pytest.mark.parametrize(
    ("used", "reserved", "spills", "verdict"),
    [
        (8, 6, True, ("none", 0)),
        (23.9, 20, True, ("unknown", 0)),
        (23.9, 26, True, ("found", int(2.1 * GIB))),
        (8, 12, True, ("found", 4 * GIB)),
        (8, 12, False, ("none", 0)),
    ],
)
def test_spilled_memory_shows_where_torch_holds_more_than_there_is(
    used: float, reserved: float, spills: bool, verdict: tuple[str, int]
) -> None:
    said, least = judge_spill(DeviceMemory(int(used * GIB), 24 * GIB), int(reserved * GIB), spills)
    assert said == verdict[0] and least == pytest.approx(verdict[1], abs=2)
    assert judge_spill(None, GIB, True) == ("unknown", 0)


def test_wsl_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    release = tmp_path / "osrelease"
    monkeypatch.setattr(module, "_KERNEL", release)
    assert not module.drivers_spill()
    release.write_text("5.15.90.1-microsoft-standard-WSL2\n")
    assert module.drivers_spill()
    release.write_text("6.8.0-45-generic\n")
    assert not module.drivers_spill()

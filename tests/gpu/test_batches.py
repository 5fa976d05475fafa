"""Training batches on CUDA: the same bits wherever images are kept, and no step in which the host waits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.data.datamanager import F3rmDataManager, F3rmDataManagerConfig
from f3rm_ext.data.image_datamanager import ImageDataManager, ImageDataManagerConfig
from f3rm_ext.features.options import FeatureOptions

Build = Callable[..., Any]


@contextmanager
def no_waiting() -> Iterator[None]:
    """While this is entered, torch raises wherever the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def build(tiny_capture: Path, tmp_path: Path) -> Iterator[Build]:
    """Datamanagers of the tiny capture; closed at the end."""
    built: list[F3rmDataManager | ImageDataManager] = []

    def make(kind: str, device: torch.device, there: bool = True, **options: Any) -> Any:
        torch.manual_seed(5)
        if kind == "rays":
            features = FeatureOptions(extractors=(f"labels:data={tiny_capture}",), cache_dir=tmp_path)
            config: Any = F3rmDataManagerConfig(data=tiny_capture, features=features, images_on_gpu=there, **options)
        else:
            where = "gpu" if there else "cpu"
            config = ImageDataManagerConfig(data=tiny_capture, cache_images=where, num_downscales=1, **options)
            config.resolution_schedule = 15
        built.append(config.setup(device=str(device), test_mode="val"))
        return built[-1]

    yield make
    for manager in built:
        manager.close()


def flat(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != "features"} | batch.get("features", {})


@pytest.mark.parametrize("there", [True, False], ids=["on the device", "in main memory"])
@pytest.mark.parametrize("kind", ["rays", "pictures"])
@pytest.mark.parametrize("window", [{}, {"train_num_images_to_sample_from": 3, "train_num_times_to_repeat_images": 6}])
def test_batches_are_those_of_the_cpu(
    kind: str, there: bool, window: dict[str, int], build: Build, cuda: torch.device
) -> None:
    on_cpu, manager = build(kind, torch.device("cpu"), **window), build(kind, cuda, there, **window)
    for step in range(25):
        (_, expected), (_, found) = on_cpu.next_train(step), manager.next_train(step)
        expected, found = flat(expected), flat(found)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            if not isinstance(value, torch.Tensor):
                assert found[key] == value
            elif kind == "rays":
                assert found[key].device == cuda and torch.equal(found[key].cpu(), value), key
            else:
                # CUDA multiplies by the reciprocal of 255.
                torch.testing.assert_close(found[key].cpu(), value, atol=1e-7, rtol=0)
    assert manager.streams()["train"].on_device is there
    first, second = (one.streams()["train"].coverage.summary() for one in (on_cpu, manager))
    assert first == second


@pytest.mark.parametrize("there", [True, False], ids=["on the device", "in main memory"])
@pytest.mark.parametrize("kind", ["rays", "pictures"])
def test_the_host_never_waits(kind: str, there: bool, build: Build, cuda: torch.device) -> None:
    manager = build(kind, cuda, there)
    for step in range(30):
        manager.next_train(step)
    with no_waiting():
        for step in range(30, 60):
            manager.next_train(step)


def test_copies_do_not_overtake_their_use(build: Build, cuda: torch.device) -> None:
    """With the device far behind, buffers are not written over before they are read."""
    on_cpu, manager = build("rays", torch.device("cpu")), build("rays", cuda, False)
    square = torch.rand(4096, 4096, device=cuda)
    found = []
    for step in range(40):
        for _ in range(5):
            square = (square @ square).clamp_(0, 1)
        batch = flat(manager.next_train(step)[1])
        found.append({key: value.double().sum() for key, value in batch.items()})
        del batch
    for step, sums in enumerate(found):
        for key, value in flat(on_cpu.next_train(step)[1]).items():
            torch.testing.assert_close(sums[key].cpu(), value.double().sum(), msg=lambda text, at=step: f"{at}: {text}")

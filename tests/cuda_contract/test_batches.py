"""Training batches on CUDA: the numbers of the CPU, made without the host ever waiting for the device."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.datasets.base_dataset import InputDataset
from pretend.ledger import counted

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.data import prefetch
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_stream import ImageStream
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.placement import Placement
from f3rm_ext.data.ray_generators import make_ray_generator
from f3rm_ext.data.ray_stream import PixelStream
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.source import FeatureSource

PLACES = pytest.mark.parametrize("there", [True, False], ids=["on the device", "in main memory"])


@contextmanager
def no_waiting() -> Iterator[None]:
    """While this is entered, nothing may make the host wait for the device."""
    with counted() as ledger:
        yield
    assert not ledger.waits, ledger.waits


class InlineExecutor:
    """Runs what is submitted at once, on the thread of the pretended device."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def map(self, function: Callable[..., Any], values: Any) -> Any:
        return map(function, values)

    def shutdown(self, **options: Any) -> None: ...

    def __enter__(self) -> "InlineExecutor":
        return self

    def __exit__(self, *error: Any) -> None: ...


@pytest.fixture
def events(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Streams, events and page-locked memory that only write down what is done with them."""
    found: list[tuple[str, Any]] = []
    ours = SimpleNamespace(record_event=lambda: (found.append(("copied", None)), "event")[1])
    main = SimpleNamespace(wait_event=lambda event: found.append(("awaited", event)))

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        assert entered is ours
        found.append(("begin", None))
        yield

    real_empty = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            found.append(("page-locked", options["dtype"]))
        return real_empty(*size, pin_memory=pin_memory, **options)

    monkeypatch.setattr(prefetch, "ThreadPoolExecutor", InlineExecutor)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ours)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: found.append(("in use", stream is main)))
    return found


class Features(FeatureSource):
    """Eight numbers per patch of 4 x 4 pixels; one image has twice as many patches."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, ())
        self.cameras = dataset.cameras

    def load(self, image_idx: int) -> dict[str, FeatureMap]:
        height, width = int(self.cameras.height[image_idx]), int(self.cameras.width[image_idx])
        grid = PatchGrid.covering(height // 4, width // (2 if image_idx == 1 else 4), height, width)
        values = np.random.default_rng(image_idx).normal(size=(grid.rows, grid.cols, 8)).astype(np.float16)
        return {"some": FeatureMap(values, grid)}


@pytest.fixture
def outputs(tiny_capture: Path) -> Any:
    config = CaptureDataParserConfig(data=tiny_capture)
    return config.setup().get_dataparser_outputs("train")


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("f3rm_ext.data.placement.free_memory", lambda device: 1 << 40)


def _placement(device: torch.device, there: bool) -> Placement:
    return Placement(device, wanted=there, off="off", log=False)


def _rays(outputs: Any, device: torch.device, placement: Placement | None) -> PixelStream:
    dataset = InputDataset(outputs)
    cycle = ImageCycle(len(dataset), 4, 6, seed=1)
    return PixelStream(
        dataset, cycle, num_rays=40, split="train", device=device, source=Features(dataset), placement=placement
    )


def _pictures(outputs: Any, device: torch.device, placement: Placement | None) -> ImageStream:
    dataset = PinholeDataset(outputs)
    return ImageStream(dataset, ImageCycle(len(dataset), 4, 8, seed=1), device=device, placement=placement)


def _same(expected: Any, found: Any, device: torch.device) -> None:
    if isinstance(expected, dict):
        assert expected.keys() == found.keys()
        for key in expected:
            _same(expected[key], found[key], device)
    elif isinstance(expected, torch.Tensor):
        assert found.device == device and found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)
    else:
        assert expected == found


@PLACES
def test_batches_of_rays(there: bool, outputs: Any, cuda: torch.device, events: list[tuple[str, Any]]) -> None:
    on_cpu = _rays(outputs, torch.device("cpu"), None)
    stream = _rays(outputs, cuda, _placement(cuda, there))
    make = make_ray_generator(stream.dataset.cameras, cuda)
    # Copying all at once waits, but a thread of its own does it.
    allowed = {("f3rm_ext/data/uploads.py:send", "copy to the GPU")} if there else set()
    for step in range(14):
        with counted() as ledger:
            batch = stream.next()
            rays = make(batch["indices"])
        # The first window is copied as a whole; those after it are on the device before they are due.
        assert step == 0 or set(ledger.waits) <= allowed, ledger.waits
        _same(on_cpu.next(), batch, cuda)
        assert rays.directions.device == cuda
    assert stream.coverage.rays.tolist() == on_cpu.coverage.rays.tolist()
    assert stream.on_device is there


@PLACES
@pytest.mark.parametrize("halvings", [0, 1])
def test_whole_images(
    there: bool, halvings: int, outputs: Any, cuda: torch.device, events: list[tuple[str, Any]]
) -> None:
    on_cpu = _pictures(outputs, torch.device("cpu"), None)
    stream = _pictures(outputs, cuda, _placement(cuda, there))
    for _ in range(20):
        with no_waiting():
            camera, batch = stream.next(halvings)
        expected_camera, expected = on_cpu.next(halvings)
        _same(expected, batch, cuda)
        # The host reads the camera's size; the model moves the rest.
        fields = ("fx", "width", "camera_to_worlds")
        _same(
            *({name: getattr(one, name) for name in fields} for one in (expected_camera, camera)), torch.device("cpu")
        )
    assert stream.on_device is there


@PLACES
def test_copies_are_awaited_and_kept_from_reuse(
    there: bool, outputs: Any, cuda: torch.device, events: list[tuple[str, Any]]
) -> None:
    """Each upload is on its own stream; the training stream waits for it, and tells the allocator that it uses it."""
    stream = _rays(outputs, cuda, _placement(cuda, there))
    stream.next()
    del events[:]
    with no_waiting():  # so what is copied lies in page-locked memory
        stream.next()
    counts = {kind: sum(event[0] == kind for event in events) for kind in ("begin", "copied", "awaited", "in use")}
    assert counts == {"begin": 1, "copied": 1, "awaited": 1, "in use": 4}
    assert [kind for kind, _ in events if kind in ("copied", "awaited")] == ["copied", "awaited"], "the next, then this"
    assert all(use for kind, use in events if kind == "in use") and ("awaited", "event") in events
    gathered = [dtype for kind, dtype in events if kind == "page-locked"]
    assert gathered == ([] if there else [torch.uint8, torch.float16])

"""Rendering in chunks: completeness, out-of-memory, and outputs that fail."""

from collections.abc import Callable

import pytest
import torch
from nerfstudio.cameras.rays import RayBundle

from f3rm_ext.model_components.chunked_rendering import MIN_CHUNK, ChunkedRenderer, default_chunk
from f3rm_ext.model_components.output_guard import OutputGuard

CPU = torch.device("cpu")


@pytest.fixture
def image_rays(make_rays: Callable[[int], RayBundle]) -> RayBundle:
    return make_rays(12 * 10).reshape((12, 10))


def _echo(rays: RayBundle) -> dict[str, torch.Tensor | list]:
    return {"origin": rays.origins, "ignored": []}


@pytest.mark.parametrize("chunk", [1, 7, 119, 120, 500])
def test_chunks_make_up_the_image(image_rays: RayBundle, chunk: int) -> None:
    outputs = ChunkedRenderer(chunk).render(image_rays, _echo, CPU)
    assert list(outputs) == ["origin"]
    torch.testing.assert_close(outputs["origin"], image_rays.origins)


def test_out_of_memory_halves_and_is_remembered(image_rays: RayBundle, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: list[int] = []

    def hungry(rays: RayBundle) -> dict[str, torch.Tensor | list]:
        sizes.append(len(rays))
        if len(rays) > 40:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return _echo(rays)

    renderer = ChunkedRenderer(100)
    torch.testing.assert_close(renderer.render(image_rays, hungry, CPU)["origin"], image_rays.origins)
    assert renderer.chunk == 25
    assert sizes == [100, 50, 25, 25, 25, 25, 20]
    sizes.clear()
    renderer.render(image_rays, hungry, CPU)
    assert max(sizes) == 25, "the second image starts with the size that fitted"
    assert capsys.readouterr().out.count("Out of memory") == 2


def test_memory_that_never_suffices_is_an_error_as_others_are(image_rays: RayBundle) -> None:
    def hopeless(rays: RayBundle) -> dict[str, torch.Tensor | list]:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    renderer = ChunkedRenderer(64)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        renderer.render(image_rays, hopeless, CPU)
    assert renderer.chunk >= MIN_CHUNK

    def fail(rays: RayBundle) -> dict[str, torch.Tensor | list]:
        raise ValueError("out of memory, it says")

    with pytest.raises(ValueError, match="it says"):
        renderer.render(image_rays, fail, CPU)
    assert (default_chunk(CPU), default_chunk(torch.device("cuda", 0))) == (1 << 12, 1 << 15)


def test_an_output_missing_from_one_chunk_is_dropped(image_rays: RayBundle) -> None:
    calls: list[int] = []

    def partial(rays: RayBundle) -> dict[str, torch.Tensor | list]:
        calls.append(1)
        return _echo(rays) if len(calls) == 2 else {**_echo(rays), "pca": rays.directions}

    assert list(ChunkedRenderer(50).render(image_rays, partial, CPU)) == ["origin"]


def test_guard_reports_once_and_leaves_the_output_out(capsys: pytest.CaptureFixture[str]) -> None:
    guard, outputs = OutputGuard(), {}

    def broken() -> torch.Tensor:
        raise KeyError("[/basis]")  # no markup

    for _ in range(3):
        guard.add(outputs, "feature_pca", broken)
    guard.add(outputs, "depth", lambda: torch.zeros(2))
    assert list(outputs) == ["depth"]
    said = capsys.readouterr().out
    assert said.count("feature_pca") == 1 and "[/basis]" in said


def test_guard_lets_interrupts_and_memory_through() -> None:
    from nerfstudio.viewer_legacy.server.viewer_utils import IOChangeException

    for error in (IOChangeException(), torch.cuda.OutOfMemoryError("CUDA out of memory")):

        def raise_it(error: Exception = error) -> torch.Tensor:
            raise error

        with pytest.raises(type(error)):
            OutputGuard().add({}, "feature_pca", raise_it)

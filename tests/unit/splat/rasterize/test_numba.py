"""The numba kernels against the reference: values and every gradient, on ordinary and on spoiled scenes."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.rasterize import cpu

Run = Callable[..., dict[str, Tensor]]


def _change(*parts: tuple[str, Any, Any, Any]) -> Callable[[Any], None]:
    """Multiplies a part of a tensor by a factor and adds a number."""

    def change(scene: Any) -> None:
        for name, where, factor, addend in parts:
            getattr(scene, name)[where] = factor * getattr(scene, name)[where] + addend

    return change


def _close(scene: Any) -> None:
    scene.viewmat[:] = torch.eye(4)
    scene.means[:, 2] = scene.means[:, 2].abs() * 0.2 + 0.02
    scene.sizes *= 0.2


EVERY, INF = slice(None), torch.inf
CHANGES = {
    "none": None,
    "some behind": _change(("means", np.s_[::2, 2], 1, -8)),
    "all behind": _change(("means", np.s_[:, 2], 1, -8)),
    "flat": _change(
        ("sizes", np.s_[::3, 0], 0, 1e-7), ("sizes", np.s_[1::3, :2], 0, 1e-8), ("sizes", np.s_[2::3], 0, 1e-9)
    ),
    "needles": _change(("sizes", np.s_[:, 0], 0, 0.5), ("sizes", np.s_[:, 1:], 0, 5e-3)),
    "huge": _change(("sizes", np.s_[::8], 1e4, 0), ("alphas", np.s_[::8], 0.1, 0)),
    "beyond measure": _change(("sizes", 0, 0, 1e12), ("sizes", 1, 0, 1e25), ("sizes", 2, 0, INF), ("means", 4, 0, INF)),
    "off screen": _change(("means", np.s_[::2, 0], 12, 0), ("means", np.s_[1::4, 1], 9, 0)),
    "opaque": _change(("alphas", EVERY, 0, 1), ("alphas", np.s_[::2], 0, 0.9995), ("sizes", EVERY, 2, 0)),
    "faint": _change(("alphas", np.s_[::2], 0, 1 / 300), ("alphas", 1, 0, 0)),
    "close": _close,
    "equal depths": _change(
        ("viewmat", EVERY, 0, torch.eye(4)), ("means", np.s_[:, 2], 0, 2.0), ("means", np.s_[::2, 2], 0, 3.0)
    ),
    "unnormalised": _change(("quats", EVERY, torch.logspace(-3, 3, 40)[:, None], 0)),
}


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_values_and_gradients_are_those_of_the_reference(
    change: str, antialiased: bool, make_scene: Any, differentiate: Run, assert_agree: Any
) -> None:
    for seed in range(2):
        scene = make_scene(seed=seed, change=CHANGES[change], antialiased=antialiased)
        found = differentiate(scene, "numba")
        assert all(value.isfinite().all() for value in found.values())
        assert_agree(found, differentiate(scene, "torch", torch.float64))


def test_needles_a_thousand_times_as_long_as_thick_lose_no_more_than_the_reference_in_float32(
    make_scene: Any, differentiate: Run
) -> None:
    def stretch(scene: Any) -> None:
        scene.sizes[:, 0], scene.sizes[:, 1:] = 2.0, 2e-3

    scene = make_scene(change=stretch)
    exact = differentiate(scene, "torch", torch.float64)
    kernels, reference = differentiate(scene, "numba"), differentiate(scene, "torch")
    for name, value in exact.items():
        error, allowed = (kernels[name] - value).norm(), (reference[name] - value).norm()
        assert error <= 2 * allowed + 1e-6 * value.norm(), name


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (17, 8), (8, 33), (64, 5)])
@pytest.mark.parametrize("channels", [1, 4, 37])
def test_pictures_and_colors_of_any_size(
    size: tuple[int, int], channels: int, make_scene: Any, differentiate: Run, assert_agree: Any
) -> None:
    scene = make_scene(seed=11, size=size, channels=channels)
    assert_agree(differentiate(scene, "numba"), differentiate(scene, "torch", torch.float64))


@pytest.mark.parametrize("options", [{"near_plane": 2.9}, {"eps2d": 0.1}])
def test_options(options: dict[str, float], make_scene: Any, differentiate: Run, assert_agree: Any) -> None:
    scene = make_scene(seed=12, **options)
    found, default = differentiate(scene, "numba"), differentiate(make_scene(seed=12), "numba")
    assert_agree(found, differentiate(scene, "torch", torch.float64))
    assert not torch.allclose(found["colors"], default["colors"])


def test_no_gaussians_leave_the_background(make_scene: Any, differentiate: Run, assert_agree: Any) -> None:
    scene = make_scene(count=0)
    found = differentiate(scene, "numba")
    assert_agree(found, differentiate(scene, "torch", torch.float64))
    assert torch.equal(found["colors"], scene.background.double().expand(scene.height, scene.width, 3))
    assert found["means gradient"].shape == (0, 3)


def test_gradients_of_colors_alone_are_the_same_and_come_from_their_own_kernel(
    make_scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(channels=19, seed=3)
    leaves = {name: value.detach() for name, value in scene.leaves(torch.float32).items()}
    upstream = torch.randn(scene.height, scene.width, 19, generator=torch.Generator().manual_seed(5))

    def color_gradient(**leaf: Tensor) -> Tensor:
        picture = scene.draw({**leaves, **leaf}).colors
        return torch.autograd.grad(picture, leaf["colors"], upstream)[0]

    colors = leaves["colors"].clone().requires_grad_()
    with_geometry = color_gradient(colors=colors, means=leaves["means"].clone().requires_grad_())
    monkeypatch.setattr(cpu, "backward", None)  # the kernel of all gradients may not be called
    alone = color_gradient(colors=colors)
    torch.testing.assert_close(alone, with_geometry, rtol=1e-4, atol=1e-5)


def test_a_small_buffer_changes_nothing(make_scene: Any, differentiate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(size=(70, 50), count=60)
    whole = differentiate(scene, "numba")
    monkeypatch.setattr(cpu, "BUFFER", 400)
    runs = list(cpu.split_tiles(cpu.np.array([0, 10, 10, 30, 31]), 20))
    assert runs == [(0, 2), (2, 3), (3, 4)]  # a tile that does not fit stands alone
    for name, value in differentiate(scene, "numba").items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.skipif(numba.get_num_threads() < 2, reason="one thread only")
def test_results_do_not_depend_on_the_number_of_threads(make_scene: Any, differentiate: Run) -> None:
    scene = make_scene(size=(70, 50), count=60)
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        alone = differentiate(scene, "numba")
        numba.set_num_threads(2)
        for name, value in differentiate(scene, "numba").items():
            assert torch.equal(value, alone[name]), name
    finally:
        numba.set_num_threads(threads)


def test_strided_half_and_double_tensors_are_taken(make_scene: Any) -> None:
    scene = make_scene(channels=6)
    leaves = {name: value.detach() for name, value in scene.leaves(torch.float32).items()}
    expected = scene.draw(leaves).colors
    strided = {**leaves, "means": leaves["means"].T.contiguous().T, "colors": leaves["colors"].double()}
    assert not strided["means"].is_contiguous()
    assert torch.equal(scene.draw(strided).colors, expected)
    colors = leaves["colors"].half().requires_grad_()
    picture = scene.draw({**leaves, "colors": colors}).colors
    torch.testing.assert_close(picture, expected, rtol=1e-3, atol=1e-3)
    picture.sum().backward()
    assert colors.grad is not None and colors.grad.dtype == torch.float16


def test_many_layers_of_opaque_gaussians_end_a_pixel_early(
    make_scene: Any, differentiate: Run, assert_agree: Any
) -> None:
    def stack(scene: Any) -> None:
        scene.means[:, :2] *= 0.3
        scene.sizes[:] = torch.tensor([1.8, 2.0, 2.2])
        scene.alphas[:] = 0.9

    scene = make_scene(count=80, change=stack)
    found = differentiate(scene, "numba")
    assert_agree(found, differentiate(scene, "torch", torch.float64))
    assert (1 - found["alpha"]).min() > 1e-4
    assert (found["colors gradient"].abs().sum(dim=1) == 0).sum() > 20  # those behind give nothing

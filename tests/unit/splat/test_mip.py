"""Mip filters: the 3D filter against loops over points and cameras, smoothing, fusing and the options."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.splat import mip
from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations
from f3rm_ext.splat.mip import MipOptions, fuse, sampling_intervals, smooth, smoothing_filter, unfuse


def rig(count: int, dtype: torch.dtype = torch.float64) -> PinholeCameras:
    """Cameras scattered around the unit cube that look anywhere, of different sizes and focal lengths."""
    generator = torch.Generator().manual_seed(count)
    viewmats = torch.eye(4, dtype=dtype).repeat(count, 1, 1)
    viewmats[:, :3, :3] = quats_to_rotations(torch.randn(count, 4, generator=generator, dtype=dtype))
    viewmats[:, :3, 3] = torch.randn(count, 3, generator=generator, dtype=dtype)
    widths = torch.randint(20, 60, (count,), generator=generator)
    heights = torch.randint(20, 60, (count,), generator=generator)
    Ks = torch.zeros(count, 3, 3, dtype=dtype)
    Ks[:, 0, 0] = 30 + 30 * torch.rand(count, generator=generator, dtype=dtype)
    Ks[:, 1, 1] = 30 + 30 * torch.rand(count, generator=generator, dtype=dtype)
    Ks[:, 0, 2], Ks[:, 1, 2], Ks[:, 2, 2] = widths / 2 + 1, heights / 2 - 2, 1
    return PinholeCameras(viewmats, Ks, widths, heights)


def by_definition(
    means: np.ndarray, viewmats: np.ndarray, Ks: np.ndarray, widths: np.ndarray, heights: np.ndarray
) -> list[float]:
    finest = []
    for mean in means:
        best = math.inf
        for viewmat, K, w, h in zip(viewmats, Ks, widths, heights, strict=True):
            x, y, z = viewmat[:3, :3] @ mean + viewmat[:3, 3]
            if z <= 0.2:
                continue
            u, v = K[0, 0] * x / z + K[0, 2], K[1, 1] * y / z + K[1, 2]
            if -0.15 * w <= u <= 1.15 * w and -0.15 * h <= v <= 1.15 * h:
                best = min(best, z / max(K[0, 0], K[1, 1]))
        finest.append(best)
    return finest


@pytest.mark.parametrize("elements", [9, 1 << 22])
def test_intervals_against_loops(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mip, "ELEMENTS", elements)  # 9 elements: chunks of two Gaussians
    means = 2 * torch.rand(80, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    cameras = rig(4)
    finest, seen = sampling_intervals(means, cameras)
    expected = by_definition(means.numpy(), *(part.numpy() for part in cameras))
    np.testing.assert_allclose(finest.numpy(), expected, rtol=1e-12)
    assert 5 < int(seen.sum()) < 75, "the case tests nothing"
    sigma = smoothing_filter(means, cameras)
    largest = max(value for value in expected if math.isfinite(value))
    np.testing.assert_allclose(
        sigma.numpy(), [math.sqrt(0.2) * (v if math.isfinite(v) else largest) for v in expected], rtol=1e-12
    )


def single(focal: float = 100.0) -> PinholeCameras:
    K = torch.tensor([[[focal, 0, 50.0], [0, focal, 50.0], [0, 0, 1]]])
    return PinholeCameras(torch.eye(4)[None], K, torch.tensor([100]), torch.tensor([100]))


def test_one_camera_by_hand() -> None:
    """Depth 4, focal length 100: an interval of 0.04, σ = √0.2 · 0.04."""
    means = torch.tensor([[0.0, 0.0, 4.0]])
    assert float(smoothing_filter(means, single())) == pytest.approx(math.sqrt(0.2) * 0.04)
    near = MipOptions(variance_3d=0.8)
    assert float(smoothing_filter(means, single(), near)) == pytest.approx(2 * math.sqrt(0.2) * 0.04)


@pytest.mark.parametrize(
    ("point", "seen"),
    [
        ((0.0, 0.0, 0.21), True),
        ((0.0, 0.0, 0.19), False),
        ((0.0, 0.0, -3.0), False),
        ((0.64, 0.0, 1.0), True),  # at 114 of 100 pixels
        ((0.66, 0.0, 1.0), False),  # at 116
        ((-0.66, 0.0, 1.0), False),
        ((0.0, -0.64, 1.0), True),
        ((0.0, 0.66, 1.0), False),
        ((0.0, -0.66, 1.0), False),
        ((math.nan, 0.0, 1.0), False),
    ],
)
def test_which_cameras_see(point: tuple[float, float, float], seen: bool) -> None:
    assert sampling_intervals(torch.tensor([point]), single())[1].tolist() == [seen]


def test_nobody_sees_anything() -> None:
    behind = torch.tensor([[0.0, 0.0, -4.0]])
    assert smoothing_filter(behind, single()).tolist() == [0]
    no_cameras = PinholeCameras(*(part[:0] for part in single()))
    assert smoothing_filter(behind, no_cameras).tolist() == [0]
    assert smoothing_filter(behind[:0], single()).shape == (0,)


def some(n: int = 20, dtype: torch.dtype = torch.float64) -> Gaussians:
    generator = torch.Generator().manual_seed(n)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Gaussians(randn(n, 3), randn(n, 3) - 3, randn(n, 4), 2 * randn(n, 1), randn(n, 3), randn(n, 0, 3))


def test_smoothing_adds_variances_and_keeps_the_integral() -> None:
    gaussians = some()
    sizes, alphas = gaussians.sizes(), gaussians.alphas()
    sigma = torch.linspace(0, 0.3, 20, dtype=torch.float64)
    wide, faint = smooth(sizes, alphas, sigma)
    np.testing.assert_allclose(wide.numpy() ** 2, sizes.numpy() ** 2 + sigma.numpy()[:, None] ** 2)
    np.testing.assert_allclose((faint * wide.prod(1)).numpy(), (alphas * sizes.prod(1)).numpy())
    assert torch.equal(wide[0], sizes[0]) and torch.equal(faint[0], alphas[0])


def test_a_thin_disc_stays_opaque_where_the_area_counts() -> None:
    gaussians = some()
    sizes, alphas = gaussians.sizes(), gaussians.alphas()
    sigma = torch.linspace(0, 0.3, 20, dtype=torch.float64)
    wide, faint = smooth(sizes, alphas, sigma, area=True)
    torch.testing.assert_close(wide, smooth(sizes, alphas, sigma)[0])
    longer, longer_wide = (values.sort(dim=1).values[:, 1:].prod(dim=1) for values in (sizes, wide))
    torch.testing.assert_close(faint * longer_wide, alphas * longer)
    disc, opaque = torch.tensor([[1.0, 1e-9, 1.0]]), torch.ones(1)
    assert float(smooth(disc, opaque, torch.tensor([0.1]))[1]) < 1e-7
    assert float(smooth(disc, opaque, torch.tensor([0.1]), area=True)[1]) == pytest.approx(1 / 1.01)


@pytest.mark.parametrize("flat", [True, False])
def test_compensation_follows_the_shape_of_gaussians_unless_it_is_chosen(flat: bool) -> None:
    assert MipOptions().resolve(flat).area == flat
    assert (
        MipOptions(compensation="area").resolve(flat).area and not MipOptions(compensation="volume").resolve(flat).area
    )


@pytest.mark.parametrize("area", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_gaussians_are_the_smoothed_ones(dtype: torch.dtype, area: bool) -> None:
    gaussians = some(dtype=dtype)
    sigma = torch.linspace(0, 0.1, 20, dtype=dtype)
    fused = fuse(gaussians, sigma, area)
    wide, faint = smooth(gaussians.sizes(), gaussians.alphas(), sigma, area)
    assert torch.allclose(fused.sizes(), wide, rtol=1e-5) and torch.allclose(fused.alphas(), faint, rtol=1e-4)
    assert fused.scales.dtype == fused.opacities.dtype == dtype
    for name in ("means", "quats", "features_dc", "features_rest"):
        assert getattr(fused, name) is getattr(gaussians, name)


@pytest.mark.parametrize("area", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.float64, 1e-7)])
def test_unfusing_gives_back_what_was_fused(dtype: torch.dtype, tolerance: float, area: bool) -> None:
    gaussians = some(dtype=dtype)
    sigma = gaussians.sizes().amax(1) * 0.7
    back = unfuse(fuse(gaussians, sigma, area), sigma, area)
    assert torch.allclose(back.scales, gaussians.scales, atol=tolerance)
    assert torch.allclose(back.opacities, gaussians.opacities, atol=5 * tolerance)


def test_unfusing_what_was_never_fused_is_refused() -> None:
    gaussians = some()
    with pytest.raises(ConfigError, match="1 Gaussian"):
        sigma = torch.zeros(20, dtype=torch.float64)
        sigma[3] = gaussians.sizes()[3].min()
        unfuse(gaussians, sigma)


def test_fusing_extreme_opacities_stays_finite() -> None:
    gaussians = some(3, torch.float32)
    gaussians.opacities[:] = torch.tensor([[-80.0], [80.0], [0.0]])
    gaussians.scales[:] = torch.tensor([-25.0, -1.0, -25.0])[:, None]
    fused = fuse(gaussians, torch.tensor([0.1, 0.0, 0.1]))
    assert torch.isfinite(fused.opacities).all()
    assert float(fused.alphas()[1]) == 1 and float(fused.alphas()[2]) < 1e-20


def test_when_the_filter_is_due() -> None:
    options = MipOptions()
    assert [step for step in range(1000) if options.due(step, 1000)] == list(range(0, 900, 100))
    assert options.due(150, 1000, changed=True) and options.due(950, 1000, changed=True)
    assert not MipOptions(filter_3d=False).due(0, 1000, changed=True)
    assert MipOptions(margin=0.0, every=1, freeze=0).due(999, 1000)  # the least there is

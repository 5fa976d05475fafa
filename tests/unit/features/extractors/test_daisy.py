"""Dense features without weights: geometry, determinism, and that like finds like."""

import numpy as np
import pytest
import torch
from skimage.color import rgb2lab

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.base import Extractor, TextExtractor
from f3rm_ext.features.extractors.daisy import (
    COLOR_DIM,
    HISTOGRAMS,
    ORIENTATIONS,
    RINGS,
    TEXTURE_DIM,
    DaisyConfig,
    DaisyExtractor,
)

CPU = torch.device("cpu")


@pytest.fixture
def daisy() -> DaisyExtractor:
    return DaisyExtractor(DaisyConfig(), device=CPU)


def stripes(height: int, width: int, period: int, vertical: bool) -> np.ndarray:
    """Grey stripes."""
    axis = np.arange(width)[None, :] if vertical else np.arange(height)[:, None]
    wave = 128 + 60 * np.sin(2 * np.pi * axis / period)
    return np.broadcast_to(wave[..., None], (height, width, 3)).astype(np.uint8)


def test_is_an_image_extractor_without_text(daisy: DaisyExtractor) -> None:
    assert isinstance(daisy, Extractor)
    assert not isinstance(daisy, TextExtractor)
    assert daisy.dim == TEXTURE_DIM + COLOR_DIM == 128


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 47), (32, 400), (540, 960), (321, 319)])
@pytest.mark.parametrize("config", [DaisyConfig(), DaisyConfig(short_side_px=100, step_px=5, radius_px=64)])
def test_shape_is_the_grids_and_the_grid_lies_in_the_image(height: int, width: int, config: DaisyConfig) -> None:
    daisy = DaisyExtractor(config, device=CPU)
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    (features,) = daisy.extract([image])
    grid = daisy.patch_grid(height, width)
    assert features.shape == (grid.rows, grid.cols, daisy.dim)
    assert features.dtype == torch.float32
    assert torch.isfinite(features).all()
    centres = grid.centres_px()
    assert centres.min() > 0
    assert (centres[-1, -1] < (height, width)).all()
    # Half a step of margin on both sides, up to the pixel that is not halved.
    np.testing.assert_allclose(centres[0, 0] + centres[-1, -1], (height, width), atol=max(height, width) / 32)


@pytest.mark.parametrize("step", [7, 8])
@pytest.mark.parametrize("scale", [1, 3])
def test_features_lie_where_the_grid_says(step: int, scale: int) -> None:
    # One bright blob on grey: the descriptor with the strongest texture must be the one nearest to its centre.
    daisy = DaisyExtractor(DaisyConfig(short_side_px=112, step_px=step, radius_px=16), device=CPU)
    side = 112 * scale
    grid = daisy.patch_grid(side, side)
    for row, col in [(2, 3), (5, 9), (grid.rows - 2, 1)]:
        centre = grid.centres_px()[row, col]
        y, x = np.mgrid[:side, :side] + 0.5
        blob = np.exp(-((y - centre[0]) ** 2 + (x - centre[1]) ** 2) / (2 * (2.0 * scale) ** 2))
        image = np.repeat((100 + 150 * blob)[..., None], 3, axis=-1).astype(np.uint8)
        (features,) = daisy.extract([image])
        strength = features[..., :8].norm(dim=-1)  # the histogram at the descriptor's own place
        assert divmod(int(strength.argmax()), grid.cols) == (row, col)


@pytest.mark.parametrize("step", [7, 8])
def test_texture_is_that_around_the_middle_pixels_of_the_cells(step: int) -> None:
    from skimage.feature import daisy

    image = np.random.default_rng(1).integers(0, 256, (6 * step, 9 * step, 1), dtype=np.uint8).repeat(3, axis=-1)
    config = DaisyConfig(short_side_px=6 * step, step_px=step, radius_px=11)
    (features,) = DaisyExtractor(config, device=CPU).extract([image])
    padded = np.pad(rgb2lab(image / 255)[..., 0] / 100, 11, mode="symmetric")
    options = {"rings": RINGS, "histograms": HISTOGRAMS, "orientations": ORIENTATIONS, "normalization": "off"}
    dense = torch.from_numpy(daisy(padded, step=1, radius=11, **options)[step // 2 :: step, step // 2 :: step])
    alike = torch.cosine_similarity(features[..., :TEXTURE_DIM].double(), dense, dim=-1)
    assert alike.shape == (6, 9) and alike.min() > 0.999


def test_halves_are_balanced(daisy: DaisyExtractor) -> None:
    (features,) = daisy.extract([stripes(160, 160, 12, vertical=True)])
    texture, color = features[..., :TEXTURE_DIM].norm(dim=-1), features[..., TEXTURE_DIM:].norm(dim=-1)
    torch.testing.assert_close(color, torch.ones_like(color), atol=1e-5, rtol=0)
    assert texture.min() > 0.3
    assert texture.max() <= 1


def test_flat_patches_have_no_texture(daisy: DaisyExtractor) -> None:
    (features,) = daisy.extract([np.full((80, 80, 3), 77, np.uint8)])
    assert features[..., :TEXTURE_DIM].norm(dim=-1).max() < 1e-3


def similarity(daisy: DaisyExtractor, first: np.ndarray, second: np.ndarray) -> float:
    """Cosine between the features in the middle of two images."""
    a, b = (features[features.shape[0] // 2, features.shape[1] // 2] for features in daisy.extract([first, second]))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def test_colors_tell_flat_patches_apart(daisy: DaisyExtractor) -> None:
    red, dark_red, green, white = (
        np.broadcast_to(np.array(color, np.uint8), (64, 64, 3))
        for color in [(200, 30, 30), (180, 30, 35), (30, 180, 30), (240, 240, 240)]
    )
    assert similarity(daisy, red, dark_red) > 0.95
    assert similarity(daisy, red, green) < 0.5
    assert similarity(daisy, red, white) < 0.2


def test_colors_are_means_over_steps_not_pixels(daisy: DaisyExtractor) -> None:
    flat = np.full((64, 64, 3), 50, np.float32)
    checks = flat + 20 * (np.indices((64, 64)).sum(axis=0) % 2 * 2 - 1)[..., None].astype(np.float32)
    np.testing.assert_allclose(daisy._color(checks), daisy._color(flat), atol=5e-3)


def test_texture_tells_patches_of_one_color_apart(daisy: DaisyExtractor) -> None:
    fine = stripes(160, 160, 12, vertical=True)
    moved = np.roll(fine, 12, axis=1)
    turned = stripes(160, 160, 12, vertical=False)
    assert similarity(daisy, fine, moved) > 0.99
    assert similarity(daisy, fine, turned) < similarity(daisy, fine, moved) - 0.05


def test_identity_follows_the_options() -> None:
    keys = {
        DaisyExtractor(config, device=CPU).identity.key()
        for config in [DaisyConfig(), DaisyConfig(step_px=9), DaisyConfig(radius_px=20), DaisyConfig(short_side_px=300)]
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    "options", [{"short_side_px": 31}, {"step_px": 1}, {"step_px": 33}, {"radius_px": 7}, {"radius_px": 65}]
)
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ExtractorError, match=next(iter(options))):
        DaisyConfig(**options)


def test_too_small_an_image_is_refused(daisy: DaisyExtractor) -> None:
    with pytest.raises(ExtractorError, match="too small"):
        daisy.extract([np.zeros((31, 64, 3), np.uint8)])

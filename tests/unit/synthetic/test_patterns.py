"""Patterns give colours between 0 and 1, vary where they should, and are functions of place alone."""

import numpy as np
import pytest

from f3rm_ext.synthetic.materials import Material, Pattern, pack
from f3rm_ext.synthetic.patterns import pattern_colors

A, B, C = (0.8, 0.1, 0.1), (0.1, 0.6, 0.1), (0.1, 0.1, 0.7)
PARAMS = {
    Pattern.PLAIN: (0.1, 0.3),
    Pattern.STRIPES: (0.1, 1.0, 0.5, 0.0),
    Pattern.PLANKS: (0.6, 0.1),
    Pattern.FRUIT: (0.5, 0.1),
    Pattern.BANDS: (-0.5, 0.5, 5.0),
    Pattern.PANEL: (0.0, 0.2),
    Pattern.CUBE: (5.0,),
}


def colors(pattern: Pattern, coords: np.ndarray) -> np.ndarray:
    table = pack([Material(pattern, A, B, C, PARAMS.get(pattern, (0.1,)))], shiny=True)
    return np.clip(pattern_colors(table, np.zeros(len(coords), np.int32), coords), 0, 1)


@pytest.mark.parametrize("pattern", Pattern)
def test_every_pattern_varies_within_range(pattern: Pattern) -> None:
    coords = np.random.default_rng(0).uniform(-1, 1, (2000, 3))
    out = colors(pattern, coords)
    assert out.min() >= 0 and out.max() <= 1
    assert out.std(axis=0).max() > 0.01
    np.testing.assert_array_equal(colors(pattern, coords[::-1].copy()), out[::-1])


def test_checker_has_squares_of_the_given_side() -> None:
    at = np.array([[0.05, 0.05, 0], [0.15, 0.05, 0], [0.15, 0.15, 0], [-0.05, 0.05, 0]])
    np.testing.assert_allclose(colors(Pattern.CHECKER, at), [A, B, A, B])


def test_cube_has_six_differently_colored_sides_and_dark_gaps() -> None:
    gaps = np.array([[1.0, 1 / 3, 0.0], [0.0, -1.0, 1 / 3]])
    assert (colors(Pattern.CUBE, gaps) < 0.05).all()
    stickers = np.array([[s * (axis == k) for k in range(3)] for axis in range(3) for s in (1.0, -1.0)])
    assert len(np.unique(colors(Pattern.CUBE, stickers), axis=0)) >= 3

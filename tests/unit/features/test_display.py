"""The display basis: its range, constant features, and what is on the disk."""

from pathlib import Path

import numpy as np
import pytest
import torch

from f3rm_ext.features import display
from f3rm_ext.features.base import PatchGrid
from f3rm_ext.features.store.feature_store import FeatureStore

DIM = 24
KEYS = tuple(f"{number:032x}" for number in range(5))


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    """Features of five images with a falling spectrum and a mean that is not zero."""
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(DIM, DIM)) * (0.7 ** np.arange(DIM))[:, None]
    store = FeatureStore.open(tmp_path / "store", {"extractor": "x"}, DIM)
    for rows, key in enumerate(KEYS, start=4):
        values = (rng.normal(size=(rows, 7, DIM)) @ mix + mix[0]).astype(np.float16)
        store.put(key, values, PatchGrid.covering(rows, 7, 64, 70), (64, 70))
    store.commit()
    return store


def test_display_range_covers_the_features(store: FeatureStore) -> None:
    patches = display.sample_patches(store, KEYS)
    basis = display.fit_display(patches)
    rgb = ((patches - basis.mean) @ basis.components.T - basis.low) / (basis.high - basis.low)
    assert torch.allclose(basis.components @ basis.components.T, torch.eye(3), atol=1e-5)
    inside = ((rgb >= 0) & (rgb <= 1)).float().mean(0)
    assert ((inside > 0.95) & (inside < 1)).all()
    centred = patches - patches.mean(0)
    _, _, vectors = torch.linalg.svd(centred, full_matrices=False)
    assert torch.allclose((basis.components @ vectors[:3].T).abs(), torch.eye(3), atol=1e-2)


@pytest.mark.parametrize("value", [0.0, 0.3, -20.0])
@pytest.mark.parametrize("dim", [2, 3, 24])
def test_constant_features_are_mid_grey(value: float, dim: int) -> None:
    patches = torch.full((50, dim), value)
    basis = display.fit_display(patches)
    rgb = ((patches - basis.mean) @ basis.components.T - basis.low) / (basis.high - basis.low)
    assert (basis.high > basis.low).all()
    assert torch.allclose(rgb, torch.full_like(rgb, 0.5), atol=0.05)


def test_display_sample_is_the_same_each_time_and_bounded(store: FeatureStore) -> None:
    first = display.sample_patches(store, KEYS, count=40)
    assert torch.equal(first, display.sample_patches(store, (*reversed(KEYS), KEYS[0]), count=40))
    assert 40 <= len(first) <= 40 + len(KEYS)


def test_display_survives_the_disk_and_damage_means_none(store: FeatureStore, tmp_path: Path) -> None:
    basis = display.fit_display(display.sample_patches(store, KEYS))
    path = tmp_path / "display" / "set.json"
    display.save_display(path, basis)
    loaded = display.load_display(path, DIM)
    assert loaded is not None
    for name, value in vars(basis).items():
        assert torch.equal(getattr(loaded, name), value)
    assert display.load_display(path, DIM + 1) is None
    assert display.load_display(tmp_path / "none.json", DIM) is None
    for text in (path.read_text()[:-9], "[]", path.read_text().replace('"low": [', '"low": [NaN, ')):
        path.write_text(text)
        assert display.load_display(path, DIM) is None

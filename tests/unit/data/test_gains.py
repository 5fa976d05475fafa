"""Gains of photos that show the same places."""

import numpy as np

from f3rm_ext.data.gains import fit_log_gains


def test_photos_agree_where_they_show_one_place() -> None:
    places = np.random.default_rng(0).normal(size=200)
    gains = np.array([0.3, -0.2, -0.1, 0.5])
    logs = places - gains[:, None]
    logs[0, :10] += 4.0  # a reflection
    weights = np.ones(logs.shape)
    weights[3] = 0.0  # shares no place with the others
    found = fit_log_gains(logs, weights, 0.5, prior=1e-6)
    np.testing.assert_allclose(found[:3] - found[1], [0.5, 0.0, 0.1], atol=1e-3)
    assert abs(found[:3].mean()) < 0.01 and found[3] == 0.0

"""The example front end: an orbit, and what it says about a wrong elevation."""

import math
from pathlib import Path

import numpy as np
import pytest

turntable = pytest.importorskip(
    "f3rm_ext_turntable.estimator", reason="the package examples/pose_estimator_turntable is not installed"
)


def test_cameras_stand_on_a_circle_and_look_at_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turntable.ELEVATION, "30")
    predicted = turntable.predict([Path(f"{i}.jpg") for i in range(8)])
    viewmats = np.stack(list(predicted.viewmats.values()))
    centres = -np.einsum("nij,ni->nj", viewmats[:, :3, :3], viewmats[:, :3, 3])
    assert np.allclose(np.linalg.norm(centres, axis=1), 1) and np.allclose(centres[:, 2], 0.5)
    assert np.allclose(viewmats[:, :3, 3], [0, 0, 1])  # the middle of the table is on the optical axis
    assert np.allclose(np.linalg.det(viewmats[:, :3, :3]), 1)
    assert (viewmats[:, 1, 2] < 0).all()  # the world's z points up in the pictures
    turn = math.degrees(math.acos(centres[0, :2] @ centres[1, :2] / 0.75))
    assert turn == pytest.approx(45)


def test_an_elevation_that_is_none_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turntable.ELEVATION, "steep")
    with pytest.raises(turntable.ConfigError, match="steep"):
        turntable.predict([Path("a.jpg")])

"""Front ends of other packages: found, checked, and explained when they fail."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.sfm import estimators
from f3rm_ext.sfm.estimators import PredictedPoses, build_estimator, predict_poses

IMAGES = [Path("a.jpg"), Path("b.jpg")]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("good", "math:hypot", estimators.ENTRY_POINT_GROUP),
        EntryPoint("broken", "no_such_module:f", estimators.ENTRY_POINT_GROUP),
        EntryPoint("number", "math:pi", estimators.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(
        estimators, "entry_points", lambda group: points if group == estimators.ENTRY_POINT_GROUP else []
    )


def test_colmap_needs_no_front_end_and_others_are_found() -> None:
    assert build_estimator("auto") is None and build_estimator("colmap") is None
    assert callable(build_estimator("good"))
    assert estimators.available_methods() == ["auto", "colmap", "broken", "good", "number"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("broken", "ModuleNotFoundError"), ("number", "number"), ("x", "auto, colmap")],
)
def test_a_front_end_that_cannot_be_used_is_one_sentence(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_estimator(name)


def test_poses_have_to_be_rigid_and_of_these_photos() -> None:
    good = {"a.jpg": np.eye(4), "b.jpg": np.eye(4)}
    assert predict_poses("m", lambda images: PredictedPoses(good), IMAGES).viewmats is good
    with pytest.raises(ConfigError, match=r"--method m failed.*ValueError"):
        predict_poses("m", lambda images: PredictedPoses({**good, "b.jpg": [[1.0], [2.0, 3.0]]}), IMAGES)  # type: ignore[dict-item]
    for bad in (np.eye(3), 2 * np.eye(4), np.diag([-1.0, 1, 1, 1]), np.full((4, 4), np.nan)):
        with pytest.raises(ConfigError, match=r"b\.jpg"):
            predict_poses("m", lambda images, bad=bad: PredictedPoses({**good, "b.jpg": bad}), IMAGES)
    with pytest.raises(ConfigError, match="--method m"):
        predict_poses("m", lambda images: PredictedPoses({"a.jpg": np.eye(4), "z.jpg": np.eye(4)}), IMAGES)


def test_errors_of_a_front_end_are_its_own_sentence_or_ours() -> None:
    def fail(error: Exception) -> Any:
        def predict(images: object) -> PredictedPoses:
            raise error

        return predict

    with pytest.raises(CaptureError, match="its own words"):
        predict_poses("m", fail(CaptureError("its own words")), IMAGES)
    with pytest.raises(ConfigError, match=r"--method m .*KeyError"):
        predict_poses("m", fail(KeyError("k")), IMAGES)

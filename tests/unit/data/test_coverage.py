"""Counting what training has seen."""

import json
from pathlib import Path

import numpy as np
import pytest

from f3rm_ext.data.coverage import Coverage


@pytest.fixture
def coverage() -> Coverage:
    coverage = Coverage(np.array([100, 200, 100]), num_processes=2)
    coverage.add_windows([[0, 1], [1, 2]])
    coverage.add_steps([[0, 1], [1, 2]], 5)
    coverage.add_rays([0, 1], np.array([30, 10]))
    return coverage


def test_counts(coverage: Coverage):
    np.testing.assert_array_equal(coverage.appearances, [1, 2, 1])
    np.testing.assert_array_equal(coverage.steps, [5, 10, 5])
    np.testing.assert_array_equal(coverage.rays, [30, 10, 0])
    summary = coverage.summary()
    assert summary["appearances_min"] == 1 and summary["appearances_max"] == 2
    assert summary["rays"] == 80 and summary["effective_epochs"] == pytest.approx(80 / 400)
    assert "3 of 3 images" in coverage.describe() and "1 to 2 windows" in coverage.describe()
    coverage.add_windows([[0], [2]])
    assert "in 2 windows" in coverage.describe()


def test_state_round_trip(coverage: Coverage):
    state = coverage.state()
    other = Coverage(coverage.pixels, 2)
    other.load_state(state)
    assert other.summary() == coverage.summary()
    other.add_rays([0], np.array([1]))
    assert int(state["rays"][0]) == 30 and coverage.rays[0] == 30, "the state must be a copy"


def test_file(coverage: Coverage, tmp_path: Path):
    path = tmp_path / "coverage.json"
    path.write_text("old")
    coverage.write(path, step=7, names=["a.png", "b.png", "c.png"])
    record = json.loads(path.read_text())
    assert record["step"] == 7 and record["num_processes"] == 2
    assert record["per_image"][1] == {"image": "b.png", "pixels": 200, "appearances": 2, "steps": 10, "rays": 10}
    assert [file.name for file in tmp_path.iterdir()] == ["coverage.json"]


def test_state_of_other_images_is_not_used(coverage: Coverage):
    other = Coverage(np.array([1, 1]))
    other.load_state(coverage.state())
    assert other.summary()["images_seen"] == 0

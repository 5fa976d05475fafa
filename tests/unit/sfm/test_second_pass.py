"""A photo that no pair of photos holds gets its pose from the points of the model; one of another place does not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f3rm_ext.sfm.database import FeatureDatabase
from f3rm_ext.sfm.mapping import image_names, solve
from f3rm_ext.sfm.second_pass import register_missing

pycolmap = pytest.importorskip("pycolmap")


@pytest.fixture
def scene(tmp_path: Path) -> tuple[Any, FeatureDatabase]:
    """A made-up scene, in whose database the last photo matches no other, and the one before shows something else."""
    path = tmp_path / "database.db"
    pycolmap.set_random_seed(0)
    settings = pycolmap.SyntheticDatasetOptions(
        num_rigs=1, num_cameras_per_rig=1, num_frames_per_rig=8, num_points3D=200, num_points2D_without_point3D=50
    )
    with pycolmap.Database.open(path) as opened:
        truth = pycolmap.synthesize_dataset(settings, opened)
        rng = np.random.default_rng(0)
        of_point = {number: rng.integers(0, 120, 128) for number in truth.points3D}
        opened.clear_descriptors()
        *rest, elsewhere, lost = sorted(truth.images)
        for number, image in truth.images.items():
            rows = rng.integers(0, 120, (len(image.points2D), 128))
            for row, point in zip(rows, image.points2D, strict=True):
                if point.has_point3D() and number != elsewhere:
                    row[:] = of_point[point.point3D_id] + rng.integers(0, 30, 128)
            type_ = pycolmap.FeatureExtractorType.SIFT
            opened.write_descriptors(number, pycolmap.FeatureDescriptors(type_, rows.astype(np.uint8)))
        for number in (elsewhere, lost):
            for other in rest:
                opened.delete_matches(number, other)
                opened.delete_two_view_geometry(number, other)
        opened.delete_matches(elsewhere, lost)
        opened.delete_two_view_geometry(elsewhere, lost)
    return truth, FeatureDatabase(path, tmp_path, tmp_path / "none", 1000, 1000)


def test_a_lost_photo_is_registered_and_one_of_another_place_is_not(
    scene: tuple[Any, FeatureDatabase], tmp_path: Path
) -> None:
    truth, database = scene
    (model,) = solve(database, tmp_path / "work", "incremental", lambda *_: None)
    elsewhere, lost = sorted(image.name for image in truth.images.values())[-2:]
    assert image_names(model).isdisjoint({elsewhere, lost}) and model.num_reg_images() == 6
    counts: list[tuple[int, int]] = []
    found = register_missing(model, database, [elsewhere, lost], lambda *count: counts.append(count))
    assert found == [lost] and counts == [(0, 2), (1, 2), (2, 2)]
    names = sorted(image_names(model))
    assert lost in names and elsewhere not in names
    ours = np.array([model.find_image_with_name(name).projection_center() for name in names])
    true = np.array([truth.find_image_with_name(name).projection_center() for name in names])
    matrix = pycolmap.estimate_sim3d(ours, true).matrix()
    assert np.abs(ours @ matrix[:, :3].T + matrix[:, 3] - true).max() < 1e-3 * np.ptp(true)
    assert model.find_image_with_name(lost).num_points3D > 150


def test_without_lost_photos_or_points_nothing_is_done(scene: tuple[Any, FeatureDatabase], tmp_path: Path) -> None:
    _, database = scene
    (model,) = solve(database, tmp_path / "work", "incremental", lambda *_: None)
    points = model.num_points3D()
    assert register_missing(model, database, [], lambda *_: None) == [] and model.num_points3D() == points
    assert register_missing(pycolmap.Reconstruction(), database, list(database.ids()), lambda *_: None) == []

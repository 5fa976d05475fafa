"""A photo that no pair of photos holds gets its pose from the points of the model; one of another place does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f3rm_ext.sfm.mapping import image_names, solve
from f3rm_ext.sfm.second_pass import register_missing

pycolmap = pytest.importorskip("pycolmap")


def test_a_lost_photo_is_registered_and_one_of_another_place_is_not(
    make_scene: Callable[..., Any], tmp_path: Path
) -> None:
    """The last photo matches no other, and the one before shows something else."""
    scene = make_scene(num_points2D_without_point3D=50)
    truth, database = scene
    rng = np.random.default_rng(0)
    of_point = {number: rng.integers(0, 120, 128) for number in truth.points3D}
    *rest, elsewhere, lost = sorted(truth.images)
    with database.open() as opened:
        opened.clear_descriptors()
        for number, image in truth.images.items():
            rows = rng.integers(0, 120, (len(image.points2D), 128))
            for row, point in zip(rows, image.points2D, strict=True):
                if point.has_point3D() and number != elsewhere:
                    row[:] = of_point[point.point3D_id] + rng.integers(0, 30, 128)
            type_ = pycolmap.FeatureExtractorType.SIFT
            opened.write_descriptors(number, pycolmap.FeatureDescriptors(type_, rows.astype(np.uint8)))
        for pair in [(elsewhere, lost), *((number, other) for number in (elsewhere, lost) for other in rest)]:
            opened.delete_matches(*pair)
            opened.delete_two_view_geometry(*pair)
    (model,) = solve(database, tmp_path / "work", "incremental", lambda *_: None)
    elsewhere, lost = (truth.image(number).name for number in (elsewhere, lost))
    assert image_names(model).isdisjoint({elsewhere, lost}) and model.num_reg_images() == 6
    assert register_missing(model, database, [], lambda *_: None) == []
    assert register_missing(pycolmap.Reconstruction(), database, [lost], lambda *_: None) == [], "no points"
    counts: list[tuple[int, int]] = []
    found = register_missing(model, database, [elsewhere, lost], lambda *count: counts.append(count))
    assert found == [lost] and counts == [(0, 2), (1, 2), (2, 2)]
    assert lost in image_names(model) and elsewhere not in image_names(model)
    assert scene.centre_error(model) < 1e-3 and model.find_image_with_name(lost).num_points3D > 150

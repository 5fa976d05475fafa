"""Pairs to compare; and every photo without a pose has a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f3rm_ext.sfm.database import FeatureDatabase
from f3rm_ext.sfm.pairs import choose_pairs, similar_pairs, vlad_signatures
from f3rm_ext.sfm.quality import missing_pose_reasons


def test_each_kind_of_failure_has_its_reason() -> None:
    features = dict.fromkeys(["a", "b", "c", "other1", "other2", "lonely", "thin", "chain"], 900) | {
        "grey": 20,
        "soft": 30,
    }
    matches = {
        ("a", "b"): 300,
        ("b", "c"): 200,
        ("other1", "other2"): 150,
        ("a", "thin"): 17,
        ("b", "thin"): 21,
        ("chain", "lonely2"): 40,
    }
    reasons = missing_pose_reasons(features, matches, [{"a", "b", "c"}, {"other1", "other2"}], blurred=["soft"])
    assert reasons.keys() == features.keys() - {"a", "b", "c"}
    assert "texture" in reasons["grey"] and "blurred" in reasons["soft"] and "(30)" in reasons["soft"]
    assert "(other1, other2)" in reasons["other1"] == reasons["other2"]
    assert reasons["lonely"].startswith("no matches")
    assert "21 matches, with b" in reasons["thin"]
    assert "40 matches with lonely2" in reasons["chain"]


def test_without_any_group_all_photos_have_reasons() -> None:
    assert missing_pose_reasons({"a": 5, "b": 500}, {}, []).keys() == {"a", "b"}


def test_pairs_are_complete_and_without_repeats() -> None:
    names = [f"{i}" for i in range(40)]
    database = FeatureDatabase(Path(), Path(), Path(), 500, 500)  # not needed for these pairs
    matching, pairs = choose_pairs("auto", database, names)
    assert matching == "exhaustive" and len(set(pairs)) == 40 * 39 / 2
    matching, pairs = choose_pairs("auto", database, names, is_video=True)
    assert matching == "sequential"
    gaps = {int(b) - int(a) for a, b in pairs}
    assert gaps == {*range(1, 11), 16, 32} and len(pairs) == len(set(pairs))


def test_photos_of_the_same_things_have_similar_signatures() -> None:
    """Three photos of each of four places, and one without any feature."""
    rng = np.random.default_rng(0)
    places = [rng.integers(0, 256, (300, 128)) for _ in range(4)]
    photos = []
    for place in places:
        for _ in range(3):
            seen = place[rng.permutation(300)[: rng.integers(150, 250)]]
            photos.append(np.clip(seen + rng.normal(scale=20, size=seen.shape), 0, 255).astype(np.uint8))
    signatures = vlad_signatures([*photos, np.zeros((0, 128), np.uint8)])
    scores = signatures[:12] @ signatures[:12].T - 2 * np.eye(12)
    nearest = np.argsort(-scores, axis=1)[:, :2]
    assert (nearest // 3 == np.arange(12)[:, None] // 3).all()
    assert np.isfinite(signatures).all() and not signatures[12].any()
    assert not vlad_signatures([np.zeros((0, 128), np.uint8)] * 2).any()


def test_more_than_200_photos_are_compared_with_the_most_similar_ones(make_scene: Callable[..., Any]) -> None:
    """210 photos of 21 places: all pairs of a place are there, and far fewer than all pairs."""
    pycolmap = pytest.importorskip("pycolmap")
    options = {"num_frames_per_rig": 210, "num_points3D": 5, "num_points2D_without_point3D": 0}
    _, database = make_scene(**options, match_config=pycolmap.SyntheticDatasetMatchConfig.CHAINED)
    rng = np.random.default_rng(0)
    places = rng.integers(0, 200, (21, 60, 128))
    with database.open() as opened, pycolmap.DatabaseTransaction(opened):
        opened.clear_descriptors()
        images = sorted(opened.read_all_images(), key=lambda image: image.name)
        for number, image in enumerate(images):
            seen = places[number % 21][rng.permutation(60)[:40]] + rng.integers(0, 40, (40, 128))
            type_ = pycolmap.FeatureExtractorType.SIFT
            opened.write_descriptors(image.image_id, pycolmap.FeatureDescriptors(type_, seen.astype(np.uint8)))
    names = [image.name for image in images]
    matching, many = choose_pairs("auto", database, names)
    pairs = similar_pairs(database, names, similar=12)
    assert matching == "vocabulary" and set(pairs) < set(many)
    number_of = {name: number for number, name in enumerate(names)}
    same = sum((number_of[a] - number_of[b]) % 21 == 0 for a, b in pairs)
    assert same == 21 * 10 * 9 / 2 and len(pairs) < 210 * 12 and len(set(pairs)) == len(pairs)

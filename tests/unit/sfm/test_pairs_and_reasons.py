"""Pairs to compare; and every photo without a pose has a reason."""

import numpy as np

from f3rm_ext.sfm.pairs import exhaustive_pairs, sequential_pairs, signatures_of
from f3rm_ext.sfm.reasons import explain


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
    reasons = explain(features, matches, [{"a", "b", "c"}, {"other1", "other2"}], blurred=["soft"])
    assert reasons.keys() == features.keys() - {"a", "b", "c"}
    assert "texture" in reasons["grey"] and "blurred" in reasons["soft"] and "(30)" in reasons["soft"]
    assert "(other1, other2)" in reasons["other1"] == reasons["other2"]
    assert reasons["lonely"].startswith("no matches")
    assert "21 matches, with b" in reasons["thin"]
    assert "40 matches with lonely2" in reasons["chain"]


def test_without_any_group_all_photos_have_reasons() -> None:
    assert explain({"a": 5, "b": 500}, {}, []).keys() == {"a", "b"}


def test_pairs_are_complete_and_without_repeats() -> None:
    names = [f"{i}" for i in range(40)]
    assert len(set(exhaustive_pairs(names))) == 40 * 39 / 2
    pairs = sequential_pairs(names)
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
    signatures = signatures_of([*photos, np.zeros((0, 128), np.uint8)])
    scores = signatures[:12] @ signatures[:12].T - 2 * np.eye(12)
    nearest = np.argsort(-scores, axis=1)[:, :2]
    assert (nearest // 3 == np.arange(12)[:, None] // 3).all()
    assert np.isfinite(signatures).all() and not signatures[12].any()

"""Every photo without a pose has a reason, and photos with one have none."""

from f3rm_ext.sfm.pairs import exhaustive_pairs, sequential_pairs
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

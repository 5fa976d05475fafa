"""What a training of DiffusionSfM will do, and the memory of its steps."""

import re

import pytest

from f3rm_ext.sfm.diffusion.plan import count_parameters, memory_lines, plan_lines, step_memory
from f3rm_ext.sfm.diffusion.settings import Preset, parse_settings

SMALL = ("training.batch_size=1", "model.num_images=2", "model.size=tiny")


@pytest.mark.parametrize(
    ("preset", "words", "said", "unsaid"),
    [
        ("sparse", (), ("8 scenes on each of 8 processes, 64 in total", "400,000", "409.7 M"), ("model.residual",)),
        ("dense", ("model.size=tiny",), ("transformer are missing", "model.residual", "After 50,000 steps"), ()),
        ("dense", ("model.size=tiny", "model.residual=False", "training.pretrain_path=sparse.pth"), ("Folder: ",),
         ("transformer are missing", "model.residual")),
    ],
)  # fmt: skip
def test_plans_tell_what_matters(
    preset: Preset, words: tuple[str, ...], said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    text = " ".join(plan_lines(parse_settings(words, preset), processes=8))
    assert all(word in text for word in said) and not any(word in text for word in unsaid), text


def test_frozen_parts_are_not_trained() -> None:
    total, first, later = count_parameters(parse_settings([], "sparse"))
    assert total - first == pytest.approx(22.06e6, rel=1e-3) and later == first, "DINOv2 is frozen"
    total, first, later = count_parameters(parse_settings([], "dense"))
    assert first < 0.06 * total and later > 20 * first


def test_weights_gradients_and_moments_are_those_that_the_plan_counts() -> None:
    settings = parse_settings(SMALL, "sparse")
    held = step_memory(settings, processes=1)
    total, trained, _ = count_parameters(settings)
    assert held["parameters"] == 4 * total
    assert held["optimizer"] == pytest.approx(2 * 4 * trained, rel=1e-3)
    assert step_memory(settings, processes=8).get("gradients", 0) >= 4 * trained, "buckets"


def test_more_scenes_and_full_precision_take_more() -> None:
    few, many, full = (
        step_memory(parse_settings((*words, "model.size=tiny")), 1)["activations"]
        for words in (
            ("training.batch_size=2",),
            ("training.batch_size=4",),
            ("training.batch_size=2", "training.mixed_precision=False"),
        )
    )
    assert 1.8 < many / few < 2.1 and full > 1.3 * few


def test_unfreezing_takes_gradients_of_everything() -> None:
    frozen, unfrozen = memory_lines(parse_settings(SMALL, "dense"), 1)
    assert "at the peak of a step" in frozen and "after 50,000 steps" in unfrozen
    before, after = (int(re.findall(r"optimizer (\d+)", line)[0]) for line in (frozen, unfrozen))
    assert after > 5 * before

"""When what happens: in proportion to the run, and from the stage it begins with."""

import pytest

from f3rm_ext.splat.densify import DensifyOptions
from f3rm_ext.splat.regularization.options import RegularizationOptions
from f3rm_ext.splat.schedule import Schedule

SURFACE = RegularizationOptions()


def test_a_full_run_is_sugars() -> None:
    schedule = Schedule.from_options(15_000, SURFACE)
    assert schedule.surface(SURFACE) == SURFACE
    assert schedule.densify(DensifyOptions()) == DensifyOptions()
    assert schedule.position(123) == 123 and schedule.last_growth() == 7000


def test_a_short_run_is_in_proportion() -> None:
    schedule = Schedule.from_options(3000, SURFACE)
    surface, densify = schedule.surface(SURFACE), schedule.densify(DensifyOptions())
    assert (surface.entropy_start, surface.entropy_end, surface.prune_step) == (1400, 1800, 1800)
    assert (densify.start, densify.stop, densify.every, densify.reset_every) == (100, 3000, 25, 600)
    assert schedule.last_growth() == 1400


@pytest.mark.parametrize(
    ("total", "options", "every", "reset_every"),
    [
        # Rounds see enough images, resets come with rounds, and opacities have time to come back.
        (100, DensifyOptions(), 25, 300),
        (5000, DensifyOptions(), 33, 1023),
        (15_000, DensifyOptions(), 100, 3000),
        (30_000, DensifyOptions(), 200, 6000),
        (1500, DensifyOptions(every=10), 10, 300),
        (1500, DensifyOptions(reset_every=0), 25, 0),
    ],
)
def test_rounds_and_resets(total: int, options: DensifyOptions, every: int, reset_every: int) -> None:
    densify = Schedule.from_options(total, SURFACE).densify(options)
    assert (densify.every, densify.reset_every) == (every, reset_every)


@pytest.mark.parametrize(("stage", "first", "ratio"), [("entropy", 7000, 1.0), ("regularized", 9000, 1.0)])
def test_a_later_stage_gives_its_steps_to_what_is_left(stage, first: int, ratio: float) -> None:
    schedule = Schedule.from_options(15_000 - first, SURFACE, stage)
    assert schedule.offset == first and schedule.whole == 15_000 and schedule.ratio == pytest.approx(ratio)
    assert schedule.surface(SURFACE) == SURFACE
    assert schedule.position(0) == first


def test_degrees_of_colors_come_one_after_the_other() -> None:
    schedule = Schedule.from_options(3000, SURFACE)
    assert [schedule.sh_degree(step, 3, 1000) for step in (0, 199, 200, 400, 600, 2999)] == [0, 0, 1, 2, 3, 3]
    assert schedule.sh_degree(2999, 0, 1000) == 0
    assert Schedule.from_options(8000, SURFACE, "entropy").sh_degree(0, 3, 1000) == 3

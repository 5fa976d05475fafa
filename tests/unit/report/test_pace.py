"""How many steps fit into the time."""

import pytest

from f3rm_ext.report.pace import PROBE_S, RESTART_S, Pace


def run(pace: Pace, steps_per_s: float, seconds: float, start_step: int = 0) -> float | None:
    """Reports every second, from a clock that starts anywhere; the second at which the run falls short."""
    for second in range(int(seconds)):
        if pace.falls_short(start_step + int(second * steps_per_s), 1000.0 + second):
            return float(second)
    return None


def test_a_fast_run_is_left_alone() -> None:
    pace = Pace(1000, 180.0)
    assert run(pace, 6.0, 180) is None and pace.fitting is None


def test_a_nearly_fast_run_is_left_alone() -> None:
    assert run(Pace(1000, 180.0), 4.8, 180) is None


def test_a_slow_run_is_shortened_to_what_fits() -> None:
    pace = Pace(1000, 180.0)
    assert run(pace, 2.0, 180) == PROBE_S
    assert pace.fitting is not None
    assert pace.fitting <= 2.0 * (180 - RESTART_S), "the shortened run would not end in time either"
    assert pace.fitting >= 0.8 * 2.0 * (180 - RESTART_S), "time would be wasted"


def test_it_is_judged_once() -> None:
    pace = Pace(1000, 180.0)
    assert run(pace, 6.0, 60) is None
    assert not pace.falls_short(400, 5000.0), "a slow minute later on does not restart the run"


def test_a_resumed_run_counts_its_own_steps_only() -> None:
    pace = Pace(1000, 180.0)
    assert run(pace, 2.0, 180, start_step=700) is None
    assert run(Pace(1000, 180.0), 0.5, 180, start_step=700) == PROBE_S


def test_too_little_time_is_not_worth_a_restart() -> None:
    assert run(Pace(1000, 60.0), 1.0, 60) is None


@pytest.mark.parametrize("steps_per_s", [0.0, 0.01])
def test_a_run_that_hardly_moves_is_never_planned_to_end_before_where_it_is(steps_per_s: float) -> None:
    pace = Pace(1000, 180.0)
    run(pace, steps_per_s, 180, start_step=10)
    assert pace.fitting is None or pace.fitting > 10

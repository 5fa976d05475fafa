"""How many training steps fit into a time, judged from the first of them."""

PROBE_S = 20.0
"""Seconds of training after which it is judged, once."""
RESTART_S = 20.0
"""What it costs to stop and go on with another number of steps."""
ENOUGH = 0.85
"""A run that is expected to reach this share of its steps is left alone."""
_MIN_TIME_S = 4 * RESTART_S


class Pace:
    """Judges whether a run will end in time.

    Args:
        planned: the step at which the run is to end.
        time_s: seconds of training left, counted from the first report.
    """

    def __init__(self, planned: int, time_s: float) -> None:
        self.planned, self.time_s = planned, time_s
        self.fitting: int | None = None
        """The number of steps that does fit, once it is clear that the planned one does not."""
        self._first: tuple[int, float] | None = None
        self._judged = time_s < _MIN_TIME_S

    def falls_short(self, step: int, now_s: float) -> bool:
        """Takes a report of progress; True at the moment it is clear that the run had better be shortened.

        Args:
            step: steps done.
            now_s: time of the report, on any clock that does not jump.
        """
        if self._first is None:
            self._first = (step, now_s)
        first_step, first_s = self._first
        if self._judged or now_s - first_s < PROBE_S or step <= first_step:
            return False
        self._judged = True
        rate = (step - first_step) / (now_s - first_s)
        left_s = self.time_s - (now_s - first_s)
        if step + rate * left_s >= ENOUGH * self.planned:
            return False
        self.fitting = max(step + 1, int(step + 0.9 * rate * (left_s - RESTART_S)))
        return True

"""Jobs run one after the other, and only the newest of those that wait is kept."""

import threading

import pytest

from f3rm_ext.viewer.worker import LatestJob


def test_of_jobs_that_wait_only_the_newest_runs() -> None:
    job, ran = LatestJob("test"), []
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(30)
        ran.append(1)

    job.submit(first)
    assert begun.wait(30)
    job.submit(lambda: ran.append(2))
    job.submit(lambda: ran.append(3))
    assert not job.join(0.01)
    go_on.set()
    assert job.join(30.0) and ran == [1, 3]
    job.submit(lambda: ran.append(4))
    assert job.join(30.0) and ran == [1, 3, 4]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_raises_does_not_keep_the_next_from_running() -> None:
    job, ran = LatestJob("test"), []
    job.submit(lambda: {}["no such key"])
    assert job.join(30.0)
    job.submit(lambda: ran.append(1))
    assert job.join(30.0) and ran == [1]

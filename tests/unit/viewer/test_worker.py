"""Jobs run one after the other, only the newest of those that wait is kept, and a process ends amid them."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from f3rm_ext.viewer.worker import LatestJob


def keep_busy(job: LatestJob, then: Callable[[], None]) -> threading.Event:
    """Submits work that goes on until the event is set; returns once it has begun."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(30)
        then()

    job.submit(work)
    assert begun.wait(30)
    return go_on


def test_of_jobs_that_wait_only_the_newest_runs() -> None:
    job, ran = LatestJob("test"), []
    go_on = keep_busy(job, lambda: ran.append(1))
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


def test_a_job_that_waits_does_not_begin_after_the_end() -> None:
    job, ran = LatestJob("test"), []
    go_on = keep_busy(job, lambda: ran.append(1))
    job.submit(lambda: ran.append(2))
    job.close()
    job.submit(lambda: ran.append(3))
    go_on.set()
    assert job.join(30.0) and ran == [1]


def _end_amid(job: str) -> subprocess.CompletedProcess[str]:
    """Runs a job that sets ``began``, in a process of its own that ends as by Ctrl-C as soon as it has."""
    code = f"""
import sys, threading, time
import torch
from f3rm_ext.viewer import worker

began = threading.Event()

{job}

latest = worker.LatestJob("test")
latest.submit(job)
assert began.wait(30)
sys.exit(130)
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_process_ends_while_a_job_is_in_torch() -> None:
    """Threads that are in torch when Python ends abort the process."""
    result = _end_amid("""
def job():
    until = time.monotonic() + 1
    while time.monotonic() < until:
        torch.relu(torch.ones(64, 64)) @ torch.ones(64, 64)
        began.set()
    print("done", flush=True)
""")
    assert (result.returncode, result.stdout.split()) == (130, ["done"]), result.stderr


def test_a_process_does_not_wait_for_ever_for_a_job_that_hangs() -> None:
    result = _end_amid("""
worker.PATIENCE_S = 0.2

def job():
    began.set()
    threading.Event().wait()
""")
    assert result.returncode == 130, result.stderr

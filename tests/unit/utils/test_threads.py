"""As many threads as usable cores, whatever limits them; and waiting threads that sleep."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from f3rm_ext.memory.control_groups import group_folders
from f3rm_ext.utils import threads

linux = pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is Linux's")


@pytest.fixture
def set_quota(monkeypatch: pytest.MonkeyPatch) -> Callable[[float | None], None]:
    """Gives this process so many cores by its control group; None sets no limit."""
    return lambda quota: monkeypatch.setattr(threads, "cpu_quota", lambda folders: quota)


def version_1(folder: str, quota: int) -> dict[str, str]:
    """Files of a control group of version 1."""
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": "100000"}


MEMORY = version_1("memory/docker/x", 1)
MEMBERSHIPS = "5:memory:/docker/x\n4:%s:/docker/x\n1:name=systemd:/docker/x\n"
UNIFIED = {"unified/a/cpu.max": "100000 100000"}
NESTED = {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "400000 100000"}


class TestQuota:
    @pytest.mark.parametrize(
        ("files", "memberships", "expected"),
        [
            ({"cpu.max": "150000 100000"}, "0::/\n", 1.5),
            (NESTED, "0::/a/b/c\n", 2),
            (version_1("cpu/docker/x", 250000) | MEMORY, MEMBERSHIPS % "cpu", 2.5),
            (version_1("cpu,cpuacct/docker/x", 250000) | MEMORY, MEMBERSHIPS % "cpu,cpuacct", 2.5),
            (version_1("cpu/docker/x", 250000) | UNIFIED, MEMBERSHIPS % "cpu" + "0::/a\n", 1),  # both versions at once
            (version_1("cpu", 50000), "4:cpu:/docker/0123abc\n", 0.5),  # named as outside of the container
            ({"cpu.max": "50000 100000"}, "0::/../../x\n", 0.5),
            (version_1("cpu", -1), "4:cpu:/\n", None),
            *(({"cpu.max": text}, "0::/\n", None) for text in ("max 100000", "", "one two three", "x 1000", "1000 0")),
        ],
    )
    def test_the_tightest_of_the_groups_around_counts(
        self, tmp_path: Path, files: dict[str, str], memberships: str, expected: float | None
    ) -> None:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content + "\n")
        assert threads.cpu_quota(group_folders("cpu", memberships, tmp_path)) == expected

    @pytest.mark.parametrize(("quota", "expected"), [(None, 4), (0.5, 1), (1.5, 2), (3.0, 3), (64.0, 4)])
    def test_usable_cores(
        self,
        monkeypatch: pytest.MonkeyPatch,
        set_quota: Callable[[float | None], None],
        quota: float | None,
        expected: int,
    ) -> None:
        monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
        set_quota(quota)
        assert threads.usable_cores() == expected


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def _before_torch(self, monkeypatch: pytest.MonkeyPatch, set_quota: Callable[[float | None], None]) -> None:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        set_quota(1.0)

    def test_waiting_threads_sleep_and_there_are_as_many_as_cores(
        self, monkeypatch: pytest.MonkeyPatch, set_quota: Callable[[float | None], None]
    ) -> None:
        environment: dict[str, str] = {}
        threads.prepare_environment(environment)
        assert environment == {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        set_quota(None)
        environment.clear()
        threads.prepare_environment(environment)
        assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}, "libraries count the cores themselves"
        monkeypatch.setitem(sys.modules, "torch", None)
        environment.clear()
        threads.prepare_environment(environment)
        assert environment == {}, "too late once torch is there"

    def test_what_the_user_says_is_kept(self) -> None:
        said = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "7", "NUMBA_NUM_THREADS": "6"}
        environment = dict(said)
        threads.prepare_environment(environment)
        assert environment == said
        environment = {"GOMP_SPINCOUNT": "10", **said}
        del environment["OMP_WAIT_POLICY"]
        threads.prepare_environment(environment)
        assert "OMP_WAIT_POLICY" not in environment


def run(code: str, **environment: str) -> dict[str, float]:
    """The JSON a process prints that is free in how its threads wait and how many they are."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "NUMBA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PAUSES = """
import json, time
import torch, numba, numpy as np
from f3rm_ext.utils import threads

torch.set_num_threads(2)
x, y = torch.rand(100_000), np.random.rand(100_000)

@numba.njit(parallel=True)
def doubled(y):
    for i in numba.prange(y.shape[0]):
        y[i] = 2 * y[i]

def idle_cpu_ms(work):
    "CPU time of pauses of 5 ms, each after a parallel loop, per pause: nothing but waiting threads."
    work()
    spent = 0.0
    for _ in range(60):
        work()
        began = time.process_time()
        time.sleep(0.005)
        spent += time.process_time() - began
    return 1e3 * spent / 60

works = {"torch": lambda: x * 2, "numba": lambda: doubled(y)}
report = {name: idle_cpu_ms(work) for name, work in works.items()}
%s
report |= {f"{name} after": idle_cpu_ms(work) for name, work in works.items()}
print(json.dumps(report))
"""


@linux
@pytest.mark.skipif(threads.usable_cores() < 2, reason="one thread only")
class TestWaiting:
    def test_waiting_threads_sleep_although_torch_is_there_already(self) -> None:
        found = run(PAUSES % "assert threads.let_waiting_threads_sleep()", NUMBA_NUM_THREADS="2")
        assert found["torch after"] < max(found["torch"] / 3, 0.1), found
        # A spinning thread takes most of the 5 ms; numba's do not spin on every machine to begin with.
        if found["numba"] > 0.5:
            assert found["numba after"] < max(found["numba"] / 3, 0.1), found


SETTLED = """
import json, os, sys
import torch
from f3rm_ext.utils import threads
threads.cpu_quota = lambda folders: 1.0
threads.settle(numba=True)
threads.settle(numba=True)
try:
    import numba
    numbers = numba.config.NUMBA_NUM_THREADS
except ImportError:
    numbers = 0
import threading
asleep = [thread.name for thread in threading.enumerate() if thread.name.startswith("f3rm_ext")]
found = {"torch": torch.get_num_threads(), "numba": numbers, "teams": len(asleep)}
print(json.dumps({**found, "asked": int(threads.let_waiting_threads_sleep())}))
"""


class TestSettle:
    def test_threads_of_the_quota(self) -> None:
        found = run(SETTLED)
        assert (found["torch"], found["numba"]) == (1, 1)
        assert found["teams"] <= 2, "one for each library, whatever often it is called"

    def test_numbers_the_user_gives_are_kept_and_numba_may_be_missing(self) -> None:
        found = run(SETTLED, OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="2")
        assert (found["torch"], found["numba"]) == (2, 2)
        without = run("import sys; sys.modules['numba'] = None\n" + SETTLED, GOMP_SPINCOUNT="100000")
        assert (without["torch"], without["numba"]) == (1, 0)
        assert without["asked"] == 0, "what the user says about waiting is kept"


class TestWhereItIsCalled:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        calls: list[bool] = []
        monkeypatch.setattr(threads, "settle", lambda *, numba: calls.append(numba))
        return calls

    def test_models(self, calls: list[bool], make_model: Callable[..., object]) -> None:
        from nerfstudio.data.scene_box import SceneBox

        from f3rm_ext.splat.model import SplatModelConfig

        make_model()
        box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        SplatModelConfig(num_random=10).setup(scene_box=box, num_train_data=1, device="cpu")
        assert calls == [True, True]

    def test_training(self, calls: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from nerfstudio.engine.trainer import Trainer

        from f3rm_ext.engine.trainer import F3rmTrainer, F3rmTrainerConfig

        class Reached(Exception):
            pass

        def setup(self: object, test_mode: str) -> None:
            assert calls == [True], "before features are extracted"
            raise Reached

        monkeypatch.setattr(Trainer, "setup", setup)
        config = F3rmTrainerConfig(output_dir=tmp_path, experiment_name="e", timestamp="t", method_name="m")
        config.machine.device_type = "cpu"
        with pytest.raises(Reached):
            F3rmTrainer(config).setup()

    def test_our_commands_before_torch(self) -> None:
        code = (
            "import json, os, sys; from f3rm_ext.scripts import cli; cli.main(['--version']); assert 'torch' not in "
            "sys.modules; import torch; print(json.dumps({'policy': os.environ['OMP_WAIT_POLICY']}))"
        )
        assert run(code) == {"policy": "PASSIVE"}


FREED = """
import ctypes, os, resource
from f3rm_ext.utils import threads

libc, size = ctypes.CDLL(None), 6 << 20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def count_faults():
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [libc.malloc(size) for _ in range(12)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        for block in reversed(blocks):
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(count_faults(), threads.keep_freed_memory(), count_faults())
"""


@linux
def test_freed_memory_is_allocated_again_without_new_pages() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("glibc's allocator is not there")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", FREED], env=clean, capture_output=True, text=True, check=True)
    before, kept, after = done.stdout.split()
    assert kept == "True" and int(after) < int(before) / 20, done.stdout


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_says_how_memory_is_allocated(name: str) -> None:
    assert not threads.keep_freed_memory({name: "glibc.malloc.trim_threshold=1"})

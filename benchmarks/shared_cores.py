"""Training on the CPU beside another busy program: threads that sleep while they wait, and threads that spin.

    python benchmarks/shared_cores.py --data CAPTURE

trains each method in processes of its own on the same images: first alone, then beside one busy process per core at
equal priority, then beside them with all threads of the training at lower priority (nice 10). The peer waits as GNU
OpenMP does by itself (GOMP_SPINCOUNT=300000 is its default), as training did before its waiting threads slept. Prints
steps per second and CPU time per step of every measurement, and writes results/shared_cores.json, of which
docs/make_benchmarks.py makes a table of medians. For Linux, and for a machine that does nothing else.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from processes import report_result, require_result, write_report

HERE = Path(__file__).parent
WAITING = {"sleeping": {}, "spinning": {"GOMP_SPINCOUNT": "300000"}}
"""What the environment says in each kind of run."""
OTHERS = ("alone", "equal priority", "lower priority")
GIVEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER")
WARM_STEPS = 30
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


class Done(Exception):
    """Everything has been measured."""


@contextlib.contextmanager
def busy(processes: int):
    """Processes that do nothing but compute, for as long as the context lasts."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def lower_priority() -> None:
    """Nice 10 for all threads of this process: Linux keeps it by thread."""
    for thread in os.listdir("/proc/self/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 10)


@dataclass
class Once:
    """Trains one method in this process and measures its steps in each company."""

    method: str
    """Registered name."""
    data: Path
    """A capture with a transforms.json."""
    scale: float = 0.25
    """Factor on the image size."""
    seconds: float = 4.0
    """How long each measurement takes, in seconds."""
    windows: int = 3
    """Measurements in each company."""
    seed: int = 42
    """Random seed."""

    def main(self) -> None:
        """Measures, and prints the result as one line of JSON."""
        from nerfstudio.configs.method_configs import all_methods
        from nerfstudio.scripts.train import _set_random_seed
        from train_once import measured_config

        method = all_methods[self.method]
        with tempfile.TemporaryDirectory() as folder:
            config = measured_config(
                method, self.data, Path(folder), steps=100_000, scale=self.scale, device="cpu", seed=self.seed
            )
            _set_random_seed(self.seed)
            trainer = config.setup(local_rank=0, world_size=1)
            trainer.setup()
            found: dict[str, list[dict[str, float]]] = {}
            with contextlib.suppress(Done), contextlib.ExitStack() as context:
                trainer.train_iteration = self._watch(trainer.train_iteration, found, context)
                trainer.train()
        import torch

        report_result({"companies": found, "threads": torch.get_num_threads()})

    def _watch(self, inner: Any, found: dict[str, list[dict[str, float]]], context: contextlib.ExitStack) -> Any:
        """A training step that counts, and changes the company when its time is over."""
        alone, equal, lower = OTHERS
        companies = iter([alone, equal] * self.windows + [lower] * self.windows)  # priority is not won back
        steps, began, began_cpu, company = -WARM_STEPS, 0.0, 0.0, ""

        def step(number: int) -> Any:
            nonlocal steps, began, began_cpu, company
            passed = time.perf_counter() - began
            if steps >= 0 and (not company or passed >= self.seconds):
                if company:
                    cpu_s = time.process_time() - began_cpu
                    figures = {"steps_per_s": steps / passed, "cpu_ms_per_step": 1e3 * cpu_s / steps}
                    found.setdefault(company, []).append(figures)
                context.close()
                company = next(companies, "")
                if not company:
                    raise Done
                if company != alone:
                    context.enter_context(busy(len(os.sched_getaffinity(0))))
                if company == lower:
                    lower_priority()
                steps, began, began_cpu = 0, time.perf_counter(), time.process_time()
            steps += 1
            return inner(number)

        return step


@dataclass
class SharedCores:
    """Compares sleeping and spinning threads."""

    data: Path
    """A capture with a transforms.json."""
    methods: tuple[str, ...] = ("sugar-ext-lite", "f3rm-ext-lite")
    """Registered names."""
    scale: float = 0.25
    """Factor on the image size."""
    seconds: float = 4.0
    """How long each measurement takes, in seconds."""
    windows: int = 3
    """Measurements in each company."""
    out: Path = HERE / "results" / "shared_cores.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Measures everything."""
        rows: list[dict[str, Any]] = []
        for method in self.methods:
            for waiting, said in WAITING.items():
                rows.append({"method": method, "waiting": waiting, **self._once(method, said)})
                print(json.dumps(rows[-1]), flush=True)
        report = {
            "python": platform.python_version(),
            "capture": self.data.name,
            "options": {"scale": self.scale, "seconds": self.seconds, "windows": self.windows},
            "rows": rows,
        }
        write_report(report, self.out)

    def _once(self, method: str, said: dict[str, str]) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if name not in GIVEN} | said
        command = [sys.executable, __file__, "--once", "--method", method, "--data", str(self.data.resolve())]
        command += ["--scale", str(self.scale), "--seconds", str(self.seconds), "--windows", str(self.windows)]
        return require_result(command, environment)


if __name__ == "__main__":
    if "--once" in sys.argv:
        sys.argv.remove("--once")
        tyro.cli(Once).main()
    else:
        tyro.cli(SharedCores).main()

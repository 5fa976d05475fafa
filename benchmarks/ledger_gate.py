"""Does `f3rm-ext bench compare` catch what it should, and nothing else?

Four variants of a small run are measured in turn: a baseline, the same again, one with eight times the samples (slow),
and one whose field hardly learns (its pictures stay blurred).

    python benchmarks/ledger_gate.py

Trainings and evaluations are forks of this process, since imports would take longer than the small runs. It
writes results/ledger_gate.md and exits with code 1 if a verdict is not the expected one.
"""

import datetime
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from commands import call

from f3rm_ext.bench import worker
from f3rm_ext.bench.comparison import compare
from f3rm_ext.bench.ledger import Ledger
from f3rm_ext.bench.runs import Bench, Protocol, Side
from f3rm_ext.bench.tables import comparison_table, how_text, origin_text, verdict_sentence, what_text
from f3rm_ext.report.records import read_json
from f3rm_ext.utils.console import console

HERE = Path(__file__).parent
BASE = "base"
RAYS = ("--pipeline.datamanager.train-num-rays-per-batch", "128")
EXPECTED: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "same": ((), set()),
    "slowed": (("--pipeline.model.num-samples", "192"), {"it_per_s"}),
    "blurred": (("--optimizers.fields.optimizer.lr", "0.0005"), {"psnr", "ssim", "lpips", "l1"}),
}
"""Options of each variant, and the figures at least one of which must be worse; none must be, where there are none."""


class ForkedBench(Bench):
    """Does its jobs in forks of this process."""

    def _work(self, job: worker.TrainJob | worker.EvalJob, folder: Path, python: str, what: str) -> dict[str, Any]:
        import nerfstudio.configs.method_configs
        import nerfstudio.scripts.train  # noqa: F401

        print(f"{what} …", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        worker.write_job(job, folder / "job.json")
        process = os.fork()
        if process == 0:
            code = 1
            try:
                said = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(said, 1)
                os.dup2(said, 2)
                sys.argv = ["worker", str(folder / "job.json")]
                worker.main()
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(process, 0)[1]:
            raise SystemExit(f"{what} failed:\n{(folder / 'log').read_text()[-3000:]}")
        return read_json(folder / worker.RESULT)


@dataclass
class LedgerGate:
    """Measures the variants and judges them."""

    steps: int = 120
    """Steps of each run."""
    repeats: int = 3
    """Runs of each variant."""
    out: Path = HERE / "results" / "ledger_gate.md"
    """Where the comparisons are written."""

    def main(self) -> int:
        """Runs everything. Returns 1 if a verdict is not the expected one."""
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "room"
            size = ("--num-images", 12, "--width", 64, "--height", 48, "--light-rays", 1, "--holdout-every", 4)
            # In a process of its own: what has computed in several threads cannot be forked.
            call(["f3rm-ext", "scene", "synth", data, "--seed", 1, *size])
            ledger = Ledger(Path(folder) / "ledger.sqlite")
            run = ("f3rm-ext-lite", "--data", str(data), "--max-num-iterations", str(self.steps), *RAYS)
            options = {BASE: (), **{name: options for name, (options, _) in EXPECTED.items()}}
            sides = [Side(name, (*run, *more)) for name, more in options.items()]
            ForkedBench(ledger, console()).run(sides, Protocol(self.repeats, steps=0, warm_up=10, train_views=2))
            base = ledger.entry(BASE)
            date = datetime.date.today().isoformat()
            parts = [
                "# What the gate of the ledger catches",
                f"Made by `python benchmarks/ledger_gate.py` on {date}. {what_text(base.conditions)}; "
                f"{how_text(base.conditions)}; {origin_text(base)}.",
            ]
            is_right = True
            for name, (more, expected) in EXPECTED.items():
                found = compare(base, ledger.entry(name))
                worse = {row.metric.key for row in found.regressions}
                is_right &= bool(worse & expected) if expected else not worse
                parts += [f"## {name} `{' '.join(more)}`" if more else f"## {name}", comparison_table(found).markdown()]
                parts.append(f"**{verdict_sentence(found)}**")
        self.out.write_text("\n\n".join(parts) + "\n")
        print(self.out.read_text())
        return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(LedgerGate).main())

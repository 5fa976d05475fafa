"""Does `f3rm-ext bench compare` catch what it should, and nothing else?

A small run is measured in turn with two variants: one with six times the samples (slow), and one whose field
learns at a twentieth of the rate, so that its pictures stay blurred. Then it is measured against itself, ten times.

    python benchmarks/ledger_gate.py [--repetitions 10]

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

from f3rm_ext.ledger import worker
from f3rm_ext.ledger.comparison import Comparison, compare
from f3rm_ext.ledger.entry import Entry
from f3rm_ext.ledger.ledger import Ledger
from f3rm_ext.ledger.runs import Bench, Protocol, Side
from f3rm_ext.ledger.tables import Table, comparison_table, how_text, origin_text, percent, verdict_sentence, what_text
from f3rm_ext.utils.console import console
from f3rm_ext.workflow.records import read_json

HERE = Path(__file__).parent
BASE, SAME = "base", "same"
RUN = ("--pipeline.datamanager.train-num-rays-per-batch", "128", "--pipeline.datamanager.features.extractors")
VARIANTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "slowed": (("--pipeline.model.num-samples", "144"), {"it_per_s"}),
    "blurred": (("--optimizers.fields.optimizer.lr", "0.0005"), {"psnr", "ssim", "lpips", "l1"}),
}
"""Options of each variant, and the figures at least one of which must be worse."""


class ForkedBench(Bench):
    """Does its jobs in forks of this process."""

    def _work(self, job: worker.TrainJob | worker.EvalJob, folder: Path, python: str, what: str) -> dict[str, Any]:
        import nerfstudio.configs.method_configs
        import nerfstudio.scripts.train  # noqa: F401
        import torchmetrics.image  # noqa: F401

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

    steps: int = 150
    """Steps of each run. After 100, the blurred variant is worse on training views only."""
    repeats: int = 5
    """Runs of each variant; 3 will do on a machine that does nothing else."""
    repetitions: int = 10
    """Times that the run is measured against itself."""
    out: Path = HERE / "results" / "ledger_gate.md"
    """Where the comparisons are written."""

    def main(self) -> int:
        """Runs everything. Returns 1 if a verdict is not the expected one."""
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "room"
            size = ("--num-images", 12, "--width", 64, "--height", 48, "--light-rays", 1, "--holdout-every", 4)
            # In a process of its own: what has computed in several threads cannot be forked.
            call(["f3rm-ext", "scene", "synth", data, "--seed", 1, *size])
            protocol = Protocol(self.repeats, steps=0, warm_up=10, train_views=2)
            ledger = Ledger(Path(folder) / "ledger.sqlite")
            run = ("f3rm-ext-lite", "--data", str(data), "--max-num-iterations", str(self.steps), *RUN)
            variants = [Side(name, (*run, *options)) for name, (options, _) in VARIANTS.items()]
            ForkedBench(ledger, console()).run([Side(BASE, run), *variants], protocol)
            base = ledger.entry(BASE)
            found = {name: compare(base, ledger.entry(name)) for name in VARIANTS}
            same = []
            for number in range(1, self.repetitions + 1):
                names = f"{BASE} {number}", f"{SAME} {number}"
                ForkedBench(ledger, console()).run([Side(name, run) for name in names], protocol)
                same.append(compare(ledger.entry(names[0]), ledger.entry(names[1])))
        self.out.write_text(self._report(base, found, same))
        print(self.out.read_text())
        are_caught = all(_worse(one) & VARIANTS[name][1] for name, one in found.items())
        flagged = sum(bool(one.regressions) for one in same)
        return 0 if are_caught and 10 * flagged <= self.repetitions else 1

    def _report(self, base: Entry, found: dict[str, Comparison], same: list[Comparison]) -> str:
        """The comparisons as Markdown."""
        parts = [
            "# What the gate of the ledger catches",
            f"Made by `python benchmarks/ledger_gate.py --repetitions {self.repetitions}` on "
            f"{datetime.date.today().isoformat()}, while {os.getloadavg()[1]:.0f} processes shared "
            f"{os.cpu_count()} cores. {what_text(base.conditions)}; {how_text(base.conditions)}; {origin_text(base)}.",
        ]
        for name, one in found.items():
            parts += [f"## {name}: `{' '.join(VARIANTS[name][0])}`", comparison_table(one).markdown()]
            parts.append(f"**{verdict_sentence(one)}**")
        flagged = sum(bool(one.regressions) for one in same)
        speeds = [next(row.change for row in one.rows if row.metric.key == "it_per_s") for one in same]
        rows = [
            [
                str(number),
                percent(speed.middle),
                f"{percent(speed.low)} to {percent(speed.high)}",
                verdict_sentence(one),
            ]
            for number, (one, speed) in enumerate(zip(same, speeds, strict=True), 1)
            if speed is not None
        ]
        head = ["repetition", "change of it/s", "95 % interval", "verdict"]
        parts += ["## The same run, measured against itself", Table(head, rows).markdown()]
        parts.append(f"**Flagged in {flagged} of {len(same)} repetitions.**")
        return "\n\n".join(parts) + "\n"


def _worse(found: Comparison) -> set[str]:
    return {row.metric.key for row in found.regressions}


if __name__ == "__main__":
    sys.exit(tyro.cli(LedgerGate).main())

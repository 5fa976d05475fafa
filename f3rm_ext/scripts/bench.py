"""``f3rm-ext bench``: the ledger of measured runs."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.ledger.entry import Protocol, Status
from f3rm_ext.scripts.common import OutArg, require_own_file
from f3rm_ext.utils.console import console
from f3rm_ext.utils.ranges import Count, Range, check_ranges

if TYPE_CHECKING:
    from f3rm_ext.ledger.ledger import Ledger

MADE_BY = "f3rm-ext bench report"


@dataclass(kw_only=True)
class _LedgerOptions:
    """Options that all subcommands share."""

    ledger: Path | None = None
    """File of the ledger; by default $XDG_DATA_HOME/f3rm_ext/ledger.sqlite, otherwise in ~/.local/share/f3rm_ext."""

    def open_ledger(self) -> "Ledger":
        from f3rm_ext.ledger.ledger import Ledger

        return Ledger(self.ledger)


@dataclass
class Run(_LedgerOptions):
    """Train and evaluate a method several times, and record speed, memory and quality.

    Options of the benchmark come first, then `--`, then the run as for ns-train. Each repeat trains and evaluates in
    processes of its own, with another seed. Evaluation, saving and the viewer are off while steps are timed.

    A whole run of 2000 steps:

        f3rm-ext bench run --name base -- f3rm-ext-lite --data CAPTURE --max-num-iterations 2000

    Steps 3000 to 4000 of a run of 30,000, with its schedule:

        f3rm-ext bench run --name late --steps 1000 -- f3rm-ext --data CAPTURE --max-num-iterations 30000
        --load-checkpoint RUN/nerfstudio_models/step-000002999.ckpt

    A change of options, measured in turn with its baseline:

        f3rm-ext bench run --name small --against base -- f3rm-ext-lite --data CAPTURE --max-num-iterations 2000
        --pipeline.model.num-samples 16
    """

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """Method and options, as for ns-train; after `--`."""
    name: str = ""
    """Name of the entry, which must be new or that of an idea. By default the method's name with a number."""
    note: str = ""
    """Purpose of the measurement, for the lab book."""
    protocol: Annotated[Protocol, tyro.conf.arg(name="")] = field(default_factory=Protocol)
    """Number of runs, the steps that are timed, and the views that are evaluated."""
    against: str = ""
    """Entry to run again, in turn with this one, so that changes of the machine cancel out. Its repeats become the
    entry NAME-baseline."""
    against_python: Path | None = None
    """Python of the environment with the baseline's code. By default the current one."""
    keep_runs: Path | None = None
    """Folder in which to keep run folders. By default they are deleted."""

    def main(self) -> int:
        from f3rm_ext.ledger.runs import Bench, Variant, baseline_variant, require_python

        if not self.command:
            raise ConfigError("There is no run to measure: give a method and its options after `--`, as for ns-train.")
        if self.against and not self.name:
            raise ConfigError("--against needs a --name, after which the baseline's entry is named.")
        if self.against_python is not None and not self.against:
            raise ConfigError("--against-python needs --against, which says what to run with it.")
        if self.protocol.eval_step and not self.protocol.evaluate:
            raise ConfigError("--eval-step and --no-evaluate contradict each other: leave one out.")
        ledger = self.open_ledger()
        variants = [Variant(self.name, self.command, note=self.note)]
        if self.against:
            python = variants[0].python if self.against_python is None else require_python(self.against_python)
            variants.insert(0, baseline_variant(ledger, self.against, self.name, python))
        names = Bench(ledger, console(), self.keep_runs).run(variants, self.protocol)
        print(f"Recorded {' and '.join(names)} in {ledger.path}.")
        if self.against:
            option = [] if self.ledger is None else ["--ledger", str(self.ledger)]
            print(f"Compare them: {shlex.join(['f3rm-ext', 'bench', 'compare', names[-1], *option])}")
        return 0


@dataclass
class Add(_LedgerOptions):
    """Evaluate finished runs and record them as repeats of one entry.

    Speed and peak memory of training come from the run itself, as far as it recorded them. Unknown values, such as the
    machine that a run was trained on, are recorded as missing.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or their config.yml."""
    name: str = ""
    """Name of the entry, which must be new or that of an idea. By default the method's name with a number."""
    note: str = ""
    """Description of the runs, for the lab book."""
    train_views: Count = 8
    """Number of training views to evaluate beside the held-out ones, spread evenly."""
    trained_here: bool = False
    """The runs were trained on this machine: record it as their hardware."""

    def main(self) -> int:
        from f3rm_ext.ledger.runs import Bench, add_runs

        if not self.runs:
            raise ConfigError("There is nothing to add: give run folders, or the config.yml of runs.")
        check_ranges(self)
        ledger = self.open_ledger()
        name = add_runs(
            Bench(ledger, console()),
            self.runs,
            name=self.name,
            train_views=self.train_views,
            trained_here=self.trained_here,
            note=self.note,
        )
        print(f"Recorded {name} in {ledger.path}.")
        for phrase in ledger.entry(name).anomalies():
            print(f"  {phrase}")
        return 0


@dataclass
class Compare(_LedgerOptions):
    """Judge an entry against a baseline; exit code 1 if it is worse.

    Speed is worse if the 95 % confidence interval of its change lies below zero; the noise band that follows from the
    repeats is printed. PSNR, SSIM, LPIPS and L1 of held-out views are worse if they change by more than the tolerance
    and the interval does not reach zero. Memory is shown and not judged. Entries that differ in capture, resolution,
    split, steps or hardware are refused.
    """

    entry: tyro.conf.Positional[str]
    """Entry to judge."""
    baseline: tyro.conf.Positional[str] = ""
    """Entry to compare it with. By default the baseline that was measured in turn with it."""
    tolerance: Annotated[float, Range(0, 100)] = 0.5
    """Change of quality that does not count, percent."""

    def main(self) -> int:
        """Prints the comparison. Returns 1 on a regression, otherwise 0."""
        from f3rm_ext.ledger.comparison import compare
        from f3rm_ext.ledger.report import comparison_table, conditions_text, conditions_title, verdict_sentence
        from f3rm_ext.ledger.runs import baseline_name

        check_ranges(self)
        ledger = self.open_ledger()
        new = ledger.entry(self.entry)
        base = ledger.entry(self.baseline or baseline_name(self.entry))
        comparison = compare(base, new, self.tolerance / 100)
        conditions = f"{conditions_title(new)}; {conditions_text(new)}"
        parts = [conditions, comparison_table(comparison).text(), *comparison.remarks, verdict_sentence(comparison)]
        print("\n\n".join(parts))
        return 1 if comparison.regressions else 0


@dataclass
class Report(_LedgerOptions):
    """Write a report of the ledger as Markdown or as one HTML page with plots."""

    entries: tyro.conf.Positional[tuple[str, ...]] = ()
    """Entries to report on; by default all."""
    baseline: str = ""
    """Entry to compare the others with that were measured under the same conditions."""
    tolerance: Annotated[float, Range(0, 100)] = 0.5
    """Change of quality that does not count, percent."""
    out: Annotated[Path | None, OutArg] = None
    """File to write, .md or .html. By default Markdown is printed."""

    def main(self) -> int:
        from f3rm_ext.ledger.report import html_report, markdown_report
        from f3rm_ext.utils.output_file import write_file
        from f3rm_ext.utils.provenance import sign_text

        check_ranges(self)
        ledger = self.open_ledger()
        chosen = [ledger.entry(name) for name in self.entries] or ledger.entries()
        baseline = ledger.entry(self.baseline) if self.baseline else None
        if self.out is None:
            print(markdown_report(chosen, baseline, self.tolerance / 100), end="")
            return 0
        writers = {".md": markdown_report, ".html": html_report}
        if self.out.suffix not in writers:
            raise ConfigError(f"--out is {self.out}, but a report is Markdown or HTML: give a name in .md or .html.")
        require_own_file(self.out, MADE_BY)
        write_file(self.out, sign_text(writers[self.out.suffix](chosen, baseline, self.tolerance / 100), MADE_BY))
        print(f"Wrote {self.out}.")
        return 0


@dataclass
class List(_LedgerOptions):
    """List the entries of the ledger."""

    def main(self) -> int:
        from f3rm_ext.html.tables import Table
        from f3rm_ext.ledger.entry import METRICS
        from f3rm_ext.ledger.report import commit_text, figure_text

        shown = [metric for metric in METRICS if metric.key in ("it_per_s", "psnr", "train_peak_mib")]
        rows = [
            [
                f"{entry.name}{' ?' if entry.anomalies() else ''}",
                entry.method,
                entry.status,
                *(figure_text(metric, entry) for metric in shown),
                str(len(entry.repeats)),
                entry.date[:10],
                commit_text(entry),
            ]
            for entry in self.open_ledger().entries()
        ]
        header = ["name", "method", "status", *(metric.title for metric in shown), "repeats", "begun", "commit"]
        print(Table(header, rows, "lll").text())
        if any(row[0].endswith(" ?") for row in rows):
            print("\n? needs a second look: `f3rm-ext bench report NAME` says why.")
        return 0


@dataclass
class Note(_LedgerOptions):
    """Write into the lab book: a note on an entry, its outcome, or an idea that is still to be measured.

    Typical calls:
      f3rm-ext bench note small "12 % faster, but PSNR falls by 0.4 dB" --status "no gain"
      f3rm-ext bench note half-size "Train at half the size, if memory is short." --status idea
    """

    entry: tyro.conf.Positional[str]
    """Entry to write about."""
    text: tyro.conf.Positional[str] = ""
    """The note."""
    status: Status | None = None
    """Outcome of the entry. `idea` makes an entry without a run, which `bench run --name ENTRY` measures later."""

    def main(self) -> int:
        if not self.text and self.status is None:
            raise ConfigError("There is nothing to note: give a text, or --status.")
        self.open_ledger().note(self.entry, self.text, self.status)
        return 0


BenchCommand = Run | Add | Compare | Report | List | Note

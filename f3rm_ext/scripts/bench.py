"""``f3rm-ext bench``: the ledger of measured runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.ranges import Count, Range, check_ranges

if TYPE_CHECKING:
    from f3rm_ext.ledger.ledger import Ledger

MADE_BY = "f3rm-ext bench report"


@dataclass(kw_only=True)
class _Book:
    """What all subcommands have."""

    ledger: Path | None = None
    """File of the ledger; by default $XDG_DATA_HOME/f3rm_ext/ledger.sqlite, otherwise in ~/.local/share/f3rm_ext."""

    def book(self) -> "Ledger":
        from f3rm_ext.ledger.ledger import Ledger

        return Ledger(self.ledger)


@dataclass
class Run(_Book):
    """Train and evaluate a method several times, and record what that cost and reached.

    Options of the benchmark come first, then `--`, then the run as for ns-train. Each repeat trains and evaluates in
    processes of its own, with another seed. Evaluation, saving and the viewer are off while steps are timed.

    A whole run of 2000 steps:

        f3rm-ext bench run --name base -- f3rm-ext-lite --data CAPTURE --max-num-iterations 2000

    Steps 3000 to 4000 of a run of 30 000, with its schedule:

        f3rm-ext bench run --name late --steps 1000 -- f3rm-ext --data CAPTURE --max-num-iterations 30000
        --load-checkpoint RUN/nerfstudio_models/step-000002999.ckpt

    A change of options, measured in turn with what it is to be compared with:

        f3rm-ext bench run --name small --against base -- f3rm-ext-lite --data CAPTURE --max-num-iterations 2000
        --pipeline.model.num-samples 16
    """

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """Method and options, as for ns-train; after `--`."""
    name: str = ""
    """Name of the entry, which must be new or an idea's. By default the method's name with a number."""
    note: str = ""
    """What is measured and why, for the lab book."""
    repeats: Count = 3
    """Number of runs, at least 1. Speed is judged from 3 on."""
    steps: Annotated[int, Range(0)] = 0
    """Steps to train from where the run starts, at least 2 more than the warm-up. 0 trains to the end of the run."""
    warm_up: Annotated[int, Range(0)] = 20
    """Steps at the beginning that are not timed."""
    train_views: Count = 8
    """Number of training views to evaluate beside the held-out ones, spread evenly."""
    evaluate: bool = True
    """Evaluate after training. Without it, only speed, loss and the peak of training are recorded."""
    eval_step: Annotated[int, Range(0)] = 0
    """Step within the window after which to evaluate, counted from the beginning of the whole run; by default 0, its
    end. The checkpoint for it is saved while the clock stands still."""
    against: str = ""
    """Entry to run again, in turn with this one, so that changes of the machine cancel out. Its repeats become the
    entry NAME-baseline."""
    against_python: Path | None = None
    """Python of an environment that has the baseline's code. By default the one in use."""
    keep_runs: Path | None = None
    """Folder in which to keep run folders. By default they are deleted."""

    def main(self) -> int:
        """Measures. Returns the exit code."""
        from f3rm_ext.ledger.runs import Bench, Protocol, Side, baseline_side, require_python
        from f3rm_ext.utils.console import console

        if not self.command:
            raise ConfigError("There is no run to measure: give a method and its options after `--`, as for ns-train.")
        check_ranges(self)
        if self.against and not self.name:
            raise ConfigError("--against needs a --name, after which the baseline's entry is named.")
        if self.against_python is not None and not self.against:
            raise ConfigError("--against-python needs --against, which says what to run with it.")
        if self.eval_step and not self.evaluate:
            raise ConfigError("--eval-step and --no-evaluate contradict each other: leave one out.")
        book = self.book()
        sides = [Side(self.name, self.command, note=self.note)]
        if self.against:
            python = sides[0].python if self.against_python is None else require_python(self.against_python)
            sides.insert(0, baseline_side(book, self.against, self.name, python))
        protocol = Protocol(self.repeats, self.steps, self.warm_up, self.train_views, self.evaluate, self.eval_step)
        names = Bench(book, console(), self.keep_runs).run(sides, protocol)
        print(f"Recorded {' and '.join(names)} in {book.path}.")
        if self.against:
            print(f"Compare them: f3rm-ext bench compare {names[-1]}{_option(self.ledger)}")
        return 0


@dataclass
class Add(_Book):
    """Evaluate finished runs and record them as repeats of one entry.

    Speed and peak of training come from the run itself, as far as it has recorded them. What nothing tells, such as the
    machine it was trained on, stays missing and is said to be missing.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or their config.yml."""
    name: str = ""
    """Name of the entry, which must be new or an idea's. By default the method's name with a number."""
    note: str = ""
    """What it is, for the lab book."""
    train_views: Count = 8
    """Number of training views to evaluate beside the held-out ones, spread evenly."""
    trained_here: bool = False
    """The runs were trained on this machine: record it as their hardware."""

    def main(self) -> int:
        """Adds. Returns the exit code."""
        from f3rm_ext.ledger.finished import add_runs
        from f3rm_ext.ledger.runs import Bench
        from f3rm_ext.utils.console import console

        if not self.runs:
            raise ConfigError("There is nothing to add: give run folders, or the config.yml of runs.")
        check_ranges(self)
        book = self.book()
        name = add_runs(
            book,
            Bench(book, console()),
            self.runs,
            name=self.name,
            train_views=self.train_views,
            trained_here=self.trained_here,
            note=self.note,
        )
        print(f"Recorded {name} in {book.path}.")
        for phrase in book.entry(name).suspicions():
            print(f"  {phrase}")
        return 0


@dataclass
class Compare(_Book):
    """Judge an entry against a baseline; exit code 1 if it is worse.

    Speed is worse if the 95 % confidence interval of its change lies below zero; the noise band that follows from the
    repeats is printed. PSNR, SSIM, LPIPS and L1 of held-out views are worse if they change by more than the tolerance
    and the interval does not reach zero. Memory is shown and not judged. Entries that differ in capture, resolution,
    split, steps or hardware are refused.
    """

    entry: tyro.conf.Positional[str]
    """Entry to judge."""
    baseline: tyro.conf.Positional[str] = ""
    """Entry to compare it with. By default the one that was measured in turn with it."""
    tolerance: Annotated[float, Range(0, 100)] = 0.5
    """Change of quality that does not count, percent."""

    def main(self) -> int:
        """Prints the comparison. Returns 1 on a regression, otherwise 0."""
        from f3rm_ext.ledger.comparison import compare
        from f3rm_ext.ledger.runs import baseline_name
        from f3rm_ext.ledger.tables import comparison_table, how_text, verdict_sentence, what_text

        check_ranges(self)
        book = self.book()
        new = book.entry(self.entry)
        base = book.entry(self.baseline or baseline_name(self.entry))
        found = compare(base, new, self.tolerance / 100)
        texts = [
            f"{what_text(new.conditions)}; {how_text(new.conditions)}",
            comparison_table(found).text(),
            *found.remarks,
        ]
        print("\n\n".join([*texts, verdict_sentence(found)]))
        return 1 if found.regressions else 0


@dataclass
class Report(_Book):
    """Write what the ledger holds as Markdown or as one HTML page with plots."""

    entries: tyro.conf.Positional[tuple[str, ...]] = ()
    """Entries to report on; by default all."""
    baseline: str = ""
    """Entry with which those that were measured like it are compared."""
    tolerance: Annotated[float, Range(0, 100)] = 0.5
    """Change of quality that does not count, percent."""
    out: Path | None = None
    """File to write, .md or .html. By default Markdown is printed."""

    def main(self) -> int:
        """Writes the report. Returns the exit code."""
        from f3rm_ext.ledger.report import html_report, markdown_report
        from f3rm_ext.utils.output_file import replacing
        from f3rm_ext.utils.provenance import require_ours, signed_text

        check_ranges(self)
        book = self.book()
        chosen = [book.entry(name) for name in self.entries] or book.entries()
        baseline = book.entry(self.baseline) if self.baseline else None
        if self.out is None:
            print(markdown_report(chosen, baseline, self.tolerance / 100), end="")
            return 0
        writers = {".md": markdown_report, ".html": html_report}
        if self.out.suffix not in writers:
            raise ConfigError(f"--out is {self.out}, but a report is Markdown or HTML: give a name in .md or .html.")
        require_ours(self.out, MADE_BY)
        text = writers[self.out.suffix](chosen, baseline, self.tolerance / 100)
        with replacing(self.out) as stream:
            stream.write(signed_text(text, MADE_BY))
        print(f"Wrote {self.out}.")
        return 0


@dataclass
class List(_Book):
    """List the entries of the ledger."""

    def main(self) -> int:
        """Prints a table. Returns the exit code."""
        from f3rm_ext.html.tables import Table
        from f3rm_ext.ledger.entry import METRICS
        from f3rm_ext.ledger.tables import commit_of, figure_of

        shown = [metric for metric in METRICS if metric.key in ("it_per_s", "psnr", "train_peak_mib")]
        rows = [
            [
                f"{entry.name}{' ?' if entry.suspicions() else ''}",
                entry.method,
                entry.status,
                *(figure_of(metric, entry) for metric in shown),
                str(len(entry.repeats)),
                entry.date[:10],
                commit_of(entry),
            ]
            for entry in self.book().entries()
        ]
        header = ["name", "method", "status", *(metric.title for metric in shown), "repeats", "begun", "commit"]
        print(Table(header, rows, "lll").text())
        if any(row[0].endswith(" ?") for row in rows):
            print("\n? needs a second look: `f3rm-ext bench report NAME` says why.")
        return 0


@dataclass
class Note(_Book):
    """Write into the lab book: a note on an entry, or what became of it; or an idea that is still to be measured.

    Typical calls:
      f3rm-ext bench note small "12 % faster, but PSNR falls by 0.4 dB" --status "no gain"
      f3rm-ext bench note half-size "Train at half the size, if memory is short." --status idea
    """

    entry: tyro.conf.Positional[str]
    """Entry it is about."""
    text: tyro.conf.Positional[str] = ""
    """The note."""
    status: Literal["idea", "open", "success", "no gain", "failed", "on hold"] | None = None
    """What became of the idea. `idea` makes an entry without a run, which `bench run --name ENTRY` measures later."""

    def main(self) -> int:
        """Writes the note. Returns the exit code."""
        if not self.text and self.status is None:
            raise ConfigError("There is nothing to note: give a text, or --status.")
        self.book().note(self.entry, self.text, self.status)
        return 0


def _option(ledger: Path | None) -> str:
    return "" if ledger is None else f" --ledger {ledger}"


BenchCommand = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Add, tyro.conf.subcommand("add")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Note, tyro.conf.subcommand("note")]
)

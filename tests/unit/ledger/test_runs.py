"""Variants take turns, finished repeats are kept, and failures are told apart from mistakes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from f3rm_ext.errors import ConfigError, LedgerError
from f3rm_ext.ledger.ledger import Ledger
from f3rm_ext.ledger.runs import Bench, Protocol, Variant, baseline_variant, require_python
from f3rm_ext.ledger.worker import EvalJob, TrainJob
from f3rm_ext.workflow.commands import CommandError

PROTOCOL = Protocol(repeats=3, steps=50, warm_up=5, train_views=2)


class Workers(Bench):
    """Pretends to work; fails where it is told to."""

    def __init__(self, ledger: Ledger, keep_runs: Path | None = None) -> None:
        super().__init__(ledger, Console(quiet=True), keep_runs)
        self.said: list[str] = []
        self.folders: list[Path] = []
        self.fails_at, self.after_progress = "", True

    def _run_job(self, job: TrainJob | EvalJob, folder: Path, python: str, title: str) -> dict[str, Any]:
        self.said.append(title)
        self.folders.append(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if title == self.fails_at:
            sentence = "Memory ran out in step 3. (from `ns-train`, log in x)\n  | more"
            raise CommandError(sentence, made_progress=self.after_progress)
        if isinstance(job, EvalJob):
            return {"values": {"psnr": 20.0}, "conditions": {"width_px": 64}}
        about = {"origin": {"commit": "c"}, "method": job.arguments[0], "seed": 42 + job.seed_offset, "config": "c.yml"}
        return {"values": {"it_per_s": 5.0}, "conditions": {"last_step": job.steps}, **about}


@pytest.fixture
def bench(tmp_path: Path) -> Workers:
    return Workers(Ledger(tmp_path / "ledger.sqlite"))


def test_variants_take_turns_and_the_first_changes(bench: Workers) -> None:
    names = bench.run([Variant("a", ("nerfacto",)), Variant("b", ("f3rm-ext",))], PROTOCOL)
    assert names == ["a", "b"]
    trained = [said.removeprefix("Training ")[0] for said in bench.said if said.startswith("Training")]
    assert trained == ["a", "b", "b", "a", "a", "b"]
    for name, method in (("a", "nerfacto"), ("b", "f3rm-ext")):
        entry = bench.ledger.entry(name)
        assert entry.method == method and entry.conditions == {"width_px": 64, "last_step": 50, "eval_step": 50}
        assert [repeat.seed for repeat in entry.repeats] == [42, 43, 44]
        assert {repeat.session for repeat in entry.repeats} == {bench.session}
        assert entry.repeats[0].values == {"it_per_s": 5.0, "psnr": 20.0}
    assert not any(folder.exists() for folder in bench.folders), "run folders are deleted"


def test_run_folders_can_be_kept_and_evaluation_left_out(bench: Workers, tmp_path: Path) -> None:
    keeping = Workers(bench.ledger, tmp_path / "runs")
    (name,) = keeping.run([Variant("", ("nerfacto",))], Protocol(1, 50, 5, 2, evaluate=False))
    assert name == "nerfacto-1" and keeping.said == ["Training nerfacto, repeat 1 of 1"]
    assert all(folder.is_dir() for folder in keeping.folders)


def test_folders_of_runs_that_cannot_be_made_are_named(bench: Workers, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"--keep-runs.*{tmp_path / 'file'}"):
        Workers(bench.ledger, tmp_path / "file").run([Variant("", ("nerfacto",))], PROTOCOL)


def test_a_training_that_cannot_be_evaluated_is_kept(bench: Workers) -> None:
    """For a capture without held-out photos, for instance."""
    bench.fails_at = "Evaluating a, repeat 1 of 3"
    with pytest.raises(CommandError, match=r"^Memory ran out .* the training as a; --no-evaluate.*\n  \| more"):
        bench.run([Variant("a", ("nerfacto",))], PROTOCOL)
    entry = bench.ledger.entry("a")
    assert entry.values("it_per_s") == [5.0] and entry.status == "open"
    assert [text for _, text in entry.notes] == ["Memory ran out in step 3. (from `ns-train`, log in x)"]


def test_a_failure_in_training_is_recorded_and_what_was_finished_is_kept(bench: Workers) -> None:
    bench.fails_at = "Training a, repeat 2 of 3"
    with pytest.raises(CommandError):
        bench.run([Variant("a", ("nerfacto",))], PROTOCOL)
    entry = bench.ledger.entry("a")
    assert entry.status == "failed" and len(entry.repeats) == 1
    assert [text for _, text in entry.notes] == ["Memory ran out in step 3. (from `ns-train`, log in x)"]
    bench.fails_at = "Training b, repeat 1 of 3"
    with pytest.raises(CommandError):
        bench.run([Variant("b", ("nerfacto",))], PROTOCOL)
    assert bench.ledger.entry("b").status == "failed" and not bench.ledger.entry("b").repeats


def test_a_mistake_in_the_command_is_not_recorded(bench: Workers) -> None:
    bench.fails_at, bench.after_progress = "Training a, repeat 1 of 3", False
    with pytest.raises(CommandError):
        bench.run([Variant("a", ("nerfacto",))], PROTOCOL)
    assert bench.ledger.entries() == []


def test_a_name_that_is_taken_is_found_out_before_anything_runs(bench: Workers) -> None:
    bench.ledger.add("b", "nerfacto")
    with pytest.raises(LedgerError, match="entry b "):
        bench.run([Variant("a", ("nerfacto",)), Variant("b", ("nerfacto",))], PROTOCOL)
    assert bench.said == []


def test_a_baseline_is_run_again_with_its_own_command(bench: Workers, tmp_path: Path) -> None:
    bench.ledger.add("base", "nerfacto", command=("nerfacto", "--data", "fox"))
    bench.ledger.add("added", "nerfacto")
    side = baseline_variant(bench.ledger, "base", "new", "python")
    assert (side.name, tuple(side.arguments)) == ("new-baseline", ("nerfacto", "--data", "fox"))
    with pytest.raises(LedgerError, match="added"):
        baseline_variant(bench.ledger, "added", "new", "python")
    with pytest.raises(ConfigError, match="--against-python"):
        require_python(tmp_path / "none")


def test_a_worker_reads_its_job_and_leaves_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_command_line: Callable[..., None]
) -> None:
    from f3rm_ext.ledger import worker

    job = EvalJob("config.yml", str(tmp_path), 4)
    worker.write_job(job, tmp_path / "job.json")
    monkeypatch.setattr(worker, "evaluate", lambda given: {"values": {"psnr": 1.0}, "is": given == job})
    set_command_line("worker", tmp_path / "job.json")
    monkeypatch.setattr("sys.excepthook", sys.excepthook)  # puts it back afterwards
    worker.main()
    assert json.loads((tmp_path / worker.RESULT).read_text()) == {"values": {"psnr": 1.0}, "is": True}

"""``f3rm-ext bench`` as a user types it: measured runs, their comparison, the lab ledger."""

import re
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from f3rm_ext.ledger.ledger import Ledger

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def bench(run_command: Callable[..., Any]) -> Callable[..., Any]:
    """Types ``f3rm-ext bench ...``."""
    return partial(run_command, "f3rm-ext", "bench")


@pytest.fixture(scope="module")
def measured(bench: Callable[..., Any], tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ledger of an entry that was measured in turn with its baseline, and the runs."""
    folder = tmp_path_factory.mktemp("bench")
    command = ("f3rm-ext-lite", "--data", str(tiny_capture), "--max-num-iterations", "40",
               "--pipeline.datamanager.train-num-rays-per-batch", "128",
               "--pipeline.datamanager.features.extractors")  # fmt: skip
    Ledger(folder / "ledger.sqlite").add("base", "f3rm-ext-lite", command=command, note="where it all began")
    done = bench("run", "--ledger", folder / "ledger.sqlite", "--name", "few", "--against", "base", "--repeats", 1,
                 "--steps", 12, "--warm-up", 2, "--train-views", 2, "--keep-runs", folder / "runs", "--note", "fewer",
                 "--", *command, "--pipeline.model.num-samples", 4, timeout_s=480)  # fmt: skip
    done.succeeds()
    assert "Recorded few-baseline and few in" in done.stdout
    return folder


@pytest.mark.timeout(500)
def test_a_run_is_measured_beside_its_baseline(measured: Path) -> None:
    ledger = Ledger(measured / "ledger.sqlite")
    base, few = ledger.entry("few-baseline"), ledger.entry("few")
    for entry in (base, few):
        (repeat,) = entry.repeats
        wanted = {"it_per_s", "rays_per_s", "loss", "psnr", "ssim", "l1", "train_psnr", "train_ssim", "train_l1",
                  "train_peak_mib", "eval_peak_mib", "parameters_mib", "persistent_mib"}  # fmt: skip
        assert wanted <= repeat.values.keys()
        assert repeat.values["rays_per_s"] == pytest.approx(128 * repeat.values["it_per_s"])
        assert repeat.values["persistent_mib"] > 2 * repeat.values["parameters_mib"] > 0
        assert entry.origin["schedule_steps"] == 40 and repeat.seed == 42
        assert not [phrase for phrase in entry.anomalies() if "below" in phrase]
    assert base.conditions == few.conditions
    assert few.conditions.items() >= {
        "width_px": 64, "height_px": 48, "train_images": 9, "eval_images": 3, "first_step": 0, "last_step": 12,
        "warm_up_steps": 2, "device": "cpu", "train_views": 2}.items()  # fmt: skip
    assert base.origin["config"] != few.origin["config"]
    assert base.repeats[0].session == few.repeats[0].session
    assert [text for _, text in few.notes] == ["fewer"]


def test_compare_judges_quality_and_leaves_speed_for_more_repeats(bench: Callable[..., Any], measured: Path) -> None:
    done = bench("compare", "few", "--ledger", measured / "ledger.sqlite", "--tolerance", 90).succeeds()
    assert "not judged (fewer than 3 repeats)" in done.stdout and "No regression of few" in done.stdout
    ledger = Ledger(measured / "ledger.sqlite")
    entry = ledger.entry("few")
    ledger.add("darker", entry.method, conditions=entry.conditions)
    values = {**entry.repeats[0].values, "psnr": 0.5 * entry.repeats[0].values["psnr"]}
    ledger.add_repeat("darker", values, session="another", seed=42)
    worse = bench("compare", "darker", "few", "--ledger", measured / "ledger.sqlite")
    assert worse.code == 1 and "Regression of darker against few: PSNR." in worse.stdout
    other = {**entry.conditions, "width_px": 32}
    ledger.add("small", entry.method, conditions=other)
    refused = bench("compare", "small", "few", "--ledger", measured / "ledger.sqlite")
    assert refused.code == 2 and "differ in width, px (64 and 32)" in refused.stderr


@pytest.mark.timeout(500)
def test_a_finished_run_is_added(bench: Callable[..., Any], measured: Path) -> None:
    (run,) = [path.parent for path in (measured / "runs").rglob("config.yml") if "/0-0/" in str(path)]
    done = bench("add", run, "--name", "added", "--train-views", 2, "--ledger", measured / "ledger.sqlite").succeeds()
    ledger = Ledger(measured / "ledger.sqlite")
    added, base = ledger.entry("added"), ledger.entry("few-baseline")
    for key in ("psnr", "ssim", "l1", "train_psnr"):
        assert added.values(key) == pytest.approx(base.values(key), rel=1e-3)
    assert added.values("it_per_s") and added.values("train_peak_mib") and added.values("loss")
    assert {"first_step": 0, "last_step": 12}.items() <= added.conditions.items()
    assert "hardware" not in added.conditions and "not known: warm-up steps, hardware, threads" in done.stdout
    judged = bench("compare", "few-baseline", "added", "--ledger", measured / "ledger.sqlite")
    assert "first step" not in judged.text and "PSNR" in judged.stdout, judged.text


@pytest.mark.release
@pytest.mark.timeout(500)
def test_a_run_is_evaluated_within_its_window(bench: Callable[..., Any], measured: Path, tmp_path: Path) -> None:
    """Its last checkpoint, which is added as another entry, is another model: the two are not compared."""
    ledger = tmp_path / "ledger.sqlite"
    command = Ledger(measured / "ledger.sqlite").entry("few").command
    done = bench("run", "--ledger", ledger, "--name", "within", "--repeats", 1, "--steps", 12, "--eval-step", 8,
                 "--warm-up", 2, "--train-views", 2, "--keep-runs", tmp_path / "runs", "--", *command,
                 timeout_s=480)  # fmt: skip
    done.succeeds()
    (config,) = tmp_path.glob("runs/**/config.yml")
    steps = sorted(path.name for path in (config.parent / "nerfstudio_models").iterdir())
    assert steps == ["step-000000007.ckpt", "step-000000011.ckpt"]
    bench("add", config, "--name", "end", "--train-views", 2, "--ledger", ledger).succeeds()
    within, end = (Ledger(ledger).entry(name) for name in ("within", "end"))
    assert [entry.conditions["eval_step"] for entry in (within, end)] == [8, 12]
    assert within.conditions["last_step"] == 12 and within.values("it_per_s")
    assert within.values("psnr") != end.values("psnr")
    judged = bench("compare", "within", "end", "--ledger", ledger)
    judged.refuses(r"evaluated step \(12 and 8\)")


def test_list_report_and_notes(bench: Callable[..., Any], measured: Path) -> None:
    ledger = ("--ledger", measured / "ledger.sqlite")
    bench("note", "few", "no gain on the CPU", "--status", "no gain", *ledger).succeeds()
    bench("note", "fewer", "a quarter of the samples", "--status", "idea", *ledger).succeeds()
    listed = bench("list", *ledger)
    assert listed.code == 0 and all(
        word in listed.stdout for word in ("few-baseline", "f3rm-ext-lite", "no gain", "idea")
    )
    page, text = measured / "report.html", measured / "report.md"
    for out in (page, text):
        bench("report", "few", "few-baseline", "--baseline", "few-baseline", "--out", out, *ledger).succeeds()
    assert "<svg" in page.read_text() and "few against few-baseline" in page.read_text()
    assert "no gain on the CPU" in text.read_text() and "| PSNR, dB |" in text.read_text()
    text.write_text("my own notes")
    assert bench("report", "--out", text, *ledger).code == 2 and text.read_text() == "my own notes"


def test_mistakes_are_told_in_a_sentence_and_record_nothing(
    bench: Callable[..., Any], tmp_path: Path, tiny_capture: Path
) -> None:
    ledger = tmp_path / "ledger.sqlite"
    mistakes = [
        (("list", "--ledger", ledger), str(ledger)),
        (("run", "--ledger", ledger), "`--`"),
        (("run", "--ledger", ledger, "--repeats", 0, "--", "nerfacto"), "--repeats is 0"),
        (("run", "--ledger", ledger, "--against", "x", "--", "nerfacto"), "--name"),
        (("run", "--ledger", ledger, "--name", "y", "--against", "x", "--", "nerfacto"), str(ledger)),
        (("add", tmp_path, "--ledger", ledger), str(tmp_path / "config.yml")),
        (("note", "x", "--ledger", ledger), "--status"),
    ]
    for arguments, words in mistakes:
        done = bench(*arguments)
        done.refuses(re.escape(words))
    done = bench("run", "--ledger", ledger, "--warm-up", 50, "--", "f3rm-ext-lite", "--data", tiny_capture,
                 "--max-num-iterations", 40)  # fmt: skip
    done.refuses("--warm-up")
    assert Ledger(ledger).entries() == [], "a mistake in the command is no failed attempt"
    with sqlite3.connect(ledger) as connection:
        connection.execute("PRAGMA user_version = 99")
    done = bench("list", "--ledger", ledger)
    done.refuses("schema 99")
    assert done.stdout == ""

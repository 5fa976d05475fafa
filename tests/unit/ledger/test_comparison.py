"""What counts as a regression, and what is refused."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from f3rm_ext.errors import LedgerError
from f3rm_ext.ledger.comparison import Comparison, compare
from f3rm_ext.ledger.entry import Entry, Repeat
from f3rm_ext.ledger.report import comparison_table, html_report, markdown_report, verdict_sentence

ALIKE = {
    "capture": "room",
    "split": "ab12",
    "train_images": 9,
    "eval_images": 3,
    "width_px": 64,
    "height_px": 48,
    "first_step": 0,
    "last_step": 300,
    "eval_step": 300,
    "warm_up_steps": 20,
    "train_views": 4,
    "device": "cpu",
    "hardware": "a processor, 2 cores",
    "threads": 2,
}
QUALITY = {"psnr": 20.0, "ssim": 0.8, "lpips": 0.2, "l1": 0.05}


def entry(
    name: str,
    speeds: Sequence[float] = (10.0, 10.2, 9.9),
    quality: Mapping[str, float] = QUALITY,
    *,
    session: str = "",
    conditions: Mapping[str, Any] = ALIKE,
    more: Mapping[str, float] | None = None,
) -> Entry:
    repeats = [
        Repeat(number, session or name, 42 + number, {"it_per_s": speed, **quality, **(more or {})})
        for number, speed in enumerate(speeds)
    ]
    return Entry(name, "2026-11-22T12:00:00+00:00", "nerfacto", conditions=conditions, repeats=repeats)


def verdicts(found: Comparison) -> dict[str, str]:
    return {row.metric.key: row.verdict for row in found.rows}


def names(found: Comparison) -> list[str]:
    return [row.metric.key for row in found.regressions]


def test_a_slowed_variant_is_caught_and_nothing_else() -> None:
    found = compare(entry("base"), entry("slow", (8.0, 8.1, 8.2)))
    assert names(found) == ["it_per_s"]
    assert verdict_sentence(found).startswith("Regression of slow against base: it/s. Changes of speed within ±")
    assert any("not run in turn" in remark for remark in found.remarks)


@pytest.mark.parametrize("figure", ["psnr", "ssim", "lpips", "l1"])
@pytest.mark.parametrize(("factor", "caught"), [(0.004, False), (0.006, True), (-0.2, False)])
def test_quality_has_a_tolerance_and_a_direction(figure: str, factor: float, caught: bool) -> None:
    sign = 1 if figure in ("lpips", "l1") else -1
    blurred = entry("blurred", quality={**QUALITY, figure: QUALITY[figure] * (1 + sign * factor)})
    found = compare(entry("base"), blurred)
    assert names(found) == ([figure] if caught else [])
    assert verdicts(found)[figure] == ("worse" if caught else "better" if factor < 0 else "within tolerance")
    assert not compare(entry("base"), blurred, tolerance=0.01).regressions


@pytest.mark.parametrize("figure", ["psnr", "ssim", "lpips", "l1"])
@pytest.mark.parametrize("factors", [(0.85, 0.95, 1.1), (1.15, 1.05, 0.9)])
def test_scattered_quality_is_undecided_and_no_regression(figure: str, factors: Sequence[float]) -> None:
    base, new = entry("base"), entry("new")
    scattered = [
        replace(repeat, values={**repeat.values, figure: QUALITY[figure] * factor})
        for repeat, factor in zip(new.repeats, factors, strict=True)
    ]
    found = compare(base, replace(new, repeats=scattered))
    assert verdicts(found)[figure] == "undecided" and not found.regressions


def test_quality_is_paired_by_seed() -> None:
    def seeded(name: str, factor: float) -> Entry:
        made = entry(name)
        values = [{**repeat.values, "psnr": 20.0 * (1 + 0.1 * n) * factor} for n, repeat in enumerate(made.repeats)]
        return replace(made, repeats=[replace(r, values=v) for r, v in zip(made.repeats, values, strict=True)])

    assert names(compare(seeded("base", 1.0), seeded("new", 0.99))) == ["psnr"], "as clear as without scatter"


def test_repeats_run_in_turn_are_paired() -> None:
    drift = (1.0, 0.5, 0.8)
    base = entry("base", [10 * slow for slow in drift], session="s")
    slower = entry(
        "new", [9.5 * slow * nudge for slow, nudge in zip(drift, (1.0, 1.004, 0.997), strict=True)], session="s"
    )
    found = compare(base, slower)
    assert names(found) == ["it_per_s"] and not any("not run in turn" in remark for remark in found.remarks)
    seeded_otherwise = [replace(repeat, seed=repeat.number) for repeat in slower.repeats]
    assert names(compare(base, replace(slower, repeats=seeded_otherwise))) == ["it_per_s"]
    alone = replace(slower, repeats=[replace(repeat, session="later") for repeat in slower.repeats])
    assert not compare(base, alone).regressions


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("width_px", 32, "width, px (64 and 32)"),
        ("split", "cd34", "split"),
        ("last_step", 400, "last step"),
        ("hardware", "another processor, 8 cores", "hardware"),
        ("first_step", 100, "first step"),
        ("capture", "fox", "capture"),
    ],
)
def test_unlike_entries_are_refused(key: str, value: object, said: str) -> None:
    with pytest.raises(LedgerError, match=r"new .*base") as refused:
        compare(entry("base"), entry("new", conditions={**ALIKE, key: value}))
    assert said in str(refused.value)


def test_what_is_not_known_is_said_and_speed_is_not_judged_without_hardware() -> None:
    unknown = {key: value for key, value in ALIKE.items() if key not in ("hardware", "split")}
    found = compare(entry("base"), entry("added", (1.0, 1.0, 1.0), conditions=unknown))
    assert verdicts(found)["it_per_s"] == "not judged" and not found.regressions
    assert "Not known of both: split, hardware." in found.remarks


def test_finished_runs_of_one_machine_are_compared_and_reported_beside_benchmarks() -> None:
    told = {key: value for key, value in ALIKE.items() if key not in ("warm_up_steps", "threads")}
    before, after = entry("before", conditions=told), entry("after", (8.0, 8.1, 8.2), conditions=told)
    assert names(compare(before, after)) == ["it_per_s"]
    assert verdicts(compare(entry("base"), after))["it_per_s"] == "not judged", "a benchmark leaves out first steps"
    text = markdown_report([entry("base"), before, entry("wide", conditions={**ALIKE, "width_px": 99})], entry("base"))
    assert text.count("\n## ") == 2 and "| base | before |" in text


def test_few_repeats_do_not_judge_speed_and_one_judges_quality() -> None:
    assert not compare(entry("base"), entry("new", (5.0, 5.0))).regressions
    blurred = entry("new", (5.0,), {**QUALITY, "psnr": 19.0, "lpips": 0.19})
    found = compare(entry("base", (10.0,)), blurred)
    assert names(found) == ["psnr"] and verdicts(found)["lpips"] == "better"


def test_a_run_that_diverged_is_worse() -> None:
    found = compare(entry("base"), entry("new", quality={**QUALITY, "psnr": math.nan}))
    assert names(found) == ["psnr"] and any("psnr is nan" in remark for remark in found.remarks)


def test_a_missing_figure_stays_missing() -> None:
    found = compare(entry("base"), entry("new", quality={"psnr": 20.0}))
    row = next(row for row in found.rows if row.metric.key == "lpips")
    assert row.new is None and row.change is None and (row.verdict, row.reason) == ("not judged", "not measured of new")
    assert any(remark.startswith("new needs a second look: missing:") for remark in found.remarks)
    with pytest.raises(LedgerError, match="3 repeats"):
        compare(entry("base"), entry("new", ()))


def test_memory_is_shown_and_not_judged() -> None:
    found = compare(entry("base", more={"train_peak_mib": 1000.0}), entry("new", more={"train_peak_mib": 2000.0}))
    assert verdicts(found)["train_peak_mib"] == "worse" and not found.regressions
    assert "larger" in comparison_table(found).markdown()


def test_suspect_records_are_marked() -> None:
    doubtful = entry("doubtful", more={"train_peak_mib": 1870.0, "persistent_mib": 2100.0, "mean_opacity": 1.2})
    assert {
        "peak in training is below its persistent tensors (1870 < 2100 MiB)",
        "mean_opacity is 1.2",
    } <= set(doubtful.anomalies())
    card = entry("full", more={"train_peak_mib": 15000.0, "device_mib": 16000.0})
    assert any("90 % of the card" in phrase for phrase in card.anomalies())
    assert "code differs from its commit" in replace(card, origin={"changed": True}).anomalies()


def test_reports_keep_unlike_entries_apart_and_escape_what_people_wrote() -> None:
    base = replace(entry("base", session="s"), notes=[("2026-11-22T12:00:00", "the <start> | of it")])
    base = replace(base, command=("nerfacto", "--data", "my room"))
    slow = entry("slow <b>", (8.0, 8.1, 8.2), session="s")
    other = entry("other", conditions={**ALIKE, "width_px": 128})
    broken = Entry("broken", base.date, "nerfacto", status="failed")
    entries = [base, slow, other, broken]
    text = markdown_report(entries, base)
    assert text.count("\n## ") == 3 and "### slow <b> against base" in text
    assert "Regression of slow <b> against base: it/s." in text and "other against base" not in text
    assert "2026-11-22: the <start> | of it" in text and "`ns-train nerfacto --data 'my room'`" in text
    assert "needs a second look: no repeat has finished" in text
    page = html_report(entries, base)
    assert page.count("<h2>") == 3 and "slow &lt;b&gt;" in page and "slow <b>" not in page
    assert "ns-train nerfacto --data &#39;my room&#39;" in page
    assert page.count("<svg") == 4, "it/s, PSNR, SSIM and LPIPS, for the two that can be drawn together"

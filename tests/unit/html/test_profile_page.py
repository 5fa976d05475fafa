"""The report of a tensor profile: conclusions, tables, page and picture."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from f3rm_ext.html.profile_charts import COLORS, write_picture
from f3rm_ext.html.profile_page import build_page, print_profile
from f3rm_ext.profiling.census import CATEGORIES
from f3rm_ext.profiling.conclusions import comparison_sentence, conclude
from f3rm_ext.profiling.profile_file import Profile
from f3rm_ext.profiling.snapshot import Snapshot

MIB = 1 << 20
OPTIONS = [
    {"option": "pipeline.model.optimize-memory", "now": "False", "lower": "True", "quality_impact": "lowers precision"},
    {
        "option": "pipeline.model.surface.samples",
        "now": "200000",
        "lower": "100000",
        "quality_impact": "makes gradients noisier",
    },
]


def snapshot(step: int, **options: Any) -> Snapshot:
    """100 MiB of parameters, 200 of moments; sizes in MiB."""
    categories = dict.fromkeys(CATEGORIES, 0) | {"parameters": 100 * MIB, "optimizer": 200 * MIB}
    categories |= {name: options.pop(name) * MIB for name in CATEGORIES if name in options}
    values: dict[str, Any] = {
        "categories": categories,
        "host": {},
        "named": {"harmonics": {"parameters": 100 * MIB, "optimizer": 200 * MIB}},
        "dtypes": {"float32": 300 * MIB},
        "largest": [
            {"name": "<b>gauss", "category": "parameters", "dtype": "float32", "shape": [5, 3], "bytes": 100 * MIB}
        ],
        "groups": {},
        "tensors": 3,
        "large": 2,
        "activations": 50 * MIB,
        "resident": 900 * MIB,
        "seconds": float(step + 1),
        "memory_options": OPTIONS,
        "cost_ms": 10.0,
    }
    return Snapshot(step=step, **(values | options))


def profile(*snapshots: Snapshot, total_mib: int = 10_000, device: str = "cpu", **options: Any) -> Profile:
    start = {"method": "sugar-ext", "device": device, "device_total": total_mib * MIB, "device_name": "a card"}
    return Profile(Path("run") / "tensor_profile.jsonl", start, list(snapshots), **options)


ON_GPU = {"allocated": 400 * MIB, "reserved": 1000 * MIB, "gaps": 100 * MIB, "device_used": 1500 * MIB}
PEAKS = {"phases": {"train": {"tensors": 800 * MIB, "device": 1600 * MIB}, "viewer": {"tensors": 500 * MIB}}}


def printed(made: Profile, other: Profile | None) -> str:
    stream = io.StringIO()
    print_profile(made, other, Console(file=stream, width=160))
    return stream.getvalue()


def test_it_says_what_the_run_needed_and_what_that_is() -> None:
    found = conclude(profile(snapshot(0), snapshot(5, **ON_GPU, **PEAKS), device="cuda", total_mib=1600))
    assert found.sentences == (
        "At its peak, tensors took 800.0 MiB, in training steps: 50 % of the 1.6 GiB of a card.",
        "Between steps, tensors take 300.0 MiB: optimizer 67 %, parameters 33 %. The largest parameters are harmonics: "
        "300.0 MiB with gradient and moments. Within a step, autograd keeps 50.0 MiB of activations on top.",
        "Torch has reserved 1000.0 MiB. 500.0 MiB of it is cache, which is used again and so no loss; 100.0 MiB (10 %) "
        "are gaps, the real fragmentation.",
    )


@pytest.mark.parametrize(
    ("total_mib", "end", "verdict"),
    [
        (10_000, "finished", "There is plenty of room"),
        (1200, "finished", "It fits."),
        (820, "finished", "The run nearly fills the device"),
        (10_000, "memory ran out", "Memory ran out"),
    ],
)
def test_the_verdict_follows_from_the_room_that_is_left(total_mib: int, end: str, verdict: str) -> None:
    made = profile(snapshot(0, **ON_GPU, **PEAKS), device="cuda", total_mib=total_mib, end=end)
    assert conclude(made).verdict.startswith(verdict)


def test_a_leak_comes_before_smaller_options() -> None:
    leaking = profile(*(snapshot(10 * index, other=10 * index) for index in range(7)))
    found = conclude(leaking)
    assert [finding.kind for finding in found.warnings] == ["leak"] and "Find the leak first" in found.verdict


def test_options_keep_their_order_and_say_what_they_lower() -> None:
    first, second = conclude(profile(snapshot(0))).advice
    assert first.command == "--pipeline.model.optimize-memory True" and first.loss == "lowers precision"
    assert first.lowers == "parameters, optimizer: 300.0 MiB now"
    assert second.lowers == "activations: 50.0 MiB now"


def test_a_comparison_names_the_largest_difference() -> None:
    ours = profile(snapshot(0, optimizer=50, **PEAKS))
    theirs = profile(snapshot(0, phases={"train": {"tensors": 1000 * MIB}}))
    assert comparison_sentence(ours, theirs) == (
        "The peak is 800.0 MiB instead of 1000.0 MiB (-20 %). The largest difference is in optimizer: 150.0 MiB less."
    )
    assert "do not compare" in comparison_sentence(ours, profile(snapshot(0), device="cuda"))
    text = printed(ours, theirs)
    assert "Compared" in text and "-75.0 %" in text


def test_the_terminal_shows_tables_warnings_and_options() -> None:
    made = profile(snapshot(0), snapshot(5, **ON_GPU, **PEAKS, suspect=["this is odd"]), device="cuda", damaged=1)
    text = printed(made, None)
    for part in (
        "harmonics",
        "whole GPU",
        "1.6 GiB",
        "… cache in it, used again",
        "4.0 %",
        "Some figures cannot be right: this is odd",
    ):
        assert part in text, part
    assert "  1. --pipeline.model.optimize-memory True  (now False;" in text
    assert "no end recorded" in text and "1 damaged line" in text
    assert "2 records took 10 ms each, 0.33 % of the run" in text


def test_the_page_is_one_file_and_escapes_names() -> None:
    page = build_page(profile(*(snapshot(step, **ON_GPU, **PEAKS) for step in (0, 5, 10)), device="cuda"))
    assert "&lt;b&gt;gauss" in page and "<b>gauss" not in page
    assert "http" not in page and "src=" not in page
    assert page.count("<svg") == 3, "tensors, peaks, fragmentation"
    assert "What to change" in page and "--pipeline.model.optimize-memory True" in page


@pytest.mark.parametrize("steps", [(0,), (0, 5, 10)])
def test_the_picture_is_drawn(steps: tuple[int, ...]) -> None:
    stream = io.BytesIO()
    made = profile(*(snapshot(step, **ON_GPU, **PEAKS) for step in steps), device="cuda")
    write_picture(made, made, stream)
    image = Image.open(stream)
    assert image.format == "PNG" and image.width > 800 and len(image.convert("RGB").getcolors(1 << 24) or ()) > 20


def test_every_category_has_a_color() -> None:
    assert set(COLORS) == {*CATEGORIES, "activations"}

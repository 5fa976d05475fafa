"""Entries of the ledger, their repeats, the figures of a repeat, and the settings of a measurement."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from f3rm_ext.utils.ranges import Count, Range, check_ranges

Status = Literal["idea", "open", "success", "no gain", "failed", "on hold"]
"""Outcome of an entry: `idea` until it is measured, `open` until somebody decides."""
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Protocol:
    """Number of runs, the steps that are timed, and the views that are evaluated."""

    repeats: Count = 3
    """Number of runs, at least 1. Speed is judged from 3 on."""
    steps: Annotated[int, Range(0)] = 0
    """Number of steps to train, at least 2 more than the warm-up. 0 trains to the end of the run."""
    warm_up: Annotated[int, Range(0)] = 20
    """Number of steps at the beginning that are not timed."""
    train_views: Count = 8
    """Number of training views to evaluate beside the held-out ones, spread evenly."""
    evaluate: bool = True
    """Evaluate after training. Without it, only speed, loss and the peak of training are recorded."""
    eval_step: Annotated[int, Range(0)] = 0
    """Step of the whole run after which to evaluate, within the window; 0 evaluates at its end. The checkpoint is saved
    while the clock stands still."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Metric:
    """A figure of a repeat."""

    key: str
    """Name in the ledger."""
    title: str
    """Name in tables, with the unit."""
    form: str
    """Format specification of a value."""
    better: Literal["higher", "lower", "neither"] = "neither"
    """Which values are better; neither for figures that say nothing about quality."""
    judged: Literal["speed", "quality", "no"] = "no"
    """Rule by which `compare` judges a change."""
    words: tuple[str, str] = ("better", "worse")
    """Words for a change for the better and for the worse."""


METRICS = (
    Metric("it_per_s", "it/s", ".4g", "higher", "speed", ("faster", "slower")),
    Metric("rays_per_s", "rays/s", ",.0f", "higher", words=("faster", "slower")),
    Metric("loss", "loss", ".5g"),
    Metric("psnr", "PSNR, dB", ".3f", "higher", "quality"),
    Metric("ssim", "SSIM", ".4f", "higher", "quality"),
    Metric("lpips", "LPIPS", ".4f", "lower", "quality"),
    Metric("l1", "L1", ".5f", "lower", "quality"),
    Metric("train_psnr", "PSNR on training views, dB", ".3f", "higher"),
    Metric("train_ssim", "SSIM on training views", ".4f", "higher"),
    Metric("train_lpips", "LPIPS on training views", ".4f", "lower"),
    Metric("train_l1", "L1 on training views", ".5f", "lower"),
    Metric("train_peak_mib", "peak in training, MiB", ",.0f", "lower", words=("smaller", "larger")),
    Metric("eval_peak_mib", "peak in evaluation, MiB", ",.0f", "lower", words=("smaller", "larger")),
    Metric("device_peak_mib", "peak of the whole GPU, MiB", ",.0f", "lower", words=("smaller", "larger")),
    Metric("spilled_mib", "moved to main memory, MiB", ",.0f", "lower", words=("less", "more")),
    Metric("gaussian_count", "Gaussians", ",.0f"),
    Metric("mean_opacity", "mean opacity", ".3f"),
)
"""The figures that tables show, in their order. A repeat may have more."""

CONDITIONS: Mapping[str, str] = {
    "capture": "capture",
    "split": "split",
    "train_images": "training images",
    "eval_images": "held-out images",
    "width_px": "width, px",
    "height_px": "height, px",
    "first_step": "first step",
    "last_step": "last step",
    "eval_step": "evaluated step",
    "warm_up_steps": "warm-up steps",
    "train_views": "training views evaluated",
    "device": "device",
    "hardware": "hardware",
    "threads": "threads",
}
"""Conditions that two entries must share to be compared, with their names for people."""
SPEED_CONDITIONS = ("warm_up_steps", "device", "hardware", "threads")
"""Conditions that matter only for speed."""


@dataclass(frozen=True)
class Repeat:
    """One run of a benchmark."""

    number: int
    """Index within the entry."""
    session: str
    """Identifier of the call of `bench run`, which repeats that took turns share."""
    seed: int | None
    values: Mapping[str, float]
    """Figures by name, without those that were not measured."""


@dataclass(frozen=True)
class Entry:
    """A benchmark and the repeats of it."""

    name: str
    """Unique in a ledger."""
    date: str
    """Start of the measurement, UTC, ISO 8601. It is only shown."""
    method: str
    """Method that was trained; empty for an idea that was not run yet."""
    status: Status = "open"
    command: Sequence[str] = ()
    """Arguments of ns-train; empty if they are not known."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Conditions that all repeats share, see :data:`CONDITIONS`; unknown ones are absent."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Commit, versions and configuration of what was measured."""
    repeats: Sequence[Repeat] = ()
    notes: Sequence[tuple[str, str]] = ()
    """Date and text of each note."""

    @property
    def is_idea(self) -> bool:
        """Whether nothing has been run yet."""
        return not self.method

    @property
    def is_whole(self) -> bool:
        """Whether the repeats are of all steps of their run, as far as is known."""
        last = self.conditions.get("last_step")
        return not self.conditions.get("first_step") and last in (None, self.origin.get("schedule_steps", last))

    def values(self, key: str) -> list[float]:
        """Returns a figure of all repeats that have it."""
        return [repeat.values[key] for repeat in self.repeats if key in repeat.values]

    def anomalies(self) -> list[str]:
        """Returns what is missing or cannot be right about the entry, one phrase each."""
        if self.is_idea:
            return []
        if not self.repeats:
            return ["no repeat has finished"]
        phrases = [phrase for repeat in self.repeats for phrase in anomalies(repeat.values)]
        absent = ["gaussian_count", "mean_opacity"]
        absent += ["device_peak_mib", "spilled_mib"] if self.conditions.get("device") == "cpu" else []
        expected = [metric for metric in METRICS if metric.key not in absent]
        missing = [metric.title.partition(",")[0] for metric in expected if not self.values(metric.key)]
        if missing:
            phrases.append("missing: " + ", ".join(missing))
        unknown = [name for key, name in CONDITIONS.items() if key not in self.conditions]
        if unknown:
            phrases.append("not known: " + ", ".join(unknown))
        if self.origin.get("changed"):
            phrases.append("code differs from its commit")
        return list(dict.fromkeys(phrases))


def anomalies(values: Mapping[str, float]) -> list[str]:
    """Returns what cannot be right about the figures of a repeat, one phrase each.

    >>> anomalies({"train_peak_mib": 1870.0, "persistent_mib": 2100.0})
    ['peak in training is below its persistent tensors (1870 < 2100 MiB)']
    """
    phrases = [f"{key} is {value}" for key, value in values.items() if not math.isfinite(value)]
    for peak, floor, text in (
        ("train_peak_mib", "persistent_mib", "peak in training is below its persistent tensors"),
        ("eval_peak_mib", "parameters_mib", "peak in evaluation is below the parameters"),
    ):
        if peak in values and floor in values and values[peak] < values[floor]:
            phrases.append(f"{text} ({values[peak]:.0f} < {values[floor]:.0f} MiB)")
    limits = {
        "it_per_s": (1e-9, math.inf),
        "train_peak_mib": (1.0, math.inf),
        "eval_peak_mib": (1.0, math.inf),
        "psnr": (0.0, 90.0),
        "ssim": (-1.0, 1.0),
        "lpips": (0.0, 2.0),
        "l1": (0.0, 1.0),
        "gaussian_count": (1.0, math.inf),
        "mean_opacity": (0.0, 1.0),
    }
    for key, (low, high) in limits.items():
        if key in values and math.isfinite(values[key]) and not low <= values[key] <= high:
            phrases.append(f"{key} is {values[key]:g}")
    peak = max(values.get(key, 0.0) for key in ("train_peak_mib", "device_peak_mib"))
    if "device_mib" in values and peak > 0.9 * values["device_mib"]:
        phrases.append(f"peak in training above 90 % of the card's {values['device_mib']:.0f} MiB")
    if values.get("spilled_mib", 0.0) > 0:
        phrases.append(f"{values['spilled_mib']:.0f} MiB or more have moved to main memory, which is slow")
    return phrases

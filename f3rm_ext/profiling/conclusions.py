"""What a profile means, in plain sentences: what the run needed, what most of it is, and what to change."""

from collections.abc import Sequence
from dataclasses import dataclass

from f3rm_ext.profiling.findings import Finding, findings
from f3rm_ext.profiling.memory import readable
from f3rm_ext.profiling.profile_file import Profile
from f3rm_ext.profiling.snapshot import Snapshot

_TIGHT, _ROOMY = 0.85, 0.5
"""Shares of the device's memory above which a run is at risk, and below which nothing needs to change."""
_LOWERED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("images-on-gpu", ("images", "features")),
    ("cache-images", ("images",)),
    ("images-to-sample-from", ("images", "features")),
    ("res-scale", ("images", "activations")),
    ("log2-hashmap-size", ("parameters", "gradients", "optimizer")),
    ("sh-moments", ("optimizer",)),
    ("optimize-memory", ("parameters", "optimizer")),
    ("sh-degree", ("parameters", "gradients", "optimizer")),
    ("max-gaussians", ("parameters", "gradients", "optimizer", "activations")),
    ("segments", ("gaps",)),
    ("fragmentation", ("gaps",)),
)
"""Categories that an option lowers, by a part of its name; all other options lower the activations."""


@dataclass(frozen=True)
class Advice:
    """An option that would lower the memory."""

    command: str
    """The option with its lower value, as typed."""
    now: str
    """The present value of the option, as typed."""
    loss: str
    """A clause that says what is lost by the lower value."""
    lowers: str
    """The categories that it lowers, with what they take now."""


@dataclass(frozen=True)
class Conclusion:
    """The result of a profile in words."""

    sentences: tuple[str, ...]
    """Sentences on the memory that the run needed, and on what it is made of."""
    warnings: tuple[Finding, ...]
    """Findings of something wrong, the gravest first."""
    verdict: str
    """Whether something has to change."""
    advice: tuple[Advice, ...]
    """Options that lower the memory, those that lose least first."""


def conclude(profile: Profile) -> Conclusion:
    """Draws the conclusions from a profile."""
    last = profile.snapshots[-1]
    warnings = tuple(findings(profile.snapshots))
    sentences = [_peak_sentence(profile), _share_sentence(last), _cache_sentence(profile)]
    return Conclusion(
        tuple(sentence for sentence in sentences if sentence),
        warnings,
        _verdict(profile, warnings),
        tuple(_advice(option, last) for option in last.memory_options),
    )


def comparison_sentence(ours: Profile, theirs: Profile) -> str:
    """Says which of two runs needs less memory, and where the difference is largest."""
    (_, peak), (_, other) = highest(ours), highest(theirs)
    change = peak - other
    text = f"The peak is {readable(peak)} instead of {readable(other)}"
    text += f" ({100 * change / other:+.0f} %)." if other else "."
    if ours.device != theirs.device:
        return text + f" The runs differ in their device ({ours.device}, {theirs.device}), so do not compare peaks."
    lasts = (ours.snapshots[-1], theirs.snapshots[-1])
    sizes, other_sizes = ({**last.categories, "activations": last.activations} for last in lasts)
    differences = {name: size - other_sizes.get(name, 0) for name, size in sizes.items()}
    name = max(differences, key=lambda one: abs(differences[one]))
    if differences[name]:
        sign = "more" if differences[name] > 0 else "less"
        text += f" The largest difference is in {name}: {readable(abs(differences[name]))} {sign}."
    return text


def highest(profile: Profile) -> tuple[str, int]:
    """Returns the phase with the highest peak, and that peak in bytes."""
    peaks = profile.peaks() or {"train": profile.snapshots[-1].total}
    phase = max(peaks, key=lambda one: peaks[one])
    return phase, peaks[phase]


def _peak_sentence(profile: Profile) -> str:
    phase, peak = highest(profile)
    what = "tensors" if profile.device == "cuda" else "the process"
    where = {"train": "in training steps", "densify": "when Gaussians are added", "evaluation": "in evaluation"}
    where |= {"finish": "after the last step, in cleaning or lifting features"}
    where |= {"viewer": "while the viewer draws", "between steps": "between steps"}
    text = f"At its peak, {what} took {readable(peak)}, {where.get(phase, phase)}"
    if profile.device_total:
        device = str(profile.start.get("device_name", "the device")) if profile.device == "cuda" else "this machine"
        text += f": {100 * peak / profile.device_total:.0f} % of the {readable(profile.device_total)} of {device}"
    before = int(profile.start.get("resident", 0))
    if profile.device != "cuda" and before:
        text += f". {readable(before)} of it were there before the first step: Python, its libraries and the model"
    return text + "."


def _share_sentence(last: Snapshot) -> str:
    shares = sorted(((size, name) for name, size in last.categories.items() if size), reverse=True)
    if not shares:
        return ""
    largest = ", ".join(f"{name} {100 * size / last.total:.0f} %" for size, name in shares[:3])
    text = f"Between steps, tensors take {readable(last.total)}: {largest}"
    groups = {name: sum(parts.values()) for name, parts in last.named.items()}
    if groups:
        name = max(groups, key=lambda one: groups[one])
        text += f". The largest parameters are {name}: {readable(groups[name])} with gradient and moments"
    return f"{text}. Within a step, autograd keeps {readable(last.activations)} of activations on top."


def _cache_sentence(profile: Profile) -> str:
    last = profile.snapshots[-1]
    if last.reserved is None:
        return ""
    return (
        f"Torch has reserved {readable(last.reserved)}. {readable(last.cache)} of it is cache, which is used again and "
        f"so no loss; {readable(last.gaps or 0)} ({last.fragmentation_percent:.0f} %) are gaps, the real fragmentation."
    )


def _verdict(profile: Profile, warnings: Sequence[Finding]) -> str:
    _, peak = highest(profile)
    share = peak / profile.device_total if profile.device_total else 0.0
    kinds = {finding.kind for finding in warnings}
    if profile.end == "memory ran out":
        return "Memory ran out: take one or more of these options, from the top."
    if "leak" in kinds:
        return "Find the leak first: smaller options only delay the end."
    if share > _TIGHT or "spill" in kinds:
        return "The run nearly fills the device: take one or more of these options, from the top."
    if share > _ROOMY or not share:
        return "It fits. If it has to take less, these options do, from the top."
    return "There is plenty of room: nothing has to change. If it has to take less, these options do, from the top."


def _advice(option: dict[str, str], last: Snapshot) -> Advice:
    names = next((names for part, names in _LOWERED if part in option["option"]), ("activations",))
    sizes = {**last.categories, "activations": last.activations, "gaps": last.gaps or 0}
    for name in names:
        sizes[name] = sizes.get(name, 0) + last.host.get(name, 0) * (name in ("images", "features"))
    lowers = f"{', '.join(names)}: {readable(sum(sizes[name] for name in names))} now"
    return Advice(f"--{option['option']} {option['lower']}", option["now"], option["quality_impact"], lowers)

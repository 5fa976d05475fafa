"""The report of `f3rm-ext profile` as a page."""

from f3rm_ext.html.page import render_page
from f3rm_ext.html.profile_charts import COLORS, svg_charts, used_categories
from f3rm_ext.html.profile_tables import cost_sentence, tables
from f3rm_ext.profiling.conclusions import comparison_sentence, conclude, highest
from f3rm_ext.profiling.memory import readable
from f3rm_ext.profiling.profile_file import Profile


def build_page(profile: Profile, other: Profile | None = None) -> str:
    """Returns the page."""
    conclusion = conclude(profile)
    comparison = [] if other is None else [comparison_sentence(profile, other)]
    last = profile.snapshots[-1]
    sizes = {name: last.categories[name] for name in used_categories(profile)} | {"activations": last.activations}
    return render_page(
        "profile.html",
        title=f"Memory of {profile.start.get('method', 'run')}",
        lead=" ".join([*conclusion.sentences, *comparison]),
        keys=_key_figures(profile),
        warnings=conclusion.warnings,
        step=last.step,
        stack=[(name, size, readable(size), COLORS[name]) for name, size in sizes.items() if size],
        charts=svg_charts(profile),
        verdict=conclusion.verdict,
        advice=conclusion.advice,
        tables=tables(profile, other),
        costs=cost_sentence(profile),
    )


def _key_figures(profile: Profile) -> list[tuple[str, str]]:
    last, (phase, peak) = profile.snapshots[-1], highest(profile)
    keys = [
        (readable(peak), f"peak of {'tensors' if profile.device == 'cuda' else 'the process'}, {phase}"),
        (readable(last.total), "tensors between steps"),
        (readable(last.activations), "activations within a step"),
        (str(last.large), "tensors of 10 MiB or more"),
    ]
    if last.reserved is not None:
        keys.append((f"{last.fragmentation_percent:.0f} %", "fragmentation: gaps in reserved memory"))
    return keys

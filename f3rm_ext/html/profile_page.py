"""The report of a tensor profile as a single HTML file."""

from html import escape

from f3rm_ext.html.charts import line_chart
from f3rm_ext.html.page import html_page
from f3rm_ext.html.profile_charts import COLORS, used_categories
from f3rm_ext.html.profile_tables import Rows, cost_sentence, damage_sentence, tables
from f3rm_ext.profiling.conclusions import Conclusion, comparison_sentence, conclude, highest
from f3rm_ext.profiling.memory import MIB, readable
from f3rm_ext.profiling.profile_file import Profile

_CSS = """
.stack{display:flex;height:30px;border-radius:8px;overflow:hidden;gap:2px;margin:4px 0 12px}
.stack i{display:block;min-width:2px}.keyed{display:flex;flex-wrap:wrap;gap:6px 18px;font-size:.9rem;margin:0 0 4px}
.keyed i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:7px;vertical-align:-1px}
.warning{border-left:4px solid var(--warm)}ol{padding-left:1.3em;margin:8px 0}li{margin:0 0 12px}
td:first-child{overflow-wrap:anywhere;min-width:9em}
li code{display:inline-block;vertical-align:top;overflow-wrap:anywhere}
"""


def build_page(profile: Profile, other: Profile | None = None) -> str:
    """Returns the page.

    Args:
        profile: of the run.
        other: of a run to compare with.
    """
    found = conclude(profile)
    method = str(profile.start.get("method", "run"))
    lead = " ".join(found.sentences) + (f" {comparison_sentence(profile, other)}" if other is not None else "")
    body = "".join(
        [
            _keys(profile),
            _warnings(found),
            _stack(profile),
            _charts(profile),
            _advice(found),
            *(_table(title, head, rows) for title, head, rows in tables(profile, other)),
        ]
    )
    return html_page(
        f"Memory of {method}",
        "f3rm-ext tensor profile",
        f'<p class="lead">{escape(lead)}</p>{body}',
        f"{cost_sentence(profile)}{damage_sentence(profile)} This page is a single file and loads nothing from "
        "elsewhere.",
        style=_CSS,
    )


def _keys(profile: Profile) -> str:
    last, (phase, peak) = profile.snapshots[-1], highest(profile)
    keys = [
        (readable(peak), f"peak of {'tensors' if profile.device == 'cuda' else 'the process'}, {phase}"),
        (readable(last.total), "tensors between steps"),
        (readable(last.activations), "activations within a step"),
        (str(last.large), "tensors of 10 MiB or more"),
    ]
    if last.reserved is not None:
        keys.append((f"{last.fragmentation_percent:.0f} %", "fragmentation: gaps in reserved memory"))
    cards = "".join(f'<div class="key"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in keys)
    return f'<div class="keys">{cards}</div>'


def _warnings(found: Conclusion) -> str:
    return "".join(f'<div class="card warning">{escape(finding.text)}</div>' for finding in found.warnings)


def _stack(profile: Profile) -> str:
    last = profile.snapshots[-1]
    sizes = {name: last.categories[name] for name in used_categories(profile)} | {"activations": last.activations}
    bars = "".join(
        f'<i style="flex:{size};background:{COLORS[name]}" title="{escape(name)}: {readable(size)}"></i>'
        for name, size in sizes.items()
        if size
    )
    keys = "".join(
        f'<span><i style="background:{COLORS[name]}"></i>{escape(name)} {readable(size)}</span>'
        for name, size in sizes.items()
        if size
    )
    return (
        f"<h2>What it is made of</h2><p>Tensors after step {last.step}, and what autograd keeps within a step.</p>"
        f'<div class="card"><div class="stack">{bars}</div><div class="keyed">{keys}</div></div>'
    )


def _charts(profile: Profile) -> str:
    curves = [("Tensors between steps, MiB", [(float(one.step), one.total / MIB) for one in profile.snapshots])]
    for phase in profile.peaks():
        points = [
            (float(one.step), one.phases[phase]["tensors"] / MIB) for one in profile.snapshots if phase in one.phases
        ]
        curves.append((f"Peak, {phase}, MiB", points))
    if profile.snapshots[-1].reserved is not None:
        curves.append(("Fragmentation, %", [(float(one.step), one.fragmentation_percent) for one in profile.snapshots]))
    drawn = ((title, line_chart(points, label=title, unit="")) for title, points in curves)
    cards = "".join(
        f'<div class="card"><h3 style="margin-top:0">{escape(title)}</h3>{svg}</div>' for title, svg in drawn if svg
    )
    return f'<h2>Over the steps</h2><div class="two">{cards}</div>' if cards else ""


def _advice(found: Conclusion) -> str:
    items = "".join(
        f"<li>{_options(advice.command)}<br><span class='soft small'>now {escape(advice.now)}; "
        f"{escape(advice.loss)}; lowers {escape(advice.lowers)}</span></li>"
        for advice in found.advice
    )
    return f'<h2>What to change</h2><p>{escape(found.verdict)}</p><div class="card"><ol>{items}</ol></div>'


def _options(command: str) -> str:
    """Options as code; one that does not fit into the line begins a new one."""
    first, *others = command.split(" --")
    return " ".join(f"<code>{escape(one)}</code>" for one in (first, *(f"--{other}" for other in others)))


def _table(title: str, head: tuple[str, ...], rows: Rows) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        first, *rest = row
        return f"<{tag}>{escape(first)}</{tag}>" + "".join(f'<{tag} class="n">{escape(one)}</{tag}>' for one in rest)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<h2>{escape(title)}</h2><div class="card scroll"><table><tr>{cells("th", head)}</tr>{body}</table></div>'

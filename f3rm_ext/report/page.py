"""The report as one HTML file that needs nothing else: no network, no other file."""

from html import escape

from f3rm_ext.report.content import ReportContent, plural
from f3rm_ext.report.figures import (
    coverage_section,
    curves_section,
    facts_section,
    key_figures,
    metrics_section,
    time_section,
)
from f3rm_ext.report.sections import query_section, views_section
from f3rm_ext.report.style import CSS, SCRIPT


def build_page(content: ReportContent) -> str:
    """The whole page.

    Args:
        content: what to say; every text in it is escaped, pictures that are missing are left out.
    """
    sections = [
        views_section(content),
        query_section(content),
        metrics_section(content),
        coverage_section(content),
        curves_section(content),
        time_section(content),
        facts_section(content),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(content.title)}</title><style>{CSS}</style></head><body><main>"
        f'<p class="eyebrow">f3rm-ext report</p><h1>{escape(content.title)}</h1>'
        f'<p class="lead">{escape(lead(content))}</p>{key_figures(content)}{"".join(sections)}'
        "<footer>This page is one file and loads nothing from anywhere. Its pictures were rendered by the trained "
        f"field; photos and exact depth are those of the capture.</footer></main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def lead(content: ReportContent) -> str:
    """One paragraph: what was done and what can be seen."""
    measured = content.measured
    train, held = measured.get("train_images", 0), measured.get("eval_images", 0)
    what = "a made-up, ray-traced room" if content.synthetic else content.data_name
    extractors = ", ".join(measured.get("heads", {}).values())
    text = (
        f"A radiance field was trained on {plural(train, 'photo')} of {what} in {measured.get('steps', 0)} steps; "
        f"{plural(held, 'other photo')} were kept from it to judge it by."
    )
    if extractors:
        text += (
            f" Beside colour and depth it has learned the 2D features of {extractors}, so it can be asked where "
            "something is: a piece of one photo is the question, and every view answers, from the same 3D field."
        )
    return text

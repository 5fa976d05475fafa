"""Asks a run in views and writes the answers: what ``f3rm-ext query`` does."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.query import render as answers
from f3rm_ext.query import visualization as figures
from f3rm_ext.query.embeddings import Query, to_save
from f3rm_ext.query.render import ScoredView
from f3rm_ext.query.run import Run
from f3rm_ext.query.video import Videos, can_write_videos
from f3rm_ext.query.views import View
from f3rm_ext.utils.console import console, image_progress
from f3rm_ext.utils.output_folder import OutputFolder, file_names, made_by

LABELS = "labels"
OVERVIEW = "overview.png"
COMMAND = "query"


@dataclass(frozen=True)
class QueryResult:
    """What an answered query was."""

    summary: dict[str, Any]
    """As in summary.json."""
    folder: Path
    """Where it is."""


class QueryWriter:
    """Writes the answers of one run to several queries.

    Args:
        run: the run.
        queries: at least one, all of one feature.
        views: at least one.
        folder: where to write.
        threshold: score from which on a pixel counts as found.
        fps: of videos; None writes none.
        scores: whether to write the scores themselves.
        depth: whether to write the depth beside them.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self,
        run: Run,
        queries: Sequence[Query],
        views: Sequence[View],
        folder: Path,
        *,
        threshold: float,
        fps: float | None = None,
        scores: bool = True,
        depth: bool = False,
    ) -> None:
        self.run, self.queries, self.views, self.threshold = run, list(queries), list(views), threshold
        self.scores, self.depth = scores, depth
        self.frame = CaptureFrame.of_outputs(run.manager.train_dataparser_outputs, run.data)
        self.provenance = provenance(COMMAND, run, queries, threshold)
        self.out = OutputFolder(folder, self.provenance)
        names = [query.name for query in queries]
        self.slugs = dict(zip(names, file_names(names, taken=(LABELS,)), strict=True))
        self.view_slugs = dict(zip([v.name for v in views], file_names([v.name for v in views]), strict=True))
        self.fps = fps if fps is not None and can_write_videos() else None
        self.no_ffmpeg = fps is not None and self.fps is None
        self._wanted_fps = fps

    @property
    def several(self) -> bool:
        """Whether there is more than one query, and so a label map."""
        return len(self.queries) > 1

    def write(self) -> QueryResult:
        """Renders, asks and writes. Returns what was written."""
        self.out.plan(self._planned())
        for query in self.queries:
            self.out.npy(f"{self.slugs[query.name]}.npy", to_save(query.positives))
        with image_progress() as progress:
            first = progress.add_task("Range of scores", total=len(answers.looked_at(self.views)))
            heats = answers.heat_ranges(self.run.model, self.views, self.queries, lambda: progress.advance(first))
            overview = self._overview(heats)
            summary: dict[str, Any] = {}
            task = progress.add_task("Views", total=len(self.views))
            with contextlib.ExitStack() as stack:
                videos = stack.enter_context(self._videos()) if self.fps is not None else None
                for number, view in enumerate(self.views):
                    answer = answers.ask(self.run.model, view, self.queries)
                    found = answers.summarise(answer, self.queries, self.threshold, self.frame)
                    pictures = self._pictures(answer, heats)
                    self._write_view(answer, pictures)
                    if videos is not None:
                        videos.add(pictures)
                    background = self._background(answer)
                    marked = [
                        figures.ringed(pictures[query.name], found[query.name]["best_px"]) for query in self.queries
                    ]
                    overview.add(
                        number, view.name, [background, *marked, *([pictures[LABELS]] if self.several else [])]
                    )
                    summary[view.name] = {
                        "photo": None if view.photo is None else str(self.run.files(view.photo[0])[view.photo[1]]),
                        "size_px": [answer.rgb.shape[1], answer.rgb.shape[0]],
                        "queries": found,
                    }
                    progress.advance(task)
        self.out.png(OVERVIEW, overview.draw(footer(self.provenance)))
        content = {
            "complete": True,
            "frame": self.frame.describe(),
            "heat": {query.name: list(heat) for query, heat in zip(self.queries, heats, strict=True)},
            "vectors": {query.name: f"{self.slugs[query.name]}.npy" for query in self.queries},
            "best": best_of_all(summary, self.queries),
            "views": summary,
        }
        self.out.summary(content)
        if self.no_ffmpeg:
            slug = next(iter(self.slugs.values()))
            console().print(
                f"There is no ffmpeg here to write videos with; the frames are in {self.out.folder / 'overlay'}: "
                f"ffmpeg -framerate {self._wanted_fps:g} -i overlay/{slug}/frame-%05d.png {slug}.mp4",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        return QueryResult({**self.provenance, **content}, self.out.folder)

    def _planned(self) -> list[str]:
        views = list(self.view_slugs.values())
        overlays = [f"overlay/{slug}/{view}.png" for slug in self.slugs.values() for view in views]
        labels = [f"{LABELS}/{view}.png" for view in views] if self.several else []
        scores = [f"scores/{view}.npz" for view in views] if self.scores else []
        videos = list(self._video_names().values()) if self.fps is not None else []
        vectors = [f"{slug}.npy" for slug in self.slugs.values()]
        return [*overlays, *labels, *scores, *videos, *vectors, OVERVIEW]

    def _video_names(self) -> dict[str, str]:
        names = {name: f"{slug}.mp4" for name, slug in self.slugs.items()}
        return {**names, LABELS: f"{LABELS}.mp4"} if self.several else names

    def _videos(self) -> Videos:
        assert self.fps is not None
        return Videos(self.out, self._video_names(), self.fps, json.dumps(self.provenance))

    def _overview(self, heats: Sequence[tuple[float, float]]) -> figures.Overview:
        first = "photo" if self.views[0].photo is not None else "rendered"
        titles = [first, *(query.name for query in self.queries), *([LABELS] if self.several else [])]
        return figures.Overview(titles, [None, *heats, *([None] if self.several else [])], len(self.views))

    def _background(self, answer: ScoredView) -> np.ndarray:
        if answer.view.photo is None:
            return answer.rgb
        return figures.resized(self.run.photo(*answer.view.photo), *answer.rgb.shape[:2])

    def _pictures(self, answer: ScoredView, heats: Sequence[tuple[float, float]]) -> dict[str, np.ndarray]:
        """Overlays by name of the query, and the labels."""
        background = self._background(answer)
        pictures = {
            query.name: figures.overlay(background, answer.scores[..., index], heats[index])
            for index, query in enumerate(self.queries)
        }
        if self.several:
            labels = figures.label_overlay(background, answer.labels(self.threshold), len(self.queries))
            pictures[LABELS] = figures.with_legend(labels, [query.name for query in self.queries], self.threshold)
        return pictures

    def _write_view(self, answer: ScoredView, pictures: Mapping[str, np.ndarray]) -> None:
        view = self.view_slugs[answer.view.name]
        for query in self.queries:
            self.out.png(f"overlay/{self.slugs[query.name]}/{view}.png", pictures[query.name])
        if self.several:
            self.out.png(f"{LABELS}/{view}.png", pictures[LABELS])
        if not self.scores:
            return
        arrays = {"scores": answer.scores.astype(np.float16), "names": np.asarray([q.name for q in self.queries])}
        if self.several:
            arrays["labels"] = answer.labels(self.threshold).astype(np.int16)
        if self.depth and answer.depth is not None:
            arrays["depth"] = answer.depth
        self.out.npz(f"scores/{view}.npz", arrays)


def provenance(command: str, run: Run, queries: Sequence[Query], threshold: float) -> dict[str, object]:
    """Where an output of a command comes from."""
    head = run.model.query_heads()[queries[0].head] if queries else None
    return {
        **made_by(command),
        **run.describe(),
        "data": str(run.data),
        **({} if head is None else {"feature": head.name, "extractor": head.extractor}),
        "queries": [query.describe() for query in queries],
        "threshold": threshold,
    }


def footer(record: Mapping[str, Any]) -> list[str]:
    """The provenance for people."""
    lines = [f"{record['method']}, step {record['step']}, {record['checkpoint']}"]
    for query in record["queries"]:
        against = f" against {', '.join(query['negatives'])}" if query["negatives"] else ""
        lines.append(f"{query['name']}: {query['score']} of {' | '.join(query['positives'])}{against}")
    return lines


def best_of_all(views: Mapping[str, Any], queries: Sequence[Query]) -> dict[str, Any]:
    """For each query the view with the best score, and what there is to say of it there."""
    best = {}
    for query in queries:
        view = max(views, key=lambda name: views[name]["queries"][query.name]["best_score"])
        best[query.name] = {"view": view, **views[view]["queries"][query.name]}
    return best

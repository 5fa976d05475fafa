"""Writes scored views to a folder: pictures, videos, scores and a summary. This is what ``f3rm-ext query`` leaves."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from f3rm_ext.query import visualization
from f3rm_ext.query.embeddings import Query, pack_embeddings
from f3rm_ext.query.render import ScoredView, heat_ranges, preview_views, summarize_view
from f3rm_ext.query.run import Photos, View
from f3rm_ext.utils.colormaps import heat_overlay_bytes, label_overlay_bytes
from f3rm_ext.utils.console import console, image_progress
from f3rm_ext.utils.ffmpeg import provide_ffmpeg
from f3rm_ext.utils.output_folder import OutputFolder, file_names, made_by
from f3rm_ext.utils.pictures import mark_spot

LABELS = "labels"
OVERVIEW = "overview.png"
COMMAND = "query"
_MOST_SOURCES = 6
"""Embeddings that the overview names."""


@dataclass(frozen=True)
class QueryResult:
    """The answers to a query, and the folder that holds their files."""

    summary: dict[str, Any]
    """The content of summary.json."""
    folder: Path


@dataclass(frozen=True)
class ViewPictures:
    """The pictures of one scored view."""

    background: UInt8[np.ndarray, "h w 3"]
    """The photo at the size of the scores, or the rendered picture where there is no photo."""
    overlays: dict[str, UInt8[np.ndarray, "h w 3"]]
    """Heat over the background, by the query's name."""
    labels: Int64[np.ndarray, "h w"] | None
    """Index of the query with the highest score, -1 below the threshold; None for a single query."""
    labels_picture: UInt8[np.ndarray, "height width 3"] | None
    """The labels in colours over the background, enlarged where small, with a legend below; None for one query."""

    @property
    def drawn(self) -> list[UInt8[np.ndarray, "_ _ 3"]]:
        """Overlays and, if there is one, the picture of labels."""
        return [*self.overlays.values(), *([] if self.labels_picture is None else [self.labels_picture])]


class QueryWriter:
    """Writes the results of one or more queries to one run or mesh.

    Args:
        queries: at least one, all of one feature.
        views: at least one.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self,
        run: Photos,
        queries: Sequence[Query],
        views: Sequence[View],
        folder: Path,
        *,
        threshold: float,
        fps: float | None = None,
        save_scores: bool = True,
        save_depth: bool = False,
    ) -> None:
        self.run, self.queries, self.views, self.threshold = run, list(queries), list(views), threshold
        self.save_scores, self.save_depth = save_scores, save_depth
        self.has_labels = len(self.queries) > 1
        self.frame = run.frame
        self.provenance = provenance(COMMAND, run, queries, threshold)
        self.out = OutputFolder(folder, self.provenance)
        names = [query.name for query in queries]
        self.slugs = dict(zip(names, file_names(names, taken=(LABELS,)), strict=True))
        self.view_slugs = dict(zip([v.name for v in views], file_names([v.name for v in views]), strict=True))
        self._wanted_fps = fps
        self.fps = fps if fps is not None and provide_ffmpeg() is not None else None

    def write(self, scored_views: Iterable[ScoredView]) -> QueryResult:
        """Writes everything. Raises ConfigError if a file cannot be written, or another program's is in its place."""
        self.out.plan(self._file_names())
        for query in self.queries:
            self.out.npy(f"{self.slugs[query.name]}.npy", pack_embeddings(query.positives))
            if len(query.negatives):
                self.out.npy(self._negative_vectors[query.name], pack_embeddings(query.negatives))
        views: dict[str, Any] = {}
        with image_progress() as progress:
            task = progress.add_task("Range of scores", total=len(preview_views(self.views)))
            heats = heat_ranges(self.run.model, self.views, self.queries, lambda: progress.advance(task))
            heat_of = {query.name: heat for query, heat in zip(self.queries, heats, strict=True)}
            overview = self._empty_overview(heats)
            task = progress.add_task("Views", total=len(self.views))
            videos: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self.fps is not None:
                videos = open_videos(self.out, self._video_names(), self.fps, json.dumps(self.provenance))
            with videos as add_frames:
                for number, scored in enumerate(scored_views):
                    pictures = self._draw(scored, heat_of)
                    summaries = summarize_view(scored, self.queries, self.threshold, self.frame)
                    self._write_view(scored, pictures)
                    if add_frames is not None:
                        add_frames(dict(zip(self._video_names(), pictures.drawn, strict=True)))
                    overview.add(number, scored.view.name, self._overview_row(pictures, summaries))
                    photo = scored.view.photo
                    views[scored.view.name] = {
                        "photo": None if photo is None else str(self.run.files(photo[0])[photo[1]]),
                        "size_px": [scored.rgb.shape[1], scored.rgb.shape[0]],
                        "queries": summaries,
                    }
                    progress.advance(task)
        self.out.png(OVERVIEW, overview.draw(provenance_lines(self.provenance)))
        content = {
            "complete": True,
            "frame": self.frame.describe(),
            "heat": {name: list(heat) for name, heat in heat_of.items()},
            "vectors": {query.name: f"{self.slugs[query.name]}.npy" for query in self.queries},
            "negative_vectors": self._negative_vectors,
            "best": best_views(views, self.queries),
            "views": views,
        }
        self.out.summary(content)
        if self._wanted_fps is not None and self.fps is None:
            slug = next(iter(self.slugs.values()))
            console().print(
                f"There is no ffmpeg here to write videos with; the frames are in {self.out.folder / 'overlay'}: "
                f"ffmpeg -framerate {self._wanted_fps:g} -i overlay/{slug}/frame-%05d.png {slug}.mp4",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        return QueryResult({**self.provenance, **content}, self.out.folder)

    @property
    def _negative_vectors(self) -> dict[str, str]:
        """The files of the embeddings that queries are compared with."""
        return {query.name: f"negatives/{self.slugs[query.name]}.npy" for query in self.queries if len(query.negatives)}

    def _file_names(self) -> list[str]:
        views = list(self.view_slugs.values())
        overlays = [f"overlay/{slug}/{view}.png" for slug in self.slugs.values() for view in views]
        labels = [f"{LABELS}/{view}.png" for view in views] if self.has_labels else []
        scores = [f"scores/{view}.npz" for view in views] if self.save_scores else []
        videos = self._video_names() if self.fps is not None else []
        vectors = [f"{slug}.npy" for slug in self.slugs.values()]
        return [*overlays, *labels, *scores, *videos, *vectors, *self._negative_vectors.values(), OVERVIEW]

    def _draw(self, scored: ScoredView, heat_of: Mapping[str, tuple[float, float]]) -> ViewPictures:
        background, legend_px = scored.rgb, 0
        if scored.view.photo is not None:  # frames of videos keep their size
            legend_px = visualization.LEGEND_PX
            background = visualization.resize(self.run.photo(*scored.view.photo), *scored.rgb.shape[:2])
        overlays = {
            query.name: heat_overlay_bytes(background, scored.scores[..., index], *heat_of[query.name])
            for index, query in enumerate(self.queries)
        }
        if not self.has_labels:
            return ViewPictures(background, overlays, None, None)
        labels, names = scored.labels(self.threshold), [query.name for query in self.queries]
        picture = label_overlay_bytes(background, labels, len(names))
        picture = visualization.enlarge(picture, max(1, math.ceil(legend_px / picture.shape[1])))
        return ViewPictures(background, overlays, labels, visualization.add_legend(picture, names, self.threshold))

    def _write_view(self, scored: ScoredView, pictures: ViewPictures) -> None:
        view = self.view_slugs[scored.view.name]
        for name, picture in pictures.overlays.items():
            self.out.png(f"overlay/{self.slugs[name]}/{view}.png", picture)
        if pictures.labels_picture is not None:
            self.out.png(f"{LABELS}/{view}.png", pictures.labels_picture)
        if not self.save_scores:
            return
        arrays = {"scores": scored.scores.astype(np.float16), "names": np.asarray([q.name for q in self.queries])}
        if pictures.labels is not None:
            arrays["labels"] = pictures.labels.astype(np.int16)
        if self.save_depth:
            arrays["depth"] = scored.depth
        self.out.npz(f"scores/{view}.npz", arrays)

    def _empty_overview(self, heats: Sequence[tuple[float, float]]) -> visualization.Overview:
        first = "photo" if self.views[0].photo is not None else "rendered"
        titles = [first, *(query.name for query in self.queries), *([LABELS] if self.has_labels else [])]
        return visualization.Overview(titles, [None, *heats, *([None] if self.has_labels else [])], len(self.views))

    def _overview_row(self, pictures: ViewPictures, summaries: Mapping[str, dict]) -> list[np.ndarray]:
        row = [pictures.background]
        for name, picture in pictures.overlays.items():
            (x, y), score = summaries[name]["best_px"], summaries[name]["best_score"]
            row.append(mark_spot(picture, int(y), int(x)) if score >= self.threshold else picture)
        return row if pictures.labels_picture is None else [*row, pictures.labels_picture]

    def _video_names(self) -> list[str]:
        return [f"{slug}.mp4" for slug in self.slugs.values()] + ([f"{LABELS}.mp4"] if self.has_labels else [])


@contextlib.contextmanager
def open_videos(
    out: OutputFolder, names: Sequence[str], fps: float, comment: str
) -> Iterator[Callable[[Mapping[str, UInt8[np.ndarray, "h w 3"]]], None]]:
    """Writes videos side by side, each under a temporary name until it is complete; after an exception none is left.

    Yields a function that adds one frame to each video, by its name. It cuts an odd last row or column, which many
    players cannot show.
    """
    import mediapy

    provide_ffmpeg()
    paths = {name: (out.folder / name).with_name(f".{Path(name).stem}.tmp{Path(name).suffix}") for name in names}
    writers: dict[str, Any] = {}
    try:
        with contextlib.ExitStack() as stack:

            def add(frames: Mapping[str, UInt8[np.ndarray, "h w 3"]]) -> None:
                for name, frame in frames.items():
                    even = np.ascontiguousarray(frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2])
                    if name not in writers:
                        paths[name].parent.mkdir(parents=True, exist_ok=True)
                        options = {"crf": 20, "ffmpeg_args": ["-metadata", f"comment={comment}"]}
                        writer = mediapy.VideoWriter(paths[name], (even.shape[0], even.shape[1]), fps=fps, **options)
                        writers[name] = stack.enter_context(writer)
                    writers[name].add_image(even)

            yield add
        for name in writers:
            out.take(name, paths[name])
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def provenance(command: str, run: Photos, queries: Sequence[Query], threshold: float) -> dict[str, object]:
    """Returns where an output of a command comes from, as JSON."""
    head = run.model.query_heads()[queries[0].head] if queries else None
    return {
        **made_by(command),
        **run.describe(),
        "data": str(run.data),
        **({} if head is None else {"feature": head.name, "extractor": head.extractor}),
        "queries": [query.describe() for query in queries],
        "threshold": threshold,
    }


def provenance_lines(record: Mapping[str, Any]) -> list[str]:
    mesh = record.get("mesh")
    lines = [f"{record['method']}, step {record['step']}, {record['checkpoint']}" if mesh is None else f"mesh {mesh}"]
    for query in record["queries"]:
        against = f" against {', '.join(_first(query['negatives']))}" if query["negatives"] else ""
        lines.append(f"{query['name']}: {query['score']} of {' | '.join(_first(query['positives']))}{against}")
    return lines


def _first(sources: Sequence[str]) -> list[str]:
    rest = len(sources) - _MOST_SOURCES
    return [*sources[:_MOST_SOURCES], f"{rest} more"] if rest > 0 else list(sources)


def best_views(views: Mapping[str, Any], queries: Sequence[Query]) -> dict[str, Any]:
    """Returns for each query the view with the highest score, and its summary in that view."""
    best = {}
    for query in queries:
        view = max(views, key=lambda name: views[name]["queries"][query.name]["best_score"])
        best[query.name] = {"view": view, **views[view]["queries"][query.name]}
    return best

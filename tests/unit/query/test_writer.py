"""Results in a folder: each photo is decoded and each label computed once per view, and videos are whole or absent."""

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.query import render, writer
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.render import score_views
from f3rm_ext.query.run import Photos, Run, photo_views
from f3rm_ext.query.writer import QueryWriter, open_videos
from f3rm_ext.utils.output_folder import OutputFolder

RECORD = {"made_by": "f3rm-ext query", "step": 3, "queries": [{"name": "grüße"}]}


def two_queries(run: Run, *names: str) -> list[Query]:
    """Of the one-hot features of two labels, each against the other."""
    rows = torch.eye(run.model.query_heads()["labels"].dim)
    sides = [Embeddings.from_full(rows[i : i + 1], (name,)) for i, name in enumerate(names, start=1)]
    pairs = (sides, sides[::-1])
    return [Query(name, "labels", own, other) for name, (own, other) in zip(names, pairs, strict=True)]


def test_photos_are_decoded_and_labels_computed_once_per_view(run, tmp_path, watch_calls) -> None:
    views, queries = photo_views(run, "test"), two_queries(run, "table", "wall")
    decoded, labelled = watch_calls(Photos, "photo"), watch_calls(render, "label_map")
    QueryWriter(run, queries, views, tmp_path, threshold=0.5).write(score_views(run.model, views, queries))
    assert sorted(call.args[1:] for call in decoded) == [("test", 0), ("test", 1), ("test", 2)]
    assert [tuple(call.args[0].shape) for call in labelled] == [(48, 64, 2)] * 3


def test_a_query_may_be_called_labels(run, tmp_path) -> None:
    views, queries = photo_views(run, "test")[:1], two_queries(run, "labels", "wall")
    QueryWriter(run, queries, views, tmp_path, threshold=0.5).write(score_views(run.model, views, queries))
    sizes = {}
    for folder in ("labels", "overlay/labels_2", "overlay/wall"):
        with Image.open(tmp_path / folder / "frame_00003.png") as picture:
            sizes[folder] = picture.size
    assert sizes["overlay/labels_2"] == sizes["overlay/wall"] == (64, 48)
    assert sizes["labels"][1] > 48, "the legend is below the labels"
    assert sizes["labels"][0] == 3 * 64, "and as wide as its longest line needs"


def test_a_result_is_what_the_summary_says(run, tmp_path) -> None:
    views, queries = photo_views(run, "test")[:1], two_queries(run, "table", "wall")
    result = QueryWriter(run, queries, views, tmp_path, threshold=0.5).write(score_views(run.model, views, queries))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert result.folder == tmp_path and set(summary) - set(result.summary) == {"files", "earlier_files"}
    assert summary["best"]["table"]["view"] == "frame_00003" and summary["complete"] is True


def test_only_what_matches_is_marked(run, tmp_path, watch_calls) -> None:
    views, queries = photo_views(run, "test"), two_queries(run, "table", "wall")
    marked = watch_calls(writer, "mark_spot")
    for threshold, count in ((1.0, 0), (0.0, 6)):
        QueryWriter(run, queries, views, tmp_path, threshold=threshold).write(score_views(run.model, views, queries))
        assert len(marked) == count


# --- videos ----------------------------------------------------------------------------------------------------------


def pictures_of(path: Path, fps: int) -> np.ndarray:
    with av.open(str(path)) as video:
        assert video.streams.video[0].base_rate == fps
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def test_videos(tmp_path) -> None:
    out = OutputFolder(tmp_path, RECORD)
    frames = np.zeros((3, 33, 65, 3), dtype=np.uint8)
    frames[1:, :, :, 0] = 255
    with open_videos(out, ["a.mp4", "b.mp4"], fps=10.0, comment='{"step": 3}') as add_frames:
        for frame in frames:
            add_frames({"a.mp4": frame, "b.mp4": frame[..., ::-1].copy()})
    a, b = (pictures_of(tmp_path / name, fps=10) for name in ("a.mp4", "b.mp4"))
    assert a.shape == (3, 32, 64, 3)
    assert a[2, 5, 5, 0] > 200 and a[0, 5, 5, 0] < 50 and b[2, 5, 5, 2] > 200 and b[2, 5, 5, 0] < 50
    assert b'{"step": 3}' in (tmp_path / "a.mp4").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "b.mp4"]


def test_no_half_videos(tmp_path) -> None:
    with (
        pytest.raises(RuntimeError, match="stop"),
        open_videos(OutputFolder(tmp_path, RECORD), ["a.mp4"], 10.0, "") as add_frames,
    ):
        add_frames({"a.mp4": np.zeros((32, 32, 3), dtype=np.uint8)})
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())

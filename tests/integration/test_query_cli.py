"""``f3rm-ext query`` as a user types it: what it writes, where each file says it comes from, and what is refused."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import yaml
from PIL import Image

from f3rm_ext.export import surface_groups

HELD_OUT = ["frame_00003", "frame_00007", "frame_00011"]
POSE = [1.0, 0, 0, 0.1, 0, 1, 0, 0.2, 0, 0, 1, 0.3, 0, 0, 0, 1]
EXAMPLE = "frame_00001.png"
Typed = Callable[..., Any]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def provenance_of(path: Path) -> dict[str, Any]:
    """What a file says of its origin."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return json.loads(image.info["f3rm-ext"])
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            return json.loads(str(archive["provenance"]))
    assert path.suffix == ".mp4", path
    with av.open(str(path)) as video:
        return json.loads(video.metadata["comment"])


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def camera_path(folder: Path, frames: int = 4) -> Path:
    path = folder / "camera-path.json"
    content = {
        "camera_type": "perspective",
        "render_width": 31,
        "render_height": 24,
        "seconds": frames / 8,
        "camera_path": [{"camera_to_world": POSE, "fov": 70.0 + i, "aspect": 31 / 24} for i in range(frames)],
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def results(
    trained: Any, tmp_path_factory: pytest.TempPathFactory, run_command: Callable[..., Any]
) -> tuple[Path, str]:
    """The folder of one call, and what was printed."""
    folder = tmp_path_factory.mktemp("results")
    done = run_command(
        *("f3rm-ext", "query", "--load-config", trained.config, "--out", folder),
        *("--exemplar", f"middle={EXAMPLE}:20,14,16,12", f"corner={EXAMPLE}:60,44"),
        *("--save-depth", "--threshold", "0.55"),
    ).succeeds()
    return folder, done.stdout


class TestResults:
    """Two examples, held-out views: one call, checked from all sides."""

    def test_files(self, results: tuple[Path, str]) -> None:
        folder, _ = results
        views = [f"{name}.png" for name in HELD_OUT]
        expected = [f"{kind}/{view}" for kind in ("overlay/middle", "overlay/corner", "labels") for view in views]
        expected += [f"scores/{name}.npz" for name in HELD_OUT]
        expected += [f"{folder}{name}.npy" for folder in ("", "negatives/") for name in ("middle", "corner")]
        expected += ["overview.png", "summary.json"]
        assert files_in(folder) == sorted(expected)
        assert read(folder / "summary.json")["files"] == sorted(set(expected) - {"summary.json"})

    def test_every_file_names_checkpoint_and_queries(self, results: tuple[Path, str], trained: Any) -> None:
        folder, _ = results
        (checkpoint,) = trained.checkpoints.glob("*.ckpt")
        records = [provenance_of(path) for path in folder.rglob("*") if path.suffix in (".png", ".npz")]
        records.append(read(folder / "summary.json"))
        assert len(records) == 9 + 3 + 1 + 1
        for record in records:
            assert record["made_by"] == "f3rm-ext query" and record["checkpoint"] == str(checkpoint.resolve())
            assert (record["step"], record["method"], record["feature"]) == (59, "f3rm-ext-lite", "dense-daisy")
            queries = {query["name"]: query for query in record["queries"]}
            assert queries["middle"]["positives"][0] == f"{EXAMPLE}:20,14,16,12"
            assert queries["corner"]["positives"][0] == f"{EXAMPLE}:60,44"
            assert queries["corner"]["score"] == "relevancy" and queries["corner"]["negatives"]
            assert record["threshold"] == 0.55

    def test_scores_labels_and_summary_agree(self, results: tuple[Path, str]) -> None:
        folder, _ = results
        summary = read(folder / "summary.json")
        assert summary["complete"] is True and list(summary["views"]) == HELD_OUT
        for name, view in summary["views"].items():
            assert view["size_px"] == [64, 48] and Path(view["photo"]).name == f"{name}.png"
            with np.load(folder / "scores" / f"{name}.npz", allow_pickle=False) as archive:
                scores, labels, depth = (archive[key] for key in ("scores", "labels", "depth"))
                assert archive["names"].tolist() == ["middle", "corner"]
            assert scores.shape == (48, 64, 2) and scores.dtype == np.float16 and labels.shape == (48, 64)
            assert ((scores >= 0) & (scores <= 1)).all() and scores.std() > 0
            assert depth.shape == (48, 64) and (depth > 0).all()
            far = np.abs(scores[..., 0] - scores[..., 1]) > 0.01
            clear = far & (np.abs(scores.max(axis=-1) - 0.55) > 0.01)
            wanted = np.where(scores.max(axis=-1) >= 0.55, scores.argmax(axis=-1), -1)
            np.testing.assert_array_equal(labels[clear], wanted[clear])
            for index, query in enumerate(("middle", "corner")):
                found = view["queries"][query]
                x, y = found["best_px"]
                assert scores[int(y), int(x), index] == scores[..., index].max()
                assert found["best_score"] == pytest.approx(float(scores[..., index].max()), abs=1e-3)
                assert found["fraction_found"] == pytest.approx(float((scores[..., index] >= 0.55).mean()), abs=0.02)
        for query, best in summary["best"].items():
            values = {name: view["queries"][query]["best_score"] for name, view in summary["views"].items()}
            assert values[best["view"]] == best["best_score"] == max(values.values())

    def test_pictures(self, results: tuple[Path, str]) -> None:
        folder, _ = results
        for path in folder.glob("overlay/*/*.png"):
            with Image.open(path) as picture:
                assert picture.size == (64, 48) and np.asarray(picture).std() > 5
        with Image.open(folder / "overview.png") as sheet:
            assert min(sheet.size) > 200

    def test_vectors_can_be_queried_with_again(
        self, results: tuple[Path, str], trained: Any, f3rm_ext: Typed, tmp_path: Path
    ) -> None:
        folder, _ = results
        f3rm_ext(
            *("query", "--load-config", trained.config, "--exemplar", f"first={EXAMPLE}:20,14,16,12"),
            *("--vector", f"again={folder / 'middle.npy'}", "--negative", "none"),
            *("--views", "frame_00003.png", "--out", tmp_path),
        ).succeeds()
        with np.load(tmp_path / "scores" / "frame_00003.npz") as archive:
            np.testing.assert_allclose(archive["scores"][..., 1], archive["scores"][..., 0], atol=1e-3)

    def test_says_what_it_found_and_where_it_is(self, results: tuple[Path, str]) -> None:
        folder, said = results
        assert "Best of 3 views" in said and "middle" in said and str(folder / "overview.png") in said


def test_a_query_that_nothing_matches_says_so(trained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    """Its name is printed as it was typed, brackets too."""
    said = f3rm_ext(
        *("query", "--load-config", trained.config, "--exemplar", f"all [red]={EXAMPLE}", f"any={EXAMPLE}:20,20"),
        *("--threshold", "0.99", "--views", "frame_00003.png", "--out", tmp_path / "new"),
    ).succeeds()
    best = read(tmp_path / "new" / "summary.json")["best"]
    for name, found in best.items():
        assert (f"{name}: nothing matches" in said.stdout) == (found["best_score"] < 0.99)
    assert "│ all [red]" in said.stdout and "all [red]: 1 direction to find" in said.stdout
    assert best["all [red]"]["best_score"] < 0.99


def test_groups_of_a_field(trained: Any, f3rm_ext: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface_groups, "POINTS", 1000)
    done = f3rm_ext("query", "--load-config", trained.config, "--list", "--out", tmp_path).succeeds()
    groups = read(tmp_path / "summary.json")["groups"]
    assert 0 < math.fsum(group["share"] for group in groups) <= 1 and sum(group["points"] for group in groups) <= 1000
    assert files_in(tmp_path) == ["groups.png", "summary.json"] and f"{len(groups)} groups" in done.stdout


@pytest.mark.parametrize(("views", "count"), [("train", 9), ("all", 12), ("frame_00002.png", 1)])
def test_views(trained: Any, f3rm_ext: Typed, tmp_path: Path, views: str, count: int) -> None:
    f3rm_ext(
        *("query", "--load-config", trained.config, "--exemplar", EXAMPLE, "--views", views),
        *("--scale", 0.5, "--no-save-scores", "--out", tmp_path / "new"),
    ).succeeds()
    assert len([name for name in files_in(tmp_path / "new") if name.startswith("overlay/")]) == count
    assert not list(tmp_path.rglob("*.npz")) and not list(tmp_path.rglob("*.mp4"))
    assert all(view["size_px"] == [32, 24] for view in read(tmp_path / "new" / "summary.json")["views"].values())


def test_video_along_a_camera_path(trained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    f3rm_ext(
        *("query", "--load-config", trained.config, "--exemplar", f"a={EXAMPLE}:10,10", f"b={EXAMPLE}:40,40"),
        *("--views", camera_path(tmp_path), "--out", tmp_path / "new"),
    ).succeeds()
    assert sorted(path.name for path in (tmp_path / "new").glob("*.mp4")) == ["a.mp4", "b.mp4", "labels.mp4"]
    for path in (tmp_path / "new").glob("*.mp4"):
        with av.open(str(path)) as video:
            (stream,) = video.streams.video
            assert (stream.width, stream.frames, stream.base_rate) == (30, 4, 8)
        record = provenance_of(path)
        assert record["checkpoint"].endswith(".ckpt") and [query["name"] for query in record["queries"]] == ["a", "b"]
    assert len(list((tmp_path / "new" / "overlay" / "a").glob("frame-*.png"))) == 4


def test_texts_negatives_and_names(untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    f3rm_ext(
        *("query", "--load-config", untrained.config, "--text", "table", "round=apple | metal ball"),
        *("--negative", "walls", "--views", "frame_00003.png", "--out", tmp_path),
    ).succeeds()
    table, fruit = read(tmp_path / "summary.json")["queries"]
    assert (table["name"], table["positives"], table["negatives"]) == ("table", ["table"], ["walls"])
    assert (fruit["name"], fruit["positives"]) == ("round", ["apple", "metal ball"])
    assert np.load(tmp_path / "round.npy").shape == (2, 29)


def test_no_negatives_give_cosines(untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    f3rm_ext(
        *("query", "--load-config", untrained.config, "--text", "table", "--negative", "none"),
        *("--views", "frame_00003.png", "--out", tmp_path),
    ).succeeds()
    (query,) = read(tmp_path / "summary.json")["queries"]
    assert query["score"] == "cosine" and query["negatives"] == [] and query["temperature"] is None


def test_images_that_are_not_of_the_capture(trained: Any, tiny_capture: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    """A copy of a photo elsewhere: its features are made anew, and are like those of the scene."""
    copy = tmp_path / "crop.png"
    shutil.copy(tiny_capture / "images" / EXAMPLE, copy)
    f3rm_ext(
        *("query", "--load-config", trained.config, "--exemplar", f"ours={EXAMPLE}:20,14,16,12"),
        *(f"theirs={copy}:20,14,16,12", "--views", "frame_00003.png", "--out", tmp_path / "new"),
    ).succeeds()
    ours, theirs = (np.load(tmp_path / "new" / f"{name}.npy") for name in ("ours", "theirs"))
    assert float((ours[0] * theirs[0]).sum()) > 0.7


def test_by_default_answers_lie_beside_the_config(untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
    shutil.copytree(untrained.folder, tmp_path / "t")
    f3rm_ext(
        "query", "--load-config", tmp_path / "t" / "config.yml", "--text", "table", "--views", "frame_00003.png"
    ).succeeds()
    assert (tmp_path / "t" / "query" / "overview.png").is_file()


class TestRefusals:
    """One sentence, exit code 2, and whatever was in the folder is there unchanged."""

    @pytest.fixture
    def out(self, tmp_path: Path, untrained: Any, f3rm_ext: Typed) -> Path:
        """Results of before."""
        folder = tmp_path / "results"
        f3rm_ext(
            *("query", "--load-config", untrained.config, "--text", "table"),
            *("--views", "frame_00003.png", "--out", folder),
        ).succeeds()
        return folder

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((), ("--text, --exemplar or --vector",)),
            (("--exemplar", "nowhere.png:1,2"), ("'nowhere.png'",)),
            (("--text", "mug", "--feature", "clip"), ("'clip'", "labels")),
            (("--text", "a", "--views", "evening"), ("'evening'", "camera path")),
            (("--text", "a", "--scale", "0"), ("--scale is 0.0",)),
        ],
    )
    def test_wrong_questions(
        self,
        untrained: Any,
        f3rm_ext: Typed,
        remember: Callable,
        out: Path,
        arguments: tuple[str, ...],
        words: tuple[str, ...],
    ) -> None:
        before = remember(out)
        said = f3rm_ext("query", "--load-config", untrained.config, "--out", out, *arguments).refuses()
        assert all(word in said for word in words), said
        assert before.is_as_it_was()

    def test_missing_weights_or_models_leave_examples(
        self,
        weightless: tuple[Path, Path],
        make_run: Callable,
        rename_extractor: Callable,
        tiny_capture: Path,
        f3rm_ext: Typed,
        tmp_path: Path,
    ) -> None:
        """Says which file and where to put it, or which package of the training is not installed here."""
        elsewhere = make_run((f"labels:data={tiny_capture}",), change=rename_extractor("siglap:size=2"))
        for config, word in ((weightless[0], str(weightless[1])), (elsewhere, "siglap")):
            typed = ("query", "--load-config", config, "--out", tmp_path / word[-6:], "--views", "frame_00003.png")
            said = f3rm_ext(*typed, "--text", "mug").refuses()
            assert word in said and "by example" in said and not (tmp_path / word[-6:]).exists()
            f3rm_ext(*typed, "--exemplar", f"{EXAMPLE}:20,20").succeeds()

    def test_runs_that_cannot_be_asked(
        self, trained: Any, no_features: Path, f3rm_ext: Typed, remember: Callable, out: Path
    ) -> None:
        before = remember(out)
        text, example = ("--text", "mug"), ("--exemplar", f"{EXAMPLE}:20,20")
        for config, arguments, word in (
            (trained.config, text, "understands no text"),
            (no_features, text, "features.extractors"),
            (no_features, example, "features.extractors"),
            (out / "config.yml", text, str(out / "config.yml")),
        ):
            assert word in f3rm_ext("query", "--load-config", config, "--out", out, *arguments).refuses()
        assert before.is_as_it_was()

    def test_a_capture_that_is_elsewhere(self, untrained: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
        run = tmp_path / "run"
        shutil.copytree(untrained.folder, run)
        options = yaml.load((run / "config.yml").read_text(), Loader=yaml.Loader)
        options.data = options.pipeline.datamanager.data = Path("capture of another folder")
        (run / "config.yml").write_text(yaml.dump(options))
        said = f3rm_ext("query", "--load-config", run / "config.yml", "--exemplar", f"{EXAMPLE}:20,20").refuses()
        assert "capture of another folder" in said and str(run / "config.yml") in said

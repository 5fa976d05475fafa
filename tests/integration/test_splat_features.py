"""Features on splats: trained with them, asked, exported, evaluated, and lifted afterwards, as a user types it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.features import source
from f3rm_ext.query.run import load_run, view_clusters
from f3rm_ext.splat.files import read_splats

METHOD, STEPS = "sugar-ext-lite", 60
EXAMPLE = "frame_00001.png"
Typed = Callable[..., Any]


@pytest.fixture(scope="module")
def splats(labelled_splats: Any) -> Path:
    """A run with labels as features."""
    return labelled_splats.folder


def state(folder: Path, step: int = STEPS - 1) -> dict[str, Any]:
    path = folder / "nerfstudio_models" / f"step-{step:09d}.ckpt"
    return torch.load(path, weights_only=True, map_location="cpu")["pipeline"]


def test_training_ends_with_features(splats: Path) -> None:
    found = state(splats)
    codes = found["_model.lifted.heads.labels.codes"]
    assert codes.dtype == torch.float16 and codes.shape == (len(found["_model.gauss_params.means"]), 29)
    sums = codes.float().sum(dim=1)
    seen = sums > 0
    # Of every pixel one label, so of every Gaussian shares that add up to 1.
    torch.testing.assert_close(sums[seen], torch.ones(int(seen.sum())), atol=5e-3, rtol=0)
    assert seen.float().mean() > 0.9


def test_queries_by_text_and_by_example(splats: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    typed = ("query", "--load-config", splats / "config.yml", "--views", "test")
    f3rm_ext(*typed, "--out", tmp_path / "text", "--text", "table", "walls").succeeds()
    f3rm_ext(*typed, "--out", tmp_path / "example", "--exemplar", f"it={EXAMPLE}:20,14,16,12").succeeds()
    summary = json.loads((tmp_path / "text" / "summary.json").read_text())
    assert summary["method"] == METHOD and [query["name"] for query in summary["queries"]] == ["table", "walls"]
    assert len(list((tmp_path / "text").glob("overlay/table/*.png"))) == 3
    vectors = np.load(tmp_path / "example" / "it.npy")
    assert len(vectors) > 1 and np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-3)


def test_groups_are_listed_with_names_and_a_picture(splats: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    names = ("mug", "lamp", "rug", "table")
    typed = ("query", "--load-config", splats / "config.yml", "--list", "--out", tmp_path, "--text", *names)
    done = f3rm_ext(*typed).succeeds()
    summary = json.loads((tmp_path / "summary.json").read_text())
    groups = summary["groups"]
    shares = [group["share"] for group in groups]
    assert len(groups) > 3 and 0.5 < sum(shares) <= 1 and shares[0] > shares[-1]
    assert all({name for name, _ in group["names"]} <= set(names) for group in groups)
    assert any(group["names"][0][1] > 0.8 for group in groups), "one is called after what it is"
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(any(line[:2] == [str(group["number"]), group["names"][0][0]] for line in lines) for group in groups)
    with Image.open(tmp_path / "groups.png") as picture:
        assert len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 1000


def test_examples_know_the_scene_beforehand(splats: Path) -> None:
    run = load_run(splats / "config.yml")
    (head,) = run.model.query_heads().values()
    clusters = run.scene_clusters(head.name)
    assert head.clusters is not None and len(clusters) > 4
    np.testing.assert_allclose(clusters, view_clusters(run.model, head, run.cameras("train")), atol=1e-3)


def test_eval_query(splats: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    done = f3rm_ext(
        "eval", "query", "--load-config", splats / "config.yml", "--out", tmp_path / "query.json"
    ).succeeds()
    assert "Rendered held-out views" in done.stdout and "table" in done.stdout
    assert (tmp_path / "query.json").is_file()


def test_export(splats: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    f3rm_ext(
        *("export", "features", "--load-config", splats / "config.yml", "--out", tmp_path / "room.ply"),
        *("--points", 500, "--accumulation", 0.3, "--text", "table"),
    ).succeeds()
    with np.load(tmp_path / "room.npz", allow_pickle=False) as archive:
        features = archive["features"].astype(np.float32)
        assert features.shape == (500, 29) and archive["scores"].shape == (500, 1) and "density" not in archive
        assert np.allclose(features.sum(axis=1), 1, atol=0.02)
        positions = archive["positions"]
    # The room is a few metres wide.
    assert np.abs(positions).max() < 10 and positions.std(axis=0).min() > 0.1


def test_splats_with_scores(splats: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    """Columns of a PLY file, which go beside a file in a format without a place for them."""
    done = f3rm_ext(
        *("export", "splats", "--load-config", splats / "config.yml", "--out", tmp_path / "room.ply"),
        *("--text", "table", "walls", "--threshold", 0.3, "--negative", "none"),
    ).succeeds()
    scores = read_splats(tmp_path / "room.ply")[1].scores
    assert scores is not None and scores.names == ("table", "walls")
    assert np.array_equal(scores.labels >= 0, scores.scores.max(axis=1) >= 0.3) and len(set(scores.labels)) == 3
    done = f3rm_ext("export", "convert", tmp_path / "room.ply", tmp_path / "room.spz")
    assert done.code == 0 and "room.spz.queries.npz" in done.stdout.replace("\n", ""), done.stderr
    carried = read_splats(tmp_path / "room.spz")[1].scores
    assert carried is not None and np.array_equal(carried.scores, scores.scores)


def test_ns_eval_reports_features(splats: Path, run_command: Any, tmp_path: Path) -> None:
    run_command(
        "ns-eval",
        *("--load-config", splats / "config.yml", "--output-path", tmp_path / "eval.json"),
        *("--render-output-path", tmp_path / "images"),
    ).succeeds()
    metrics = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert 0.2 < metrics["feature_cosine_labels"] < 1 and 0 < metrics["feature_mse_labels"] < 0.1
    assert 0 <= metrics["query_miou_labels"] <= metrics["query_macc_labels"] <= 1
    assert len(list((tmp_path / "images").glob("eval_feature_pca_*.png"))) == 3


def test_training_on_drops_them(splats: Path, train_splats: Any, tmp_path: Path) -> None:
    train_splats(tmp_path, "--load-dir", splats / "nerfstudio_models", steps=STEPS + 1).succeeds()
    assert not [name for name in state(tmp_path / "e" / METHOD / "t", STEPS) if "lifted" in name]


def test_lifting_afterwards(
    splats: Path, f3rm_ext: Typed, tiny_capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(splats, tmp_path / "t", copy_function=os.link)
    typed = ("features", "lift", "--load-config", tmp_path / "t" / "config.yml")
    cache = ("--cache-dir", tmp_path / "cache")
    done = f3rm_ext(
        *typed, "--extractor", f"labels:data={tiny_capture}", "dense-daisy", "--codes", 8, *cache
    ).succeeds()
    photos = len(json.loads((tiny_capture / "transforms.json").read_text())["frames"])
    trained = int(re.findall(r"of (\d+) photos", " ".join(done.stdout.split()))[0])
    assert 0 < trained < photos, "held-out photos are not lifted"
    before, after = state(splats), state(tmp_path / "t")
    names = [name for name in after if name.endswith(".codes")]
    assert names == ["_model.lifted.heads.labels.codes", "_model.lifted.heads.dense-daisy.codes"]
    assert all(after[name].shape[1] == 8 for name in names)
    others = [name for name in before if "lifted" not in name and isinstance(before[name], torch.Tensor)]
    assert others and all(torch.equal(before[name], after[name]) for name in others)
    # The photos' features are found again, by what the checkpoint says of them.
    with monkeypatch.context() as patch:
        patch.setattr(source, "build_extractor", None)
        assert load_run(tmp_path / "t" / "config.yml").feature_map("test", 0, "dense-daisy").values.shape[2] == 8
    done = f3rm_ext(
        *("query", "--load-config", tmp_path / "t" / "config.yml", "--feature", "dense-daisy"),
        *("--exemplar", f"{EXAMPLE}:20,14", "--views", "frame_00003.png", "--out", tmp_path / "out"),
    ).succeeds()


class TestRefusals:
    def test_features_that_do_not_exist(self, train_splats: Any, tmp_path: Path) -> None:
        """Before training, not after it."""
        done = train_splats(tmp_path, "--pipeline.model.features", "siglap")
        done.refuses("siglap")
        assert not list(tmp_path.rglob("*.ckpt"))

    def test_splats_without_features(self, splats: Path, train_splats: Any, f3rm_ext: Typed, tmp_path: Path) -> None:
        train_splats(tmp_path, steps=1).succeeds()
        config = tmp_path / "e" / METHOD / "t" / "config.yml"
        said = f3rm_ext("query", "--load-config", config, "--text", "table", "--out", tmp_path / "out").refuses()
        assert "no distilled features" in said and "f3rm-ext features lift" in said
        out = ("--text", "table", "--out", tmp_path / "out.ply")
        said = f3rm_ext("export", "splats", "--load-config", config, *out).refuses()
        assert "no distilled features" in said and not (tmp_path / "out.ply").exists()

    def test_lifting_onto_a_field(self, untrained: Any, f3rm_ext: Typed, remember: Any) -> None:
        before = remember(untrained.checkpoints)
        said = f3rm_ext("features", "lift", "--load-config", untrained.config, "--extractor", "dense-daisy").refuses()
        assert "has no splats" in said and before.is_as_it_was()

    @pytest.mark.parametrize(("arguments", "word"), [(("nowhere",), "nowhere"), ((), "name one")])
    def test_lifting_nothing(
        self, splats: Path, f3rm_ext: Typed, remember: Any, arguments: tuple[str, ...], word: str
    ) -> None:
        before = remember(splats / "nerfstudio_models")
        typed = ("features", "lift", "--load-config", splats / "config.yml", "--extractor")
        assert word in f3rm_ext(*typed, *arguments).refuses() and before.is_as_it_was()

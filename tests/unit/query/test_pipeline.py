"""The pipeline: in a test it also queries the model in labelled photos, and only then."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.pipelines.base_pipeline import VanillaPipeline
from torch import Tensor

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.pipeline import FeaturePipeline

KEYS = {f"query_{key}_labels" for key in ("localisation", "miou", "macc")}


@pytest.fixture(scope="module")
def make(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FeaturePipeline]:
    """Untrained pipelines on the tiny capture, with its labels as features."""

    cache = tmp_path_factory.mktemp("features")

    def build(data: Path = tiny_capture, *, features: bool = True) -> FeaturePipeline:
        config = make_config("f3rm-ext-lite").pipeline
        config.datamanager.data = data
        config.datamanager.features.cache_dir = cache
        config.datamanager.features.extractors = (f"labels:data={tiny_capture}",) if features else ()
        return config.setup(device="cpu", test_mode="val")

    return build


@pytest.fixture(scope="module")
def pipeline(make: Callable[..., FeaturePipeline]) -> FeaturePipeline:
    """One with features, whose tests leave it as it was."""
    return make()


def answers(pipeline: FeaturePipeline, sign: float, asked: list[list[str]]) -> Callable[..., Any]:
    """Stands in for the model: the labels themselves as scores, 1 where a class is and −1 elsewhere, times a sign."""
    dataset = pipeline.datamanager.eval_dataset
    truth, files = CaptureGroundTruth(pipeline.datamanager.get_datapath()), iter(dataset.image_filenames)

    def score(model: Any, camera: Any, queries: Sequence[Query]) -> tuple[Tensor, dict[str, Tensor]]:
        asked.append([query.name for query in queries])
        view = truth.view(Path(next(files)), 48, 64)
        assert view is not None
        nowhere = torch.zeros(48, 64, dtype=torch.bool)
        masks = [torch.from_numpy(view.masks[name]) if name in view.masks else nowhere for name in asked[-1]]
        return sign * (2.0 * torch.stack(masks, dim=-1).float() - 1.0), {}

    return score


@pytest.mark.parametrize(("sign", "least", "most"), [(1.0, 1.0, 1.0), (-1.0, 0.0, 0.3)])
def test_figures_follow_the_answers(pipeline, monkeypatch, sign, least, most) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr("f3rm_ext.query.pipeline.score_image", answers(pipeline, sign, asked))
    pipeline.train()
    metrics = pipeline.query_metrics(pipeline.datamanager.fixed_indices_eval_dataloader)
    assert metrics.keys() == KEYS and all(least <= value <= most for value in metrics.values()), metrics
    assert len(asked) == len(pipeline.datamanager.eval_dataset) and "mug" in asked[0]
    assert pipeline.training, "the mode is as it was"


def test_masked_pixels_do_not_count(pipeline, monkeypatch) -> None:
    """What a mask leaves out is neither looked for nor found, so that all answers are right again."""
    right, wrong = (answers(pipeline, sign, []) for sign in (1.0, -1.0))

    def half_right(*arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        scores, _ = right(*arguments)
        scores[:, 32:] = wrong(*arguments)[0][:, 32:]
        return scores, {}

    left = torch.zeros(48, 64, 1, dtype=torch.bool)
    left[:, :32] = True
    views = [(camera, {**batch, "mask": left}) for camera, batch in pipeline.datamanager.fixed_indices_eval_dataloader]
    monkeypatch.setattr("f3rm_ext.query.pipeline.score_image", half_right)
    assert pipeline.query_metrics(views)["query_miou_labels"] == 1.0


def test_where_no_class_is_visible_nothing_is_measured(pipeline) -> None:
    left_out = torch.zeros(48, 64, 1, dtype=torch.bool)
    views = pipeline.datamanager.fixed_indices_eval_dataloader
    assert pipeline.query_metrics((camera, {**batch, "mask": left_out}) for camera, batch in views) == {}


def test_only_tests_query(pipeline, monkeypatch) -> None:
    monkeypatch.setattr(VanillaPipeline, "get_average_image_metrics", lambda *_, **__: {"psnr": 20.0})
    monkeypatch.setattr(FeaturePipeline, "query_metrics", lambda *_: {"query_miou_labels": 0.5})
    assert pipeline.get_average_image_metrics([], "eval") == {"psnr": 20.0}
    monkeypatch.setattr(pipeline, "test_mode", "test")
    assert pipeline.get_average_image_metrics([], "eval") == {"psnr": 20.0, "query_miou_labels": 0.5}


def test_a_single_photo_has_no_deviation(pipeline, monkeypatch) -> None:
    metrics = {"psnr": 20.0, "psnr_std": float("nan"), "ssim": 0.5, "ssim_std": 0.1}
    monkeypatch.setattr(VanillaPipeline, "get_average_image_metrics", lambda *_, **__: metrics)
    assert pipeline.get_average_image_metrics([], "eval") == {"psnr": 20.0, "ssim": 0.5, "ssim_std": 0.1}


def test_nothing_is_queried_without_features_or_labels(make, tiny_capture, tmp_path) -> None:
    plain = make(features=False)
    assert plain.query_metrics(plain.datamanager.fixed_indices_eval_dataloader) == {}
    shutil.copytree(tiny_capture, tmp_path / "bare")
    meta = json.loads((tmp_path / "bare" / "transforms.json").read_text())
    del meta["classes"]
    (tmp_path / "bare" / "transforms.json").write_text(json.dumps(meta))
    unlabelled = make(tmp_path / "bare")
    assert unlabelled.query_metrics(unlabelled.datamanager.fixed_indices_eval_dataloader) == {}

"""`f3rm-ext splats select` as a user types it, on a run of splats with the classes of its capture as features."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def outline_iou(folder: Path, data: Path, name: str) -> float:
    """Returns the mean IoU of what a run shows and the labels of a class in the training views that show it."""
    from f3rm_ext.capture.ground_truth import CaptureGroundTruth
    from f3rm_ext.data.pinhole_cameras import PinholeCameras
    from f3rm_ext.export.splats import load_splat_run
    from f3rm_ext.splat.rendering import render

    run, truth, found = load_splat_run(folder / "config.yml"), CaptureGroundTruth(data), []
    dataset = run.manager.train_dataset
    for index, file in enumerate(dataset.image_filenames):
        view = PinholeCameras.of(dataset.cameras[index : index + 1])
        alpha = render(run.scene(run.splats()), view).rasterization.alpha
        labels = truth.view(Path(file), *alpha.shape)
        if labels is not None and name in labels.masks and labels.masks[name].sum() > 30:
            shown, wanted = (alpha > 0.5).numpy(), labels.masks[name]
            found.append((shown & wanted).sum() / (shown | wanted).sum())
    assert found
    return float(np.mean(found))


@pytest.fixture(scope="module")
def thing(tiny_capture: Path) -> str:
    """Name of the class with the most pixels."""
    from f3rm_ext.capture.ground_truth import LABEL_KEYS, CaptureGroundTruth

    truth = CaptureGroundTruth(tiny_capture)
    counts: dict[str, int] = {}
    for file in truth.files(LABEL_KEYS):
        values = np.asarray(Image.open(file))
        for item in truth.things:
            counts[item.name] = counts.get(item.name, 0) + int((values == item.label).sum())
    return max(counts, key=counts.__getitem__)


@pytest.fixture
def select(
    labelled_splats: Any, f3rm_ext: Callable[..., Any], tmp_path: Path
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Selects into a new folder, and returns it and its summary."""

    def run(name: str, *words: object) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / name
        f3rm_ext("splats", "select", "--load-config", labelled_splats.config, "--out", out, *words).succeeds()
        return out, json.loads((out / "summary.json").read_text())

    return run


def test_an_object_and_its_scene_share_the_gaussians(
    select: Callable[..., Any], thing: str, tiny_capture: Path, labelled_splats: Any
) -> None:
    from f3rm_ext.export.splats import load_splat_run
    from f3rm_ext.splat.files import read_splats

    alone, kept = select("alone", "--text", thing, "--keep")
    rest, removed = select("rest", "--label", thing, "--remove")
    count = load_splat_run(labelled_splats.config).model.num_gaussians
    for folder, summary in ((alone, kept), (rest, removed)):
        model = load_splat_run(folder / "config.yml").model
        assert model.num_gaussians == summary["kept"] == count - summary["removed"]
        assert all(len(head.codes) == summary["kept"] for head in model.query_heads().values())
        splats, info = read_splats(folder / "removed.ply")
        assert len(splats) == summary["removed"] and info.scores is not None and info.scores.names == ("share",)
        assert (folder / "report.html").read_text().count("<img") >= 3
    assert 0 <= removed["empty_px"] < removed["object_px"]
    assert outline_iou(alone, tiny_capture, thing) > outline_iou(rest, tiny_capture, thing)


def test_the_viewer_selects_what_the_command_does(
    labelled_splats: Any, thing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from f3rm_ext.export.select import Wish, select_splats
    from f3rm_ext.export.splats import load_splat_run
    from f3rm_ext.query.builders import encode_queries
    from f3rm_ext.query.options import QueryInputs, parse_queries

    run = load_splat_run(labelled_splats.config)
    specs, cameras = parse_queries(QueryInputs(text=(thing,))), run.manager.train_dataset.cameras
    model, views = run.model.train(), []
    (query,) = encode_queries(specs, run)
    everything, lock = torch.ones(model.num_gaussians, dtype=torch.bool), threading.Lock()

    def choose() -> Any:
        return model.choose_points(cameras, query, 0.5, everything, lambda: views.append(lock.locked()), lock)

    chosen, shares, core = choose()
    selection = select_splats(run, Wish(specs, 0.5))
    assert torch.equal(chosen, selection.chosen) and torch.equal(core, selection.core)
    assert torch.allclose(shares, selection.shares, atol=1e-5)
    assert views == [False] * 3 * len(cameras), "between two views the pages get their turn"
    monkeypatch.setattr(model.queries, "hidden", lambda: chosen)
    again, *_ = choose()
    assert not (again & chosen).any(), "what is hidden is not found again"


def test_a_box_ends_the_object(select: Callable[..., Any], labelled_splats: Any) -> None:
    from f3rm_ext.export.splats import load_splat_run

    means = load_splat_run(labelled_splats.config).splats().means
    low, high = means.quantile(0.2, dim=0), means.quantile(0.8, dim=0)
    folder, summary = select("box", "--box", *(f"{value:.6f}" for value in (*low.tolist(), *high.tolist())), "--keep")
    left = load_splat_run(folder / "config.yml").splats().means
    assert 0 < len(left) == summary["kept"] < len(means)
    assert ((left >= low - 1e-5) & (left <= high + 1e-5)).all()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--label", "unicorn", "--keep"), "unicorn"),
        (("--text", "banana"), "--remove"),
        (("--keep",), "--exemplar"),
        (("--box", "1", "1", "1", "0", "0", "0", "--keep"), "--box"),
        (("--box", "900", "900", "900", "901", "901", "901", "--keep"), "--box"),
        (("--box", "-9e9", "-9e9", "-9e9", "9e9", "9e9", "9e9", "--remove"), "--box"),
    ],
)
def test_bad_input_is_one_sentence(
    f3rm_ext: Callable[..., Any], labelled_splats: Any, words: Sequence[str], told: str, tmp_path: Path
) -> None:
    refused = f3rm_ext("splats", "select", "--load-config", labelled_splats.config, "--out", tmp_path / "out", *words)
    refused.refuses(told)
    assert not (tmp_path / "out").exists()

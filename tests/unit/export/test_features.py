"""What a feature cloud is written as."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.export import features
from f3rm_ext.export.cloud import CloudOptions, estimate_normals, gather_points
from f3rm_ext.export.features import FeatureCloud, features_at, write_features
from f3rm_ext.query.embeddings import Embeddings, Query

FRAME = CaptureFrame(rotation=np.asarray([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]), translation=np.arange(3.0), scale=0.25)
Make = Callable[..., FeatureCloud]


@pytest.fixture
def ball(make_ball: Callable[..., Any]) -> Any:
    return make_ball(dense=True)


@pytest.fixture
def make(ball: Any, around: Cameras) -> Make:
    def build(frame: CaptureFrame | None = None, names: tuple[str, ...] = ("blue mug", "blue-mug")) -> FeatureCloud:
        vectors = Embeddings.from_full(ball.heads["halves"].weight[:, 0][None], ("upper",))
        nothing = Embeddings.empty(5)
        queries = [Query(name, "halves", vectors, nothing) for name in names]
        cloud = gather_points(ball, around, CloudOptions(points=200), queries)
        return FeatureCloud(cloud, estimate_normals(cloud.positions, cloud.seen_from), frame, queries, 0.5)

    return build


def test_features_at_points_are_those_of_the_field(ball: Any) -> None:
    points = np.asarray([[0, 0, 1], [0, 0, -1], [0, 0, 1]] * 5000, dtype=np.float32)
    chunks = list(features_at(ball, ball.heads["halves"], points))
    assert len(chunks) > 1
    wanted = ball.heads["halves"].weight.T[[0, 1, 0] * 5000]
    torch.testing.assert_close(torch.cat(chunks), wanted, atol=1e-5, rtol=0)


def test_npz(ball: Any, make: Make, tmp_path: Path) -> None:
    made, seen = make(FRAME), []
    provenance = {"made_by": "test", "step": 7}
    npz = write_features(tmp_path / "a.ply", ball, ball.heads["halves"], made, provenance, on_progress=seen.append)
    assert npz == tmp_path / "a.npz" and seen[-1] == 200
    with np.load(npz, allow_pickle=False) as found:
        arrays = dict(found)
    assert json.loads(str(arrays.pop("provenance"))) == provenance
    assert arrays["features"].dtype == np.float16 and arrays["features"].shape == (200, 5)
    upper = made.cloud.positions[:, 2] >= 0
    weight = ball.heads["halves"].weight.numpy()
    np.testing.assert_allclose(arrays["features"], weight.T[(~upper).astype(int)], atol=2e-3)
    np.testing.assert_allclose(arrays["positions"], FRAME.to_capture(made.cloud.positions.astype(float)), atol=1e-5)
    np.testing.assert_allclose(arrays["normals"] @ FRAME.rotation.T, made.normals, atol=1e-5)
    np.testing.assert_array_equal(arrays["names"], ["blue mug", "blue-mug"])
    np.testing.assert_array_equal(arrays["labels"] == 0, arrays["scores"][:, 0] >= 0.5)
    np.testing.assert_array_equal(arrays["colors"], made.cloud.colors)
    wanted = np.rint(np.clip(np.abs(arrays["features"][:, :3].astype(float)), 0, 1) * 255)
    np.testing.assert_allclose(arrays["pca_colors"], wanted, atol=1)
    assert set(arrays["density"].tolist()) == {1.0, 100.0}


def test_ply(ball: Any, make: Make, tmp_path: Path, open3d: ModuleType) -> None:
    made = make()
    write_features(tmp_path / "a.ply", ball, ball.heads["halves"], made, {"made_by": "test"}, "none")
    cloud = open3d.t.io.read_point_cloud(str(tmp_path / "a.ply"))
    np.testing.assert_array_equal(cloud.point.positions.numpy(), made.cloud.positions)
    np.testing.assert_allclose(cloud.point.normals.numpy(), made.normals, atol=1e-7)
    np.testing.assert_array_equal(cloud.point.colors.numpy(), made.cloud.colors)
    for number, name in enumerate(("cosine_blue_mug", "cosine_blue_mug_2")):
        np.testing.assert_array_equal(cloud.point[name].numpy()[:, 0], made.cloud.scores[:, number])
    assert all(name in cloud.point for name in ("pca_red", "accumulation", "density", "label"))
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert "features" not in found and found["pca_colors"].any()


def test_no_queries_no_columns_for_them(ball: Any, make: Make, tmp_path: Path) -> None:
    made = make(names=())
    columns = made.columns(np.zeros((200, 3), np.uint8))
    assert not [name for name in columns if name.startswith(("cosine", "relevancy", "label"))]
    with np.load(write_features(tmp_path / "a.ply", ball, ball.heads["halves"], made, {}), allow_pickle=False) as found:
        assert "scores" not in found


def test_codes_and_full_features(ball: Any, make: Make, tmp_path: Path) -> None:
    head = ball.heads["halves"]
    rows, _ = torch.linalg.qr(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)))
    head.basis = rows.T.contiguous()
    made = make(names=())
    stored = {}
    for space in ("distilled", "full"):
        with np.load(write_features(tmp_path / "a.ply", ball, head, made, {}, space), allow_pickle=False) as found:
            stored[space] = dict(found)
    assert stored["distilled"]["features"].shape == (200, 5) and stored["full"]["features"].shape == (200, 9)
    np.testing.assert_array_equal(stored["distilled"]["code_basis"], head.basis.numpy())
    back = stored["distilled"]["features"].astype(float) @ head.basis.numpy()
    np.testing.assert_allclose(stored["full"]["features"], back, atol=5e-3)


def test_features_are_never_held_all_at_once(
    ball: Any, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_CHUNK", 64)
    write_features(tmp_path / "a.ply", ball, ball.heads["halves"], make(), {})
    assert ball.heads["halves"].largest == 64

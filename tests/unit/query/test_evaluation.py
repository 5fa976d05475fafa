"""Queries against ground truth: geometry of the points, 2D features at pixels, and which classes count in a view."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from PIL import Image

from f3rm_ext.capture.ground_truth import CaptureGroundTruth, LabelledView
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.sampling import sample_map
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.evaluation import (
    MIN_VISIBLE_PX,
    LabelledPoints,
    count_view,
    evaluate_points,
    find_labelled_cameras,
    score_feature_map,
    surface_points,
)
from f3rm_ext.query.metrics import QueryMetrics
from f3rm_ext.query.relevancy import relevancy_reference

WIDTH, HEIGHT, FOCAL, SCALE = 12, 10, 9.0, 0.25
CENTRE, UNIT_M = (5.5, 4.0), 5e-4


def looking_down() -> torch.Tensor:
    """A tilted camera 2 scene units above the plane z = 0, camera to world."""
    tilt, turn = 0.4, 0.9
    about_x = np.array(
        [[1, 0, 0], [0, math.cos(tilt), -math.sin(tilt)], [0, math.sin(tilt), math.cos(tilt)]], dtype=np.float64
    )
    about_z = np.array(
        [[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1]], dtype=np.float64
    )
    return torch.from_numpy(np.concatenate([about_z @ about_x, [[0.3], [-0.2], [2.0]]], axis=1)).float()


def plane_depth_m(pose: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depth along the optical axis in metres where the plane z = 0 is seen, and the points in scene units."""
    x, y = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    rays = np.stack([(x - CENTRE[0]) / FOCAL, -(y - CENTRE[1]) / FOCAL, -np.ones_like(x)], axis=-1) @ pose[:, :3].T
    depth = -pose[2, 3] / rays[..., 2]
    return depth / SCALE, pose[:, 3] + rays * depth[..., None]


@pytest.fixture
def plane(tmp_path: Path) -> Path:
    """A capture of one view of the plane; label 1 on the left and 2 on the right; the first row has no depth."""
    depth_m, _ = plane_depth_m(looking_down().double().numpy())
    depth_m[0] = 0
    Image.fromarray(np.rint(depth_m / UNIT_M).astype(np.uint16)).save(tmp_path / "depth.png")
    labels = np.where(np.arange(WIDTH) < 5, 1, 2)[None].repeat(HEIGHT, axis=0).astype(np.uint8)
    Image.fromarray(labels).save(tmp_path / "labels.png")
    Image.fromarray(np.zeros((HEIGHT, WIDTH, 3), np.uint8)).save(tmp_path / "a.png")
    frame = {"file_path": "a.png", "depth_file_path": "depth.png", "label_file_path": "labels.png"}
    meta = {"depth_unit_scale_factor": UNIT_M, "classes": ["nothing", "left", "right"], "frames": [frame]}
    (tmp_path / "transforms.json").write_text(json.dumps(meta))
    return tmp_path


def cameras(count: int = 1) -> Cameras:
    poses = looking_down()[None].repeat(count, 1, 1)
    return Cameras(poses, fx=FOCAL, fy=FOCAL, cx=CENTRE[0], cy=CENTRE[1], width=WIDTH, height=HEIGHT)


# --- points on surfaces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_px", [1, 3])
def test_points_lie_where_the_surface_is(plane, every_px) -> None:
    found = surface_points([plane / "a.png"], cameras(), CaptureGroundTruth(plane), SCALE, every_px)
    assert found is not None
    _, exact = plane_depth_m(looking_down().double().numpy())
    known = np.arange(HEIGHT)[::every_px] > 0  # the first row has no depth
    expected = exact[::every_px, ::every_px][known].reshape(-1, 3)
    np.testing.assert_allclose(found.points, expected, atol=1e-4)
    left = (np.arange(WIDTH)[::every_px] < 5)[None].repeat(known.sum(), axis=0).ravel()
    np.testing.assert_array_equal(found.labels, np.where(left, 1, 2))
    assert found.points.dtype == np.float32


def test_views_without_depth_or_labels_have_no_points(plane) -> None:
    truth = CaptureGroundTruth(plane)
    both = surface_points([plane / "b.png", plane / "a.png"], cameras(2), truth, SCALE)
    alone = surface_points([plane / "a.png"], cameras(), truth, SCALE)
    assert both is not None and alone is not None
    np.testing.assert_array_equal(both.points, alone.points)
    (plane / "labels.png").unlink()
    assert surface_points([plane / "a.png"], cameras(), truth, SCALE) is None


def test_points_of_the_room_lie_on_its_floor_and_walls(run) -> None:
    """Through poses, scale and depth as the pipeline has them, back to the capture's metres."""
    truth, outputs = CaptureGroundTruth(run.data), run.manager.train_dataparser_outputs
    found = surface_points(run.files("test"), run.cameras("test"), truth, outputs.dataparser_scale, 1)
    assert found is not None and len(found.points) > 3000
    transform = outputs.dataparser_transform.numpy().astype(np.float64)
    world_m = (found.points / outputs.dataparser_scale - transform[:, 3]) @ transform[:, :3]
    floor_z_m = world_m[found.labels == truth.names.index("floor"), 2]
    assert len(floor_z_m) > 50 and np.abs(floor_z_m).max() < 2e-3
    ceiling_z_m = world_m[found.labels == truth.names.index("walls"), 2]
    assert ceiling_z_m.min() > -2e-3
    assert world_m[found.labels == truth.names.index("rug"), 2].max() < 0.05


# --- 2D features at pixels -------------------------------------------------------------------------------------------


def vectors(count: int, dim: int, seed: int) -> Embeddings:
    given = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return Embeddings.from_full(given, [f"{seed}.{i}" for i in range(count)])


@pytest.mark.parametrize("with_codes", [False, True])
def test_scores_of_a_map_are_those_of_its_interpolated_features(with_codes) -> None:
    """Of more pixels than are scored at a time."""
    height, width = 99, 176
    random = np.random.default_rng(2)
    values = random.normal(size=(3, 4, 6)).astype(np.float16)
    residual = random.uniform(0.5, 2, (3, 4)).astype(np.float16)
    feature_map = FeatureMap(values, PatchGrid.covering(3, 4, height, width), residual if with_codes else None)
    queries = [
        Query("relevancy", "toy", vectors(2, 6, 0), vectors(3, 6, 1), 0.2),
        Query("cosine", "toy", vectors(1, 6, 2), Embeddings.empty(6)),
    ]
    found = score_feature_map(feature_map, queries, height, width)
    assert found.shape == (height, width, 2)
    places = np.stack(np.mgrid[:height, :width], axis=-1).reshape(-1, 2) + 0.5
    sampled = torch.from_numpy(sample_map(feature_map, places)).double()
    norm = sampled.norm(dim=-1)
    if with_codes:
        left_out = FeatureMap(residual[..., None], feature_map.grid)
        norm = (norm**2 + torch.from_numpy(sample_map(left_out, places)).double()[:, 0] ** 2).sqrt()
    unit = sampled / norm[:, None]
    relevancy = relevancy_reference(
        unit @ queries[0].positives.values.double().T, unit @ queries[0].negatives.values.double().T, 0.2
    )
    torch.testing.assert_close(found[..., 0].double().flatten(), relevancy, atol=1e-5, rtol=0)
    cosine = (unit @ queries[1].positives.values.double().T)[:, 0]
    torch.testing.assert_close(found[..., 1].double().flatten(), cosine, atol=1e-5, rtol=0)


# --- what counts -----------------------------------------------------------------------------------------------------


def test_views_without_labels_are_left_out(plane) -> None:
    files = [plane / "b.png", plane / "a.png"]
    ((file, camera, labels),) = find_labelled_cameras(files, cameras(2), CaptureGroundTruth(plane))
    assert file.name == "a.png" and labels.masks["left"].shape == (HEIGHT, WIDTH) and camera.shape == (1,)


def view_of(**sizes: int) -> LabelledView:
    """Objects of these sizes, one below the other, in a view of 10 columns; each box is the whole view."""
    masks, start = {}, 0
    for name, size in sizes.items():
        mask = np.zeros(200, dtype=bool)
        mask[start : start + size] = True
        masks[name], start = mask.reshape(20, 10), start + size
    return LabelledView(masks, dict.fromkeys(masks, ((0.0, 0.0, 10.0, 20.0),)))


def test_only_classes_that_are_seen_well_count() -> None:
    nothing = Embeddings.empty(3)
    queries = [Query(name, "toy", vectors(1, 3, 0), nothing) for name in ("absent", "small", "large", "larger")]
    view = view_of(small=MIN_VISIBLE_PX - 1, large=MIN_VISIBLE_PX, larger=60, unnamed=80)
    scores = torch.zeros(20, 10, 4)
    scores[..., 2] = torch.from_numpy(view.masks["large"]).float()  # only this query finds its object
    metrics = QueryMetrics()
    count_view(metrics, queries, scores, view)
    classes = metrics.summarize_classes()
    assert list(classes) == ["large", "larger"]
    assert classes["large"]["miou"] == 1.0 and classes["larger"]["miou"] == 0.0
    assert classes["large"]["localisation"] == 1.0


def test_classes_are_counted_at_points(make_field, tmp_path) -> None:
    """One class is a cap of directions, which its query finds; for the other there are too few points."""
    field = make_field()
    points = torch.nn.functional.normalize(torch.randn(400, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    vector = Embeddings.from_full(field.features("toy", points[:1]).float(), ["first"])
    query = Query("cap", "toy", vector, Embeddings.empty(40))
    features = field.features("toy", points)
    cosine = (features / features.norm(dim=-1, keepdim=True)) @ vector.values[0].double()
    labels = np.where(cosine.numpy() >= 0.5, 2, 0)
    few = np.flatnonzero(labels == 0)[: MIN_VISIBLE_PX - 1]
    labels[few] = 1
    (tmp_path / "transforms.json").write_text(json.dumps({"classes": ["nothing", "few", "cap"]}))
    surface = LabelledPoints(points.numpy(), labels)
    queries = [query, Query("few", "toy", vector, Embeddings.empty(40)), Query("new", "toy", vector, vector)]
    metrics = evaluate_points(field, [queries], surface, CaptureGroundTruth(tmp_path), 0.5)
    assert list(metrics.summarize_classes()) == ["cap"] and len(metrics) == 1
    assert (labels == 2).sum() >= MIN_VISIBLE_PX
    assert metrics.summary()["miou"] == 1.0 and metrics.summary()["localisation"] == 1.0


def test_what_masks_leave_out_is_neither_looked_for_nor_found() -> None:
    nothing = Embeddings.empty(3)
    queries = [Query(name, "toy", vectors(1, 3, 0), nothing) for name in ("half", "gone")]
    view = view_of(half=80, gone=60)
    kept = np.zeros((20, 10), dtype=bool)
    kept[4:8] = True  # half of the first object, nothing of the other
    scores = torch.ones(20, 10, 2)  # the best and above all thresholds wherever nothing counts
    scores[4:8] = 0.9
    metrics = QueryMetrics()
    count_view(metrics, queries, scores, view, kept)
    (classes,) = metrics.summarize_classes().items()
    assert classes[0] == "half" and classes[1]["miou"] == 1.0 and classes[1]["macc"] == 1.0
    assert classes[1]["best_miou"] == 1.0
    place = LabelledView(view.masks, {"half": ((0.0, 4.0, 10.0, 8.0),), "gone": ()})
    inside = QueryMetrics()
    count_view(inside, queries, scores, place, kept)
    assert inside.summary()["localisation"] == 1.0
    outside = QueryMetrics()
    count_view(outside, queries, scores, place)
    assert outside.summarize_classes()["half"]["localisation"] == 0.0


def test_points_that_masks_leave_out_do_not_count(plane) -> None:
    kept = np.zeros((HEIGHT, WIDTH), dtype=bool)
    kept[:, :4] = True
    every = surface_points([plane / "a.png"], cameras(), CaptureGroundTruth(plane), SCALE, 1)
    some = surface_points([plane / "a.png"], cameras(), CaptureGroundTruth(plane), SCALE, 1, lambda index: kept)
    assert every is not None and some is not None
    assert len(some.points) == len(every.points) * 4 // WIDTH and set(some.labels) == {1}

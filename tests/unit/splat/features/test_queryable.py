"""Splats with features answer as fields do: pictures strip by strip, points, checkpoints, and the viewer's panel."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox

from f3rm_ext.data.image_datamanager import ImageDataManagerConfig
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.engine import checkpoint
from f3rm_ext.errors import ConfigError, FeatureStoreError
from f3rm_ext.export.cloud import HasDensity
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import Queryable, score_image, score_points
from f3rm_ext.splat.features import queryable, rendering
from f3rm_ext.splat.features.heads import LiftedHead, save_lifted
from f3rm_ext.splat.model import SplatModel
from f3rm_ext.splat.rendering import composite

DIM = 7


@pytest.fixture
def model(make_splat_model: Callable[..., SplatModel], make_spec: Callable[..., Any]) -> SplatModel:
    """Two features on 60 Gaussians."""
    made = make_splat_model()
    generator = torch.Generator().manual_seed(5)
    for name, dim in (("first", DIM), ("second", 5)):
        made.lifted.add(LiftedHead(make_spec(name, dim), torch.randn(60, dim, generator=generator).half()))
    return made


@pytest.fixture
def camera(ring_cameras: Callable[..., Any]) -> Any:
    return ring_cameras()[1:2]


def query(head: str, dim: int) -> Query:
    unit = torch.nn.functional.normalize(torch.randn(1, dim, generator=torch.Generator().manual_seed(1)), dim=1)
    empty = Embeddings(torch.zeros(0, dim), ())
    return Query("thing", head, Embeddings(unit, ("thing",)), empty)


def whole(model: SplatModel, camera: Any, name: str) -> torch.Tensor:
    """A feature in the picture, drawn at once."""
    codes = model.query_heads()[name].codes.float()
    return composite(model._scene(), PinholeCameras.of(camera), codes)


def test_protocols(model: SplatModel, make_splat_model: Any, camera: Any) -> None:
    assert isinstance(model, Queryable) and not isinstance(model, HasDensity)
    assert list(model.query_heads()) == ["first", "second"]
    plain = make_splat_model()
    assert plain.query_heads() == {} and "feature_pca" not in plain.get_outputs_for_camera(camera)
    with pytest.raises(ConfigError, match="features lift"):
        score_image(plain, camera, [query("", DIM)])


def test_pictures_of_features(model: SplatModel, camera: Any) -> None:
    outputs = model.get_outputs_for_camera(camera)
    for name, key in (("first", "feature_pca"), ("second", "feature_pca_second")):
        wanted = model.query_heads()[name].colors(whole(model, camera, name))
        torch.testing.assert_close(outputs[key], wanted, atol=1e-4, rtol=1e-3)
        assert wanted.std() > 0.05


@pytest.mark.parametrize("strip_numbers", [1, 1 << 25])
def test_scores_of_a_picture(
    model: SplatModel, camera: Any, strip_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strips of 16 rows, or one; slices of 3 channels; both give what the whole picture has."""
    monkeypatch.setattr(rendering, "STRIP_NUMBERS", strip_numbers)
    monkeypatch.setattr(rendering, "CHANNELS", 3)
    strips = model.render_features(camera).strips()
    assert strips == ([(0, 16), (16, 24)] if strip_numbers == 1 else [(0, 24)])
    asked = query("first", DIM)
    scores, outputs = score_image(model, camera, [asked])
    wanted = torch.nn.functional.cosine_similarity(whole(model, camera, "first"), asked.positives.values[0], dim=-1)
    solid = outputs["accumulation"][..., 0] > 0.05
    torch.testing.assert_close(scores[..., 0][solid], wanted[solid], atol=1e-3, rtol=1e-3)
    assert solid.sum() > 50 and scores[solid].std() > 0.1


def test_no_more_than_a_strip_of_features_is_there_at_a_time(
    model: SplatModel, camera: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "STRIP_NUMBERS", 1)
    sizes: list[tuple[int, ...]] = []

    def look(_: Any, rendered_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
        sizes.append(tuple(rendered_of("first").shape))
        assert rendered_of("first") is rendered_of("first")
        return rendered_of("first")[:, :1]

    outputs = model.render_camera(camera, {"one": look, "none": lambda *_: None})
    assert sizes == [(16 * 32, DIM), (8 * 32, DIM)]
    assert outputs["one"].shape == (24, 32, 1) and "none" not in outputs
    torch.testing.assert_close(outputs["one"], whole(model, camera, "first")[..., :1], atol=1e-4, rtol=1e-3)


def test_depth_for_questions_is_along_the_ray(model: SplatModel, camera: Any) -> None:
    along, axis = model.render_camera(camera, {}), model.get_outputs_for_camera(camera)
    rays = camera.generate_rays(camera_indices=0, keep_shape=True)
    forward = -camera.camera_to_worlds[0, :3, 2]
    cosine = (rays.directions @ forward)[..., None]
    torch.testing.assert_close(along["depth"] * cosine, axis["depth"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(along["expected_depth"], along["depth"])
    assert (along["depth"] - axis["depth"]).max() > 0.02


def test_what_lies_outside_the_box_is_not_asked(model: SplatModel, camera: Any) -> None:
    box = OrientedBox(torch.eye(3), torch.tensor([5.0, 0, 0]), torch.tensor([10.0, 10.0, 10.0]))
    inside = model.gaussians.means[:, 0] > 0
    assert 10 < inside.sum() < 50
    seen = model.render_camera(camera, {"codes": lambda _, of: of("first")}, box)["codes"]
    heads = {name: head.select(torch.ones(60, dtype=torch.bool)) for name, head in model.query_heads().items()}
    for head in heads.values():
        head.codes[~inside] = 0
        model.lifted.add(head)
    model.gauss_params["opacities"].data[~inside] = -30
    torch.testing.assert_close(seen, whole(model, camera, "first"), atol=1e-4, rtol=1e-3)


def test_features_at_points(model: SplatModel) -> None:
    means = model.gaussians.means.detach()
    points = torch.cat([means[:5] + 0.01, torch.tensor([[9.0, 9.0, 9.0]])])
    found = model.render_points(points)
    assert found["first"].shape == (6, DIM) and found["second"].shape == (6, 5) and found["first"].isfinite().all()
    _, _, sizes, alphas = model._scene().shapes()
    near = (points[0] - means).norm(dim=1).argsort()[:16]
    shares = torch.zeros(len(near), 1)
    for share, index in zip(shares, near.tolist(), strict=True):
        turned = model.gaussians.rotations()[index].T @ (points[0] - means[index]) / sizes[index]
        share[0] = (alphas[index] * torch.exp(-0.5 * turned.square().sum())).detach()
    wanted = (shares * model.query_heads()["first"].codes[near].float()).sum(dim=0) / shares.sum()
    torch.testing.assert_close(found["first"][0], wanted, atol=1e-3, rtol=1e-3)
    scores = score_points(model, points, [query("first", DIM)])
    assert scores.shape == (6, 1) and scores.std() > 0.05


def test_the_nearest_follow_the_gaussians(model: SplatModel) -> None:
    before = model.render_points(torch.zeros(1, 3))["first"]
    with torch.no_grad():
        model.gauss_params["means"].copy_(model.gauss_params["means"].flip(0))
    assert (model.render_points(torch.zeros(1, 3))["first"] - before).abs().max() > 1e-3


def test_other_gaussians_have_no_features(model: SplatModel, begin_training: Any) -> None:
    copied = io.BytesIO()
    torch.save(model.state_dict(), copied)
    begin_training(model)
    assert model.query_heads() == {}, "training goes on"
    copied.seek(0)
    model.load_state_dict(torch.load(copied, weights_only=True))
    assert model.query_heads()
    model.set_gaussians(model.gaussians[:10])
    assert model.query_heads() == {}


def test_features_are_added_to_a_checkpoint(
    model: SplatModel, make_splat_model: Any, make_spec: Any, camera: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "nerfstudio_models" / "step-000000007.ckpt"
    path.parent.mkdir(parents=True)
    state = {f"_model.{name}": value for name, value in model.state_dict().items()}
    checkpoint.write({"step": 7, "pipeline": state, "optimizers": {"means": {"lr": 0.5}}}, path)
    other = make_splat_model()
    groups = torch.arange(60, dtype=torch.int32) % 4
    other.lifted.add(LiftedHead(make_spec("third", 4), torch.ones(60, 4).half(), groups))
    save_lifted(other.lifted, path)
    written = checkpoint.load(path)
    assert written["step"] == 7 and written["optimizers"] == {"means": {"lr": 0.5}}
    fresh = make_splat_model()
    fresh.load_state_dict({name.removeprefix("_model."): value for name, value in written["pipeline"].items()})
    assert list(fresh.query_heads()) == ["third"] and (fresh.query_heads()["third"].codes == 1).all()
    points = fresh.grouped_points("third")
    assert points is not None and torch.equal(points.groups, groups) and fresh.grouped_points("first") is None
    about = json.loads(written["pipeline"]["_model._extra_state"]["about"])
    assert about["extent"] == model.extent
    torch.testing.assert_close(fresh.gaussians.means, model.gaussians.means)
    fresh.load_state_dict(model.state_dict())
    ours, theirs = ([head.spec.identity for head in one.query_heads().values()] for one in (fresh, model))
    assert ours == theirs
    torch.testing.assert_close(whole(fresh, camera, "second"), whole(model, camera, "second"))
    fresh.load_state_dict(make_splat_model().state_dict())
    assert fresh.query_heads() == {}


@pytest.mark.parametrize("box", [None, OrientedBox(torch.eye(3), torch.tensor([5.0, 0, 0]), torch.full((3,), 10.0))])
def test_pictures_of_groups(
    model: SplatModel, make_spec: Any, camera: Any, box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queryable, "CHANNELS", 3)
    inside = torch.ones(60, dtype=torch.bool) if box is None else model.gaussians.means[:, 0] > 0
    groups = torch.arange(60, dtype=torch.int32) % 8 - 1
    model.lifted.add(LiftedHead(make_spec("first", DIM), model.query_heads()["first"].codes, groups))
    marks = torch.nn.functional.one_hot(groups.long() + 1, 8)[:, 1:].float() * inside[:, None]
    if box is not None:
        model.gauss_params["opacities"].data[~inside] = -30
    model.queries.sync()
    shares = composite(model._scene(), PinholeCameras.of(camera), marks)
    found, (most, number) = model.group_map(camera, "first", box), shares.max(dim=-1)
    np.testing.assert_array_equal(found, torch.where(most > 0.2, number, -1).numpy())
    assert len(np.unique(found)) > 4
    assert "group" not in model.get_outputs_for_camera(camera, box)
    model.queries.store.change(lambda state: replace(state, group=("first", 2)))
    outputs = model.get_outputs_for_camera(camera, box)
    hot = outputs["group"][..., 0] - outputs["group"][..., 2]
    lit = shares[..., 2] > 0.6
    assert lit.any() and float(hot[lit].min()) > float(hot[shares[..., 2] < 0.4].max())


def test_a_box_without_gaussians_shows_no_group(model: SplatModel, make_spec: Any, camera: Any) -> None:
    codes = model.query_heads()["first"].codes
    model.lifted.add(LiftedHead(make_spec("first", DIM), codes, torch.zeros(60, dtype=torch.int32)))
    nowhere = OrientedBox(torch.eye(3), torch.full((3,), 50.0), torch.ones(3))
    assert (model.group_map(camera, "first", nowhere) == -1).all()


def test_metrics_of_features(model: SplatModel, camera: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the picture's own features they are perfect; against others they are what they are."""
    monkeypatch.setattr(rendering, "STRIP_NUMBERS", 1)
    seen = whole(model, camera, "first")
    grid = PatchGrid.covering(24, 32, 24, 32)
    own = FeatureMap(seen.numpy().astype(np.float16), grid)
    metrics = model.feature_metrics({"camera": camera, "feature_maps": {"first": own}})
    empty = (seen.norm(dim=-1) == 0).float().mean()
    assert set(metrics) == {"feature_cosine_first", "feature_mse_first"}
    assert metrics["feature_cosine_first"] == pytest.approx(float(1 - empty), abs=5e-3)
    assert metrics["feature_mse_first"] < 1e-4
    other = replace(own, values=np.ascontiguousarray(own.values[::-1]))
    metrics = model.feature_metrics({"camera": camera, "feature_maps": {"first": other}})
    flipped = seen.flip(0)
    wanted = torch.nn.functional.cosine_similarity(seen, flipped, dim=-1).mean()
    assert metrics["feature_cosine_first"] == pytest.approx(float(wanted), abs=5e-3)
    assert metrics["feature_mse_first"] == pytest.approx(float((seen - flipped).square().mean()), rel=0.02)
    assert model.feature_metrics({"camera": camera}) == {}


class Broken(queryable.FeatureSource):
    """2D features in a damaged store."""

    def __init__(self, spec: Any, error: Exception | None = None) -> None:
        self.specs, self.error = (spec,), error

    def load(self, index: int) -> Any:
        raise self.error or FeatureStoreError("The shard x is damaged: run y.")


def test_a_failure_at_the_end_does_not_cost_the_training(
    model: SplatModel, make_spec: Any, tiny_capture: Path, capsys: pytest.CaptureFixture
) -> None:
    dataset = ImageDataManagerConfig(data=tiny_capture).setup(device="cpu", test_mode="test").train_dataset
    source = Broken(make_spec("first", DIM))
    model.lift_features(dataset, source)
    log = " ".join(capsys.readouterr().out.split())
    assert "The shard x is damaged: run y." in log and "features lift" in log and model.query_heads() == {}
    with pytest.raises(FeatureStoreError):
        model.lift_features(dataset, source, required=True)
    full = Broken(make_spec("first", DIM), torch.cuda.OutOfMemoryError("CUDA out of memory."))
    model.lift_features(dataset, full)
    assert "out of memory" in capsys.readouterr().out and model.query_heads() == {}
    with pytest.raises(RuntimeError, match="other"):
        model.lift_features(dataset, Broken(make_spec("first", DIM), RuntimeError("other")))


def test_the_viewers_panel(model: SplatModel, camera: Any) -> None:
    """Relevancy, overlay and labels come with a query, and colours of features with a refit."""
    plain = model.get_outputs_for_camera(camera)
    assert "relevancy" not in plain
    store = model.queries.store
    asked = query("first", DIM)
    store.resolve(store.new_request(), lambda state: state.set_live(asked))
    store.change(lambda state: state.add_named(asked))
    outputs = model.get_outputs_for_camera(camera)
    assert outputs["relevancy"].shape == (24, 32, 1) and outputs["relevancy"].max() > 0.1
    assert outputs["relevancy_overlay"].shape == outputs["labels"].shape == (24, 32, 3)
    torch.testing.assert_close(outputs["rgb"], plain["rgb"])

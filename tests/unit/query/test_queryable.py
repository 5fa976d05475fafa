"""Scores of images and points against scores computed from full features in float64."""

from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import Queryable, Scorer, get_head, score_image, score_points
from f3rm_ext.query.relevancy import relevancy_reference

HEIGHT, WIDTH = 7, 9


def vectors(count: int, dim: int, seed: int) -> Embeddings:
    given = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return Embeddings.from_full(given, [f"{seed}.{i}" for i in range(count)])


def cosine_query(dim: int = 40, seed: int = 0, head: str = "toy", count: int = 1) -> Query:
    return Query("cosine", head, vectors(count, dim, seed), Embeddings.empty(dim))


def relevancy_query(dim: int = 40, seed: int = 10, head: str = "toy") -> Query:
    return Query("relevancy", head, vectors(2, dim, seed), vectors(3, dim, seed + 1), 0.2)


def expected_score(features: torch.Tensor, query: Query) -> torch.Tensor:
    unit = features / features.norm(dim=-1, keepdim=True)
    positive = unit @ query.positives.values.double().T
    if not query.is_relevancy:
        return positive.amax(dim=-1)
    return relevancy_reference(positive, unit @ query.negatives.values.double().T, query.temperature)


def directions(camera: Cameras) -> torch.Tensor:
    return camera.generate_rays(camera_indices=0, keep_shape=True).directions


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


def test_queries_of_several_features_keep_their_order(make_field, make_head, camera) -> None:
    field = make_field(make_head("a", 40), make_head("b", 5, 3))
    queries = [
        cosine_query(5, 1, "b"),
        relevancy_query(40, 2, "a"),
        relevancy_query(5, 3, "b"),
        cosine_query(40, 4, "a"),
    ]
    scores, outputs = score_image(field, camera, queries)
    assert scores.shape == (HEIGHT, WIDTH, 4) and set(outputs) == {"rgb"}
    for index, query in enumerate(queries):
        features = field.features(query.head, directions(camera))
        torch.testing.assert_close(scores[..., index].double(), expected_score(features, query), atol=5e-6, rtol=0)
    assert Scorer.from_model(field, queries).heads == ("b", "a")


def test_an_empty_name_is_the_primary_feature(make_field, make_head, camera) -> None:
    field = make_field(make_head("a", 40), make_head("b", 40, 3))
    unnamed, _ = score_image(field, camera, [cosine_query(head="")])
    named, _ = score_image(field, camera, [cosine_query(head="a")])
    assert torch.equal(unnamed, named)


def test_unknown_features_are_refused(make_field, camera) -> None:
    with pytest.raises(ConfigError, match=r"'clip'.*toy"):
        score_image(make_field(), camera, [cosine_query(head="clip")])
    with pytest.raises(ConfigError, match="no distilled features"):
        get_head({}, "clip")


@pytest.mark.parametrize("part", ["positives", "negatives"])
def test_vectors_of_other_dimensions_are_refused(make_field, camera, part) -> None:
    right, wrong = vectors(1, 40, 0), vectors(1, 7, 0)
    query = Query("cup", "toy", wrong if part == "positives" else right, wrong if part == "negatives" else right)
    with pytest.raises(ConfigError, match=r"'cup'.* 7 .*'toy'.*40"):
        score_image(make_field(), camera, [query])


def test_memory_does_not_grow_with_the_dimension(make_model, make_spec, make_camera) -> None:
    """Of a real field; vectors are brought into the few coordinates of rendered values once, before any ray."""

    def largest(dim: int, **options: Any) -> int:
        model = make_model((make_spec(dim=dim),), eval_num_rays_per_chunk=64, backend="torch", **options).eval()
        scorer = Scorer.from_model(model, [relevancy_query(dim, head="dense")])
        with Largest() as seen:
            outputs = model.render_camera(make_camera(24), {"scores": lambda _, rendered_of: scorer(rendered_of)})
        assert outputs["scores"].shape == (24, 24, 1)
        return seen.numel

    assert largest(16) == largest(768) < 64 * 768
    assert largest(768, output_features=True) >= 24**2 * 768, "kept features would be seen"


def test_scores_may_be_changed_in_place(make_field, camera) -> None:
    scores, outputs = score_image(make_field(), camera, [cosine_query()])
    scores.mul_(2.0)
    outputs["rgb"].clamp_(0.0, 0.5)


@pytest.mark.parametrize("dim", [5, 200])
def test_scores_of_a_model_are_those_of_its_decoded_features(make_model, make_spec, make_camera, dim) -> None:
    model = make_model((make_spec(dim=dim),), output_features=True).eval()
    queries = [relevancy_query(dim, head="dense"), cosine_query(dim, head="dense")]
    scores, outputs = score_image(model, make_camera(6), queries)
    for index, query in enumerate(queries):
        expected = expected_score(outputs["feature"].double(), query)
        torch.testing.assert_close(scores[..., index].double(), expected, atol=1e-5, rtol=0)
    scores.zero_()
    points = torch.rand(11, 3, generator=torch.Generator().manual_seed(0)) - 0.5
    with torch.no_grad():
        features = model.feature_field.head("dense").decode(model.render_points(points)["dense"].clone()).double()
    expected = expected_score(features, queries[0])
    torch.testing.assert_close(
        score_points(model, points, queries, chunk=4)[:, 0].double(), expected, atol=1e-5, rtol=0
    )


def test_a_model_is_queryable(make_model, make_spec) -> None:
    assert isinstance(make_model((make_spec(),)), Queryable)
    assert not isinstance(torch.nn.Linear(2, 2), Queryable)

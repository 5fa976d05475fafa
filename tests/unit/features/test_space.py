"""Comparison in few dimensions against the full space, in float64."""

import pytest
import torch

from f3rm_ext.features.space import RAYS_AT_ONCE, FeatureSpace


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cosines(space: FeatureSpace, rendered: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Each vector is a group of its own."""
    return space.best_cosines(rendered, vectors, range(len(vectors) + 1))


def unit(values: torch.Tensor) -> torch.Tensor:
    return values / values.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("dim", "hidden"), [(768, 64), (384, 64), (65, 64), (64, 64), (16, 64), (3, 8), (1, 1)])
def test_cosines_are_those_of_the_full_features(dim: int, hidden: int) -> None:
    weight, rendered, queries = random(dim, hidden), random(50, hidden, seed=1), unit(random(7, dim, seed=2))
    space = FeatureSpace.from_linear_map(weight)
    expected = unit(rendered.double() @ weight.double().T) @ unit(queries.double()).T
    torch.testing.assert_close(cosines(space, rendered, queries).double(), expected, atol=1e-6, rtol=0)
    assert space.coordinates(rendered).shape[-1] == min(dim, hidden)


def test_norms_and_inner_products_are_kept() -> None:
    weight, rendered, vectors = random(200, 16), random(9, 16, seed=1), random(3, 200, seed=2)
    space = FeatureSpace.from_linear_map(weight)
    features, at = rendered @ weight.T, space.coordinates(rendered)
    torch.testing.assert_close(at.norm(dim=-1), features.norm(dim=-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(at @ space.project(vectors).T, features @ vectors.T, rtol=1e-4, atol=1e-3)


def test_weights_of_low_rank_are_no_trouble() -> None:
    weight = random(100, 1) @ random(1, 8, seed=1)
    rendered, queries = random(20, 8, seed=2), unit(random(2, 100, seed=3))
    expected = unit(rendered.double() @ weight.double().T) @ queries.double().T
    found = cosines(FeatureSpace.from_linear_map(weight), rendered, queries)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


def test_features_as_they_are() -> None:
    features, queries = random(5, 12), unit(random(3, 12, seed=1))
    found = cosines(FeatureSpace.of_features(), features, queries)
    torch.testing.assert_close(found, unit(features) @ queries.T)


def test_codes_with_residual_have_the_cosine_of_the_full_space() -> None:
    """Of a query in the span of the basis, for which codes are exact."""
    rows = torch.linalg.qr(random(40, 8).double())[0].T
    full = random(30, 40, seed=1).double()
    codes = full @ rows.T
    residual = (full - codes @ rows).norm(dim=-1, keepdim=True)
    query = unit(random(2, 8, seed=2))
    space = FeatureSpace.from_residual_codes(8)
    found = cosines(space, torch.cat([codes, residual], dim=-1).float(), query)
    torch.testing.assert_close(found.double(), unit(full) @ (query.double() @ rows).T, atol=1e-6, rtol=0)


def test_what_codes_leave_out_scales_rendered_cosines_alike() -> None:
    weight, rendered, queries = random(10, 4), random(6, 4, seed=1), unit(random(2, 10, seed=2))
    whole = cosines(FeatureSpace.from_linear_map(weight), rendered, queries)
    part = cosines(FeatureSpace.from_linear_map(weight, energy=0.81), rendered, queries)
    torch.testing.assert_close(part, 0.9 * whole)


def test_the_most_similar_vector_of_a_group_counts() -> None:
    rendered = random(2 * RAYS_AT_ONCE + 3, 5)
    space, vectors = FeatureSpace.of_features(), unit(random(6, 5, seed=1))
    single = cosines(space, rendered, vectors)
    wanted = torch.stack([single[:, :2].amax(1), single[:, 2], single[:, 3:].amax(1)], dim=1)
    torch.testing.assert_close(space.best_cosines(rendered, vectors, [0, 2, 3, 6]), wanted)


def test_zero_features_are_like_nothing() -> None:
    space = FeatureSpace.from_linear_map(random(30, 4))
    found = cosines(space, torch.zeros(2, 4), unit(random(3, 30)))
    assert not found.any() and found.isfinite().all()
    assert not cosines(FeatureSpace.from_linear_map(torch.zeros(30, 4)), torch.ones(2, 4), unit(random(3, 30))).any()


def test_cosines_never_exceed_one() -> None:
    weight = 1e3 * random(500, 8)
    rendered = random(2000, 8, seed=1)
    features = unit(rendered @ weight.T)
    found = cosines(FeatureSpace.from_linear_map(weight), rendered, features[:50])
    assert float(found.max()) <= 1.0 and float(found.min()) >= -1.0
    torch.testing.assert_close(found[range(50), range(50)], torch.ones(50), atol=1e-5, rtol=0)


def test_half_precision_values_are_compared_in_single_precision() -> None:
    weight, rendered, queries = random(30, 8), random(9, 8, seed=1).half(), unit(random(2, 30, seed=2))
    space = FeatureSpace.from_linear_map(weight)
    found = cosines(space, rendered, queries)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, cosines(space, rendered.float(), queries))


def test_no_gradient_is_kept() -> None:
    weight = random(10, 4).requires_grad_()
    space = FeatureSpace.from_linear_map(weight)
    assert not cosines(space, random(3, 4), unit(random(2, 10))).requires_grad


def test_moving_keeps_what_it_is() -> None:
    space = FeatureSpace.from_linear_map(random(10, 4), energy=0.5).to("meta")
    assert space.energy == 0.5
    assert space.basis is not None and space.transform is not None
    assert space.basis.device.type == space.transform.device.type == "meta"
    assert FeatureSpace.of_features().to("meta").basis is None

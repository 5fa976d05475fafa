"""The panel's outputs: what they show, where, and what happens when one fails."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.features.space import FeatureSpace
from f3rm_ext.features.spec import DisplayBasis
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.utils.colormaps import OTHER_GREY, heat_overlay, label_table
from f3rm_ext.viewer import outputs as panel_outputs
from f3rm_ext.viewer.outputs import RefittedColors, extra_outputs
from f3rm_ext.viewer.state import QueryState


@pytest.fixture
def failures() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def show(toy: Any, directions: Tensor, failures: list) -> Callable[[QueryState], dict[str, Tensor]]:
    """What the model renders along the rays to mug, book and nothing."""
    guard = OutputGuard(lambda name, error: failures.append((name, str(error))))
    return lambda state: toy.render(directions, extra_outputs(toy, state, guard))


def test_relevancy_is_high_where_the_thing_is_and_nowhere_else(show, query_for) -> None:
    shown = show(QueryState().set_live(query_for("mug")))["relevancy"]
    norm = 1.01**0.5
    expected = [1 / (1 + math.exp(-x / norm / 0.1)) for x in (1.0, 0.1)]
    assert shown[:, 0].tolist() == pytest.approx([*expected, 0.0], abs=1e-6)


def test_without_negatives_it_is_the_cosine_and_never_below_zero(show) -> None:
    vectors = Embeddings.from_full(torch.tensor([[1.0, -1.0, 0.0]]), ["mug, not book"])
    shown = show(QueryState().set_live(Query("q", "toy", vectors, Embeddings.empty(3))))["relevancy"]
    assert shown[:, 0].tolist() == pytest.approx([0.9 / 2**0.5 / 1.01**0.5, 0.0, 0.0], abs=1e-6)


def test_the_overlay_is_hot_where_the_thing_is(show, query_for) -> None:
    state = replace(QueryState().set_live(query_for("mug")), threshold=0.9)
    plain, hot = show(QueryState()), show(state)
    assert torch.equal(plain["relevancy_overlay"], plain["rgb"]), "without a query it is the picture"
    mug, book, _ = hot["relevancy_overlay"]
    assert float(mug.max() - mug.min()) > 0.4 > 0.2 > float(book.max() - book.min())
    shown = heat_overlay(hot["rgb"], hot["relevancy"][:, 0], 0.9, 1.0)
    assert torch.equal(hot["relevancy_overlay"], shown), "the colours of files whose heat runs from the threshold to 1"


def test_labels_are_the_best_named_query_or_other(show, query_for) -> None:
    state = QueryState().add_named(query_for("book")).add_named(query_for("mug"))
    table = label_table(2)
    assert torch.equal(show(state)["labels"], table[[1, 0, 2]])
    assert torch.equal(show(replace(state, threshold=1.0))["labels"], table[[2, 2, 2]])
    assert torch.equal(show(QueryState())["labels"], torch.full((3, 3), OTHER_GREY))


def test_queries_of_several_features_share_a_label_map(make_toy, query_for, directions) -> None:
    model = make_toy("toy", "second")
    state = QueryState().add_named(query_for("mug")).add_named(query_for("book", head="second"))
    shown = model.render(directions, extra_outputs(model, state, OutputGuard()))["labels"]
    assert torch.equal(shown, label_table(2)[[0, 1, 2]])


def test_a_model_without_features_gets_no_outputs(toy, query_for) -> None:
    toy.heads.clear()
    assert extra_outputs(toy, QueryState().set_live(query_for("mug")), OutputGuard()) == {}


def test_an_output_that_fails_is_left_out_with_what_needs_it(show, query_for, failures, monkeypatch) -> None:
    def broken(*_: object) -> Tensor:
        raise ZeroDivisionError("broken on purpose")

    state = QueryState().set_live(query_for("mug")).add_named(query_for("mug"))
    with monkeypatch.context() as patch:
        patch.setattr(panel_outputs, "_relevancy", broken)
        shown = show(state)
    assert shown["relevancy"] is None and shown["relevancy_overlay"] is None
    assert shown["labels"].shape == (3, 3) and shown["rgb"].shape == (3, 3)
    assert failures == [("relevancy", "broken on purpose")]


def test_the_viewers_interrupt_passes_through(show, query_for, monkeypatch) -> None:
    from nerfstudio.viewer_legacy.server.viewer_utils import IOChangeException

    def interrupted(*_: object) -> Tensor:
        raise IOChangeException

    monkeypatch.setattr(panel_outputs, "_relevancy", interrupted)
    with pytest.raises(IOChangeException):
        show(QueryState().set_live(query_for("mug")))


def test_colors_of_the_stored_basis_are_the_heads_own(make_model, make_spec) -> None:
    spec = make_spec("dense", 12)
    head = make_model((spec,)).feature_field.head("dense")
    hidden = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    # Within the field's reach both are the same; what of the mean lies outside is subtracted in both.
    assert torch.allclose(RefittedColors(head.space(), spec.display)(hidden), head.display(hidden), atol=1e-5)


def test_refitted_colors_take_the_place_of_the_stored_ones(toy, directions) -> None:
    basis = DisplayBasis(torch.zeros(3), torch.eye(3), torch.zeros(3), torch.full((3,), 2.0))
    state = replace(QueryState(), displays={"toy": basis})
    shown = toy.render(directions, extra_outputs(toy, state, OutputGuard()))
    assert shown["feature_pca"][0].tolist() == pytest.approx([0.5, 0.05, 0.0])
    assert "feature_pca" not in toy.render(directions, extra_outputs(toy, QueryState(), OutputGuard()))


def test_colors_of_rendered_features_need_no_linear_map() -> None:
    basis = DisplayBasis(torch.ones(3), torch.eye(3), torch.full((3,), -1.0), torch.ones(3))
    shown = RefittedColors(FeatureSpace.of_features(), basis)(torch.tensor([[1.0, 2.0, 9.0]]))
    assert shown.tolist() == [[0.5, 1.0, 1.0]]

"""The outputs the panel adds to a rendered picture, chunk of rays by chunk of rays."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.features.space import ExtraOutput, FeatureSpace, RenderedOf
from f3rm_ext.features.spec import DisplayBasis
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.query.queryable import Queryable, Scorer
from f3rm_ext.query.relevancy import OTHER, label_map
from f3rm_ext.utils.colormaps import heat_overlay, label_colors
from f3rm_ext.viewer.picking import SOLID
from f3rm_ext.viewer.state import QueryState

RELEVANCY, OVERLAY, LABELS, FEATURE_COLORS = "relevancy", "relevancy_overlay", "labels", "feature_pca"


def extra_outputs(model: Queryable, questions: QueryState, guard: OutputGuard) -> dict[str, ExtraOutput]:
    """All of the panel's outputs for one picture; where nothing is asked they say so by what they show.

    Args:
        model: the model; its parameters must not change until the picture is done.
        questions: what is asked.
        guard: takes the exceptions: an output that fails is left out of the picture.

    Returns:
        ``relevancy`` (1 channel, 0 to 1: with no negatives it is the cosine, and 0 below 0), ``relevancy_overlay`` (3),
        ``labels`` (3) and, where its colours were refitted, ``feature_pca`` (3) in place of the model's own.
    """
    heads = model.query_heads()
    if not heads:
        return {}
    live = None if questions.live is None else Scorer.of_model(model, [questions.live])
    named = Scorer.of_model(model, questions.named) if questions.named else None
    plain: dict[str, ExtraOutput] = {
        RELEVANCY: lambda outputs, of: _relevancy(outputs, of, live),
        OVERLAY: lambda outputs, _: _overlay(outputs, questions.threshold, asked=live is not None),
        LABELS: lambda outputs, of: _labels(outputs, of, named, questions.threshold),
    }
    for index, (name, head) in enumerate(heads.items()):
        if (display := questions.displays.get(name)) is not None:
            colors = Colors(head.space().to(model.device), display)
            suffix = f"_{name}" if index else ""
            plain[FEATURE_COLORS + suffix] = lambda _, of, name=name, colors=colors: colors(of(name))
    return {name: _guarded(name, compute, guard) for name, compute in plain.items()}


class Colors:
    """Rendered values as colours, by a projection of the distilled space.

    Args:
        space: of the rendered values.
        display: the projection; taken to the device of the space.
    """

    def __init__(self, space: FeatureSpace, display: DisplayBasis) -> None:
        device = next((part.device for part in (space.transform, space.basis) if part is not None), display.mean.device)
        mean, components, self._low, high = (
            part.to(device) for part in (display.mean, display.components, display.low, display.high)
        )
        self._space, self._components = space, space.project(components)
        self._middle = components @ mean
        self._range = high - self._low

    def __call__(self, rendered: Float[Tensor, "rays hidden"]) -> Float[Tensor, "rays 3"]:
        """RGB, 0 to 1."""
        value = self._space.coordinates(rendered) @ self._components.T - self._middle
        return ((value - self._low) / self._range).clamp(0.0, 1.0)


def _guarded(name: str, compute: ExtraOutput, guard: OutputGuard) -> ExtraOutput:
    def run(outputs: Mapping[str, Tensor], rendered_of: RenderedOf) -> Tensor | None:
        kept: dict[str, Tensor | None] = {}
        guard.add(kept, name, lambda: compute(outputs, rendered_of))
        return kept.get(name)

    return run


def _solid(outputs: Mapping[str, Tensor]) -> Tensor:
    """Which rays meet something: where nothing is, features are next to zero, and their direction means nothing."""
    return outputs["accumulation"] >= SOLID


def _relevancy(outputs: Mapping[str, Tensor], rendered_of: RenderedOf, scorer: Scorer | None) -> Tensor:
    if scorer is None:
        return torch.zeros_like(outputs["accumulation"])
    return torch.where(_solid(outputs), scorer(rendered_of), 0.0).clamp(0.0, 1.0)


def _overlay(outputs: Mapping[str, Tensor], threshold: float, asked: bool) -> Tensor | None:
    score = outputs.get(RELEVANCY)
    if not asked or score is None:
        return outputs["rgb"] if not asked else None
    return heat_overlay(outputs["rgb"], score[..., 0], threshold, 1.0)


def _labels(outputs: Mapping[str, Tensor], rendered_of: RenderedOf, scorer: Scorer | None, threshold: float) -> Tensor:
    solid = _solid(outputs)[:, 0]
    if scorer is None:
        return label_colors(torch.full_like(solid, OTHER, dtype=torch.int64), 0)
    labels = torch.where(solid, label_map(scorer(rendered_of), threshold), OTHER)
    return label_colors(labels, len(scorer.queries))

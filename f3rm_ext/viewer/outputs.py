"""The outputs that the panel adds to a rendered picture, computed chunk of rays by chunk of rays."""

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
GROUP = "group"
"""The output of models with groups that lights the one that was clicked."""


def extra_outputs(model: Queryable, state: QueryState, guard: OutputGuard) -> dict[str, ExtraOutput]:
    """Returns the functions that compute the panel's outputs for one picture.

    Without a live query ``relevancy`` is 0 and ``relevancy_overlay`` is the plain picture; without named queries
    ``labels`` is grey.

    Args:
        model: its parameters must not change until the picture is done.
        guard: handles exceptions; an output that fails is left out of the picture.

    Returns:
        By name: ``relevancy`` (1 channel, 0 to 1; for a query without negatives the cosine, with 0 for negative
        values), ``relevancy_overlay`` (3), ``labels`` (3) and, for heads whose colours were refitted, ``feature_pca``
        (3) in place of the model's own. Empty if the model has no features.
    """
    heads = model.query_heads()
    if not heads:
        return {}
    live = None if state.live is None else Scorer.from_model(model, [state.live])
    named = Scorer.from_model(model, state.named) if state.named else None
    computed: dict[str, ExtraOutput] = {
        RELEVANCY: lambda outputs, rendered_of: _relevancy(outputs, rendered_of, live),
        OVERLAY: lambda outputs, _: outputs["rgb"] if live is None else _overlay(outputs, state.threshold),
        LABELS: lambda outputs, rendered_of: _labels(outputs, rendered_of, named, state.threshold),
    }
    for index, (name, head) in enumerate(heads.items()):
        if (display := state.displays.get(name)) is not None:
            colors = RefittedColors(head.space(), display, model.device)
            suffix = f"_{name}" if index else ""
            computed[FEATURE_COLORS + suffix] = lambda _, rendered_of, name=name, colors=colors: colors(
                rendered_of(name)
            )
    return {name: _guard(name, compute, guard) for name, compute in computed.items()}


class RefittedColors:
    """Maps rendered features to colours by a projection of full features that was fitted to a view.

    Args:
        device: where features are rendered.
    """

    def __init__(self, space: FeatureSpace, display: DisplayBasis, device: torch.device | str = "cpu") -> None:
        space = space.to(device)
        mean, components, self._low, high = (
            part.to(device) for part in (display.mean, display.components, display.low, display.high)
        )
        self._space, self._components = space, space.project(components)
        self._offset = components @ mean
        self._range = high - self._low

    def __call__(self, rendered: Float[Tensor, "rays hidden"]) -> Float[Tensor, "rays 3"]:
        value = self._space.coordinates(rendered) @ self._components.T - self._offset
        return ((value - self._low) / self._range).clamp(0.0, 1.0)


def _guard(name: str, compute: ExtraOutput, guard: OutputGuard) -> ExtraOutput:
    def run(outputs: Mapping[str, Tensor], rendered_of: RenderedOf) -> Tensor | None:
        computed: dict[str, Tensor | None] = {}
        guard.add(computed, name, lambda: compute(outputs, rendered_of))
        return computed.get(name)

    return run


def _solid(outputs: Mapping[str, Tensor]) -> Tensor:
    """Which rays hit something. In empty space features are close to zero, so their direction means nothing."""
    return outputs["accumulation"] >= SOLID


def _relevancy(outputs: Mapping[str, Tensor], rendered_of: RenderedOf, scorer: Scorer | None) -> Tensor:
    if scorer is None:
        return torch.zeros_like(outputs["accumulation"])
    return torch.where(_solid(outputs), scorer(rendered_of), 0.0).clamp(0.0, 1.0)


def _overlay(outputs: Mapping[str, Tensor], threshold: float) -> Tensor | None:
    score = outputs.get(RELEVANCY)
    return None if score is None else heat_overlay(outputs["rgb"], score[..., 0], threshold, 1.0)


def _labels(outputs: Mapping[str, Tensor], rendered_of: RenderedOf, scorer: Scorer | None, threshold: float) -> Tensor:
    solid = _solid(outputs)[:, 0]
    if scorer is None:
        return label_colors(torch.full_like(solid, OTHER, dtype=torch.int64), 0)
    labels = torch.where(solid, label_map(scorer(rendered_of), threshold), OTHER)
    return label_colors(labels, len(scorer.queries))

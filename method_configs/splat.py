"""The methods `sugar-ext`, `sugar-ext-lite` and `sugar-ext-refine`: one factory, three presets."""

from typing import Any

from f3rm_ext.engine import services
from f3rm_ext.method_configs.guarded import guarded_splat_method, prepare_command

PRESETS = {
    "sugar-ext": "Gaussian splats aligned to surfaces, with mip filters.",
    "sugar-ext-lite": "The same, small: for the CPU and for small GPUs.",
}
REFINEMENT = {"sugar-ext-refine": "A mesh and flat Gaussians bound to its triangles, refined together."}
"""Presets that start from a mesh."""


def _save_edits(*args: Any) -> Any:
    from f3rm_ext.export.edits import save_edits

    return save_edits(*args)


def _clean_trained(*args: Any) -> Any:
    from f3rm_ext.export.clean import clean_trained

    return clean_trained(*args)


services.offer("save_edits", _save_edits)
services.offer("clean_trained", _clean_trained)
prepare_command()

sugar_ext = guarded_splat_method("sugar-ext", PRESETS["sugar-ext"])
sugar_ext_lite = guarded_splat_method("sugar-ext-lite", PRESETS["sugar-ext-lite"])
sugar_ext_refine = guarded_splat_method("sugar-ext-refine", REFINEMENT["sugar-ext-refine"])

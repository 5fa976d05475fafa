"""The methods in sizes that a test has time for, with all their levels, stages and losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trimesh
from torch import Tensor

from f3rm_ext.nerf.fields import GridOptions
from pretend.steps import Run, make_run
from pretend.tensors import PretendCuda

FIELDS = ("f3rm-ext", "f3rm-ext-lite", "f3rm-ext-big")
SPLATS = ("sugar-ext", "sugar-ext-lite")
REFINEMENT = "sugar-ext-refine"
MODES = ("none", "density", "sdf", "dn-consistency", "planar")

CASES = [(method, "none") for method in FIELDS] + [(method, mode) for method in SPLATS for mode in MODES]
CASES += [(REFINEMENT, "none")]
STEPS = {
    "none": (0, 600, 3000, 4001),
    "density": (7901, 9001, 9601),
    "sdf": (9601,),
    "dn-consistency": (9601,),
    "planar": (7001, 9001),
}
"""A step of each kind: the first, a round of densification, a reset of opacities, all harmonics; the entropy loss,
pruning, surfaces."""


def grids_of(model: Any) -> list[GridOptions]:
    """The options of a field's hash grids."""
    return [model.grid, model.feature_grid, *(proposal.grid for proposal in model.proposals)]


def small_field(config: Any) -> None:
    """Few rays and small tables; the grid in torch, as on a GPU without tiny-cuda-nn."""
    model = config.pipeline.model
    model.backend = "torch"
    for grid in grids_of(model):
        grid.log2_hashmap_size = 10
    model.num_samples = 6
    for proposal in model.proposals:
        proposal.num_samples = 8
    config.pipeline.datamanager.train_num_rays_per_batch = 16


def small_splats(mode: str, **densify: Any) -> Callable[[Any], None]:
    """A few hundred Gaussians and points."""

    def change(config: Any) -> None:
        model = config.pipeline.model
        model.num_random, model.regularization = 200, mode
        model.surface.samples = 300
        for name, value in densify.items():
            setattr(model.densify, name, value)
        config.pipeline.datamanager.num_downscales = 0
        config.max_num_iterations = 15_000

    return change


def small_refinement(config: Any) -> None:
    """A ball of 80 triangles, with four Gaussians on each."""
    path = Path(config.pipeline.datamanager.features.cache_dir) / "ball.ply"
    path.parent.mkdir(parents=True, exist_ok=True)
    trimesh.creation.icosphere(subdivisions=1, radius=0.5).export(path)
    model = config.pipeline.model
    model.mesh, model.mesh_frame, model.gaussians_per_triangle = path, "scene", 4


def small(method: str, mode: str = "none", **densify: Any) -> Callable[[Any], None]:
    """Makes the configuration of a method small."""
    if method == REFINEMENT:
        return small_refinement
    return small_field if method in FIELDS else small_splats(mode, **densify)


def on_cuda(values: Any) -> None:
    """Checks that all tensors of nested values are on the GPU, in single precision and finite."""
    if isinstance(values, dict):
        for value in values.values():
            on_cuda(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            on_cuda(value)
    elif isinstance(values, Tensor):
        assert isinstance(values, PretendCuda), values
        if values.is_floating_point():
            assert bool(torch.isfinite(values.cpu()).all())


def build(method: str, mode: str, capture: Path, folder: Path) -> Run:
    """A small run whose Gaussians all grow."""
    torch.manual_seed(0)
    return make_run(method, capture, folder, small(method, mode, grow_grad2d=1e-12))

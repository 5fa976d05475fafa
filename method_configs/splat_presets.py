"""What distinguishes the splatting methods; everything else is the configs' own defaults."""

from typing import Any

from f3rm_ext.data.image_datamanager import ImageDataManagerConfig
from f3rm_ext.engine.optimizers import FusedAdamOptimizerConfig, RunDecaySchedulerConfig
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.query.pipeline import FeaturePipelineConfig
from f3rm_ext.splat.densify import DensifyOptions
from f3rm_ext.splat.memory.adam import PackedAdamOptimizerConfig
from f3rm_ext.splat.model import SplatModelConfig
from f3rm_ext.splat.regularization.options import RegularizationOptions

LEARNING_RATES = {
    "means": 1.6e-4,
    "scales": 5e-3,
    "quats": 1e-3,
    "opacities": 5e-2,
    "features_dc": 2.5e-3,
    "features_rest": 2.5e-3 / 20,
}
"""Learning rates of 3DGS, as in splatfacto."""
BOUND_LEARNING_RATES = {
    "vertices": LEARNING_RATES["means"],
    "turns": LEARNING_RATES["quats"],
    **{name: LEARNING_RATES[name] for name in ("scales", "opacities", "features_dc", "features_rest")},
    **{f"free_{name}": LEARNING_RATES[name] for name in ("means", "scales", "quats")},
}
"""Learning rates of Gaussians bound to a mesh, as in SuGaR, and of those that are free."""


def make_splat_config(name: str) -> F3rmTrainerConfig:
    """The training configuration of a splatting method.

    Args:
        name: `sugar-ext`, `sugar-ext-lite` for the CPU and small GPUs, or `sugar-ext-refine`, which starts from a mesh.
    """
    lite, refine = name == "sugar-ext-lite", name == "sugar-ext-refine"
    model = SplatModelConfig(exposure="auto")
    manager = ImageDataManagerConfig()
    if lite:
        model = SplatModelConfig(
            num_random=8_000,
            exposure="auto",
            sh_degree=2,
            surface=RegularizationOptions(samples=20_000),
            # Among few Gaussians those that 3DGS removes as too large are walls, tables and backdrops.
            densify=DensifyOptions(max_gaussians=40_000, prune_scale3d=1.0),
        )
        manager = ImageDataManagerConfig(camera_res_scale_factor="auto", num_downscales=1, resolution_schedule=500)
    if refine:
        model = BoundModelConfig(exposure="auto")
        manager = ImageDataManagerConfig(num_downscales=0, stereo_points="never")  # it starts from a mesh
    optimizers: dict[str, Any] = {}
    for group, lr in (BOUND_LEARNING_RATES if refine else LEARNING_RATES).items():
        kind = PackedAdamOptimizerConfig if group == "features_rest" else FusedAdamOptimizerConfig
        optimizers[group] = {"optimizer": kind(lr=lr, eps=1e-15), "scheduler": None}
    # A short run moves as far as a long one only at higher rates.
    for group in ("vertices", "free_means") if refine else ("means",):
        places = optimizers[group]
        places["optimizer"].lr *= 5 if lite else 1
        places["scheduler"] = RunDecaySchedulerConfig(lr_final=places["optimizer"].lr / 100)
    optimizers["exposure"] = {
        "optimizer": FusedAdamOptimizerConfig(lr=2e-2, eps=1e-15),
        "scheduler": RunDecaySchedulerConfig(lr_final=2e-3),
    }
    return F3rmTrainerConfig(
        method_name=name,
        max_num_iterations=3000 if lite else 15_000,
        steps_per_eval_batch=0,
        steps_per_eval_image=0 if lite else 500,
        steps_per_eval_all_images=0,
        steps_per_save=500 if lite else 1000,
        mixed_precision=False,
        use_grad_scaler=False,
        pipeline=FeaturePipelineConfig(datamanager=manager, model=model),
        optimizers=optimizers,
        vis="viewer",
    )

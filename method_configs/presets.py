"""What distinguishes the three methods; everything else is the configs' own defaults."""

from typing import Any

from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.configs.base_config import MachineConfig
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig

from f3rm_ext.compat import default_device_type
from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.engine.optimizers import FusedAdamOptimizerConfig, RunDecaySchedulerConfig
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.model import F3rmModelConfig, ProposalOptions
from f3rm_ext.query.pipeline import FeaturePipelineConfig


def _model(name: str) -> F3rmModelConfig:
    if name == "f3rm-ext-lite":
        # Sizes chosen by measurement on two CPU cores: benchmarks/README.md.
        return F3rmModelConfig(
            grid=GridOptions(num_levels=8, features_per_level=4, max_res=1024, log2_hashmap_size=17),
            init_density="auto",
            contraction_radius="auto",
            num_samples=24,
            proposals=(ProposalOptions(num_samples=64, grid=GridOptions(5, 2, 16, 256, 17)),),
            proposal_warmup=1000,
            depth_loss_mult=0.05,
            exposure="auto",
            camera_optimizer=CameraOptimizerConfig(mode="off"),
            feature_grid=GridOptions(num_levels=8, features_per_level=4, max_res=128, log2_hashmap_size=17),
            feature_pe_frequencies=0,
            feature_samples_per_ray=4,
        )
    if name == "f3rm-ext-big":
        return F3rmModelConfig(
            exposure="auto",
            contraction_radius="auto",
            grid=GridOptions(max_res=4096, log2_hashmap_size=21),
            hidden_dim=128,
            color_hidden_dim=128,
            num_samples=64,
            proposals=(
                ProposalOptions(num_samples=512, grid=GridOptions(5, 2, 16, 512, 17)),
                ProposalOptions(num_samples=256, grid=GridOptions(7, 2, 16, 2048, 17)),
            ),
            feature_grid=GridOptions(num_levels=16, features_per_level=8, max_res=512),
            feature_hidden_dim=128,
        )
    return F3rmModelConfig(exposure="auto", contraction_radius="auto")


def _datamanager(name: str) -> F3rmDataManagerConfig:
    if name == "f3rm-ext-lite":
        return F3rmDataManagerConfig(
            # Small: in a run of minutes many steps teach more than large ones (benchmarks.md).
            camera_res_scale_factor="auto",
            train_num_rays_per_batch=1024,
            eval_num_rays_per_batch=1024,
            features=FeatureOptions(extractors=("dense-daisy",)),
            feature_ray_fraction=0.25,
        )
    if name == "f3rm-ext-big":
        return F3rmDataManagerConfig(
            train_num_rays_per_batch=8192,
            eval_num_rays_per_batch=4096,
            features=FeatureOptions(extractors=("clip", "dinov2")),
            feature_ray_fraction=0.5,
        )
    return F3rmDataManagerConfig(
        train_num_rays_per_batch=4096,
        eval_num_rays_per_batch=4096,
        features=FeatureOptions(extractors=("clip",)),
        feature_ray_fraction=0.5,
    )


def make_config(name: str) -> F3rmTrainerConfig:
    """The training configuration of a method.

    Args:
        name: `f3rm-ext`, `f3rm-ext-lite` or `f3rm-ext-big`.
    """
    lite = name == "f3rm-ext-lite"
    steps = 4000 if lite else 30_000

    def group(lr: float, lr_final: float, optimizer: type[AdamOptimizerConfig]) -> dict[str, Any]:
        scheduler = RunDecaySchedulerConfig(lr_final=lr_final, max_steps=0 if lite else 200_000)
        return {"optimizer": optimizer(lr=lr, eps=1e-15), "scheduler": scheduler}

    final = 1e-3 if lite else 1e-4
    return F3rmTrainerConfig(
        method_name=name,
        max_num_iterations=steps,
        steps_per_eval_batch=0 if lite else 500,
        steps_per_eval_image=0 if lite else 500,
        steps_per_save=500 if lite else 2000,
        mixed_precision=True,
        machine=MachineConfig(device_type=default_device_type()),  # type: ignore[arg-type]
        pipeline=FeaturePipelineConfig(datamanager=_datamanager(name), model=_model(name)),
        optimizers={
            "proposal_networks": group(1e-2, final, FusedAdamOptimizerConfig),
            "fields": group(1e-2, final, FusedAdamOptimizerConfig),
            "feature_field": group(1e-2, final, FusedAdamOptimizerConfig),
            "camera_opt": {
                "optimizer": AdamOptimizerConfig(lr=1e-3, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=5000),
            },
            "exposure": group(1e-2, 1e-3, AdamOptimizerConfig),
        },
        vis="viewer",
    )

"""Evaluation batches during training, through the real pipelines: no graph, whatever the method."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig

from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config


def _trainer(config: Any, capture: Path, folder: Path) -> Any:
    """The trainer of a method, set up but not trained."""
    config.data, config.output_dir = capture, folder
    config.experiment_name, config.timestamp, config.vis = "e", "t", "tensorboard"
    config.pipeline.datamanager.data = capture
    config.pipeline.datamanager.features.extractors = ()
    config.machine.device_type = "cpu"
    config.logging.local_writer.enable = False
    config.steps_per_eval_batch, config.steps_per_eval_image, config.steps_per_eval_all_images = 2, 0, 0
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    return trainer


def _field() -> Any:
    config = make_config("f3rm-ext-lite")
    config.pipeline.datamanager.eval_num_rays_per_batch = 64
    config.pipeline.model.render_normals = True
    # Metrics of the poses have parameters in them.
    config.pipeline.model.camera_optimizer = CameraOptimizerConfig(mode="SO3xR3")
    return config


def _splats() -> Any:
    config = make_splat_config("sugar-ext-lite")
    config.pipeline.model.num_random = 50
    return config


@pytest.mark.parametrize("make", [_field, _splats])
def test_an_evaluation_batch_has_no_graph(
    make: Any, tiny_capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(make(), tiny_capture, tmp_path)
    evaluate, given = trainer.pipeline.get_eval_loss_dict, []

    def spy(step: int) -> Any:
        given.append(evaluate(step=step))
        return given[-1]

    monkeypatch.setattr(trainer.pipeline, "get_eval_loss_dict", spy)
    trainer.eval_iteration(step=2)
    (groups,) = given
    values = {name: value for group in groups for name, value in group.items() if isinstance(value, torch.Tensor)}
    assert {"rgb", "rgb_loss", "psnr"} <= set(values)
    assert not [name for name, value in values.items() if value.requires_grad]
    assert torch.is_grad_enabled() and trainer.pipeline.training, "training goes on with gradients"

"""Gaussians divided over processes: options that go with it, and which rows a checkpoint deals out."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.splat import sharding
from f3rm_ext.splat.densify import DensifyOptions, base, make_densifier
from f3rm_ext.splat.rasterize import Rasterization


def make_config(**machine: Any) -> Any:
    config = make_splat_config("sugar-ext")
    config.machine = dataclasses.replace(config.machine, **{"device_type": "cuda", "num_devices": 2, **machine})
    config.pipeline.model.shard_gaussians = True  # type: ignore[attr-defined]
    config.pipeline.model.regularization = "none"  # type: ignore[attr-defined]
    return config


def test_a_run_that_can_divide_closes_its_viewer(capsys: pytest.CaptureFixture) -> None:
    config = make_config()
    sharding.check_sharding(config)
    assert config.vis == "tensorboard" and "The viewer is closed" in capsys.readouterr().out
    config.vis = "viewer+wandb"
    sharding.check_sharding(config)
    assert config.vis == "wandb"


def test_several_processes_do_not_clean() -> None:
    config = make_config()
    config.pipeline.model.shard_gaussians, config.pipeline.model.clean = False, True
    with pytest.raises(ConfigError, match=r"--pipeline\.model\.clean.*splats clean"):
        config.fit_model()


def test_on_the_cpu_it_is_refused() -> None:
    for check in (sharding.check_sharding, type(make_config()).fit_model):
        with pytest.raises(ConfigError, match=r"shard-gaussians .* cpu"):
            check(make_config(device_type="cpu"))


def test_one_process_cannot_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--machine\.num-devices"):
        sharding.check_sharding(make_config(num_devices=1))
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**torchrun, "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    sharding.check_sharding(make_config(num_devices=1))


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("model.regularization", "density", "--pipeline.model.regularization none."),
        ("model.densify.absgrad", True, "--pipeline.model.densify.absgrad False."),
        ("model.memory.optimize_memory", True, "--pipeline.model.sh-storage float32."),
        ("model.backend", "torch", "--pipeline.model.backend auto."),
        (
            "datamanager.features.extractors",
            ("dense-daisy",),
            "--pipeline.datamanager.features.extractors (without names).",
        ),
    ],
)
def test_what_needs_all_gaussians_is_refused(option: str, value: Any, advice: str) -> None:
    config = make_config()
    *parents, name = option.split(".")
    setattr(functools.reduce(getattr, parents, config.pipeline), name, value)
    with pytest.raises(ConfigError, match=rf"add {re.escape(advice)}$"):
        sharding.check_sharding(config)


def test_images_of_several_sizes_are_refused() -> None:
    def views(*widths: int) -> PinholeCameras:
        count = len(widths)
        sizes = torch.tensor(widths, dtype=torch.float32), torch.full((count,), 30.0)
        return PinholeCameras(torch.eye(4).repeat(count, 1, 1), torch.eye(3).repeat(count, 1, 1), *sizes)

    sharding.require_one_size(views(40, 40), views(40))
    with pytest.raises(ConfigError, match="40 × 30, 50 × 30"):
        sharding.require_one_size(views(40, 40), views(50))


def test_each_rank_takes_its_rows_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(7.0)
    per_row = {"exp_avg": rows[:, None].repeat(1, 3), "step": torch.tensor(4.0), "seen": rows.int()}
    state: dict[str, Any] = {
        "pipeline": {
            "_model.gauss_params.means": rows[:, None].repeat(1, 3),
            "_model.filter_3d": rows.clone(),
            "_model.background": torch.zeros(7),  # as long, by chance
            "_model._extra_state": {"densifier": {"grad2d": rows.clone(), "generator": torch.zeros(7)}},
        },
        "optimizers": {"means": {"state": {0: per_row}, "param_groups": []}},
    }
    monkeypatch.setattr(sharding, "own_slice", lambda: slice(1, None, 3))
    sharding.deal_out(state)
    own = torch.tensor([1.0, 4.0])
    assert torch.equal(state["pipeline"]["_model.gauss_params.means"][:, 0], own)
    assert torch.equal(state["pipeline"]["_model.filter_3d"], own)
    assert len(state["pipeline"]["_model.background"]) == 7
    densifier = state["pipeline"]["_model._extra_state"]["densifier"]
    assert torch.equal(densifier["grad2d"], own) and len(densifier["generator"]) == 7
    assert torch.equal(per_row["exp_avg"][:, 2], own) and torch.equal(per_row["seen"], own.int())
    assert float(per_row["step"]) == 4


def test_ranks_draw_different_numbers_and_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, caps = [], []
    for rank in range(2):
        for module in (base, sharding):
            monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(base, "own_share", lambda total, rank=rank: len(range(total)[rank::2]))
        made = make_densifier(DensifyOptions(max_gaussians=901), 1.0, sharded=True)
        saved = make_densifier(DensifyOptions(), 1.0).state_dict()
        drawn.append(torch.rand(2, generator=made.generator))
        made.load_state_dict(saved)
        drawn.append(torch.rand(2, generator=made.generator))
        caps.append(made.strategy.cap)  # type: ignore[attr-defined]
    assert caps == [451, 450]
    assert not torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[1], drawn[3])


def test_statistics_add_up_what_all_images_say_of_a_gaussian() -> None:
    densifier: Any = make_densifier(DensifyOptions(stop_scale2d=100), 1.0, sharded=True)
    picture = torch.zeros(20, 40)
    centres = torch.zeros(3, 2, requires_grad=True)
    centres.grad = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    seen = Rasterization(
        picture[..., None], picture, picture, centres, torch.tensor([4, 6, 8]), torch.tensor([2, 0, 2])
    )
    params = {"means": torch.nn.Parameter(torch.zeros(4, 3))}
    densifier.step_post_backward(1, seen, params, {})
    found = densifier.statistics
    assert found["count"].tolist() == [1, 0, 2, 0]
    assert found["grad2d"].tolist() == [10, 0, 30, 0]  # half the width, half the height
    torch.testing.assert_close(found["radii"], torch.tensor([6 / 40, 0, 8 / 40, 0]))

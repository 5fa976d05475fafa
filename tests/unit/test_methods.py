"""The registered methods: presets, their stand-ins, and what config.yml keeps."""

import dataclasses
import math
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.plugins.types import MethodSpecification

from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.bound.model import PARAMETERS
from f3rm_ext.method_configs.guarded import BrokenMethodConfig, guarded_method
from f3rm_ext.method_configs.nerf import PRESETS
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat import PRESETS as SPLATS
from f3rm_ext.method_configs.splat import REFINEMENT
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.splat.gaussians import Gaussians

ROOT = Path(__file__).parents[2]
SPLAT_PRESETS = {**SPLATS, **REFINEMENT}


@pytest.mark.parametrize("name", [*PRESETS, *SPLAT_PRESETS])
def test_entry_point_and_method_name_agree(name: str) -> None:
    (entry,) = entry_points(group="nerfstudio.method_configs", name=name)
    specification = entry.load()
    assert isinstance(specification, MethodSpecification)
    assert specification.config.method_name == name


@pytest.mark.parametrize("name", [*PRESETS, *SPLAT_PRESETS])
@pytest.mark.parametrize("spelling", ["--resolution-scale", "--resolution_scale"])
def test_every_method_takes_the_short_name_of_the_scale(name: str, spelling: str) -> None:
    assert typed(name, spelling, "0.25").datamanager.camera_res_scale_factor == 0.25


@pytest.mark.parametrize("name", [*PRESETS, *SPLAT_PRESETS])
def test_only_splats_read_the_points_of_a_capture(name: str) -> None:
    for arguments in ((), ("f3rm-ext-data",), ("f3rm-ext-data", "--eval-mode", "all")):
        assert typed(name, *arguments).datamanager.dataparser.load_3D_points == (name in SPLAT_PRESETS)


@pytest.mark.parametrize("name", SPLATS)
def test_splats_take_short_names(name: str) -> None:
    config = typed(
        name,
        *("--optimize_memory", "True", "--fragmentation", "aggressive"),
        *("--sh-degree", "1", "--regularization", "dn_consistency", "f3rm-ext-data"),
    )
    model = config.model
    assert model.memory.optimize_memory and model.memory.fragmentation == "aggressive" and model.sh_degree == 1
    assert model.regularization == "dn-consistency" and "dn_consistency" not in yaml.dump(config)
    assert typed(name, "--sh_degree", "0", "--regularization", "sdf").model.regularization == "sdf"


def test_the_refinement_takes_short_names() -> None:
    words = ("--mesh", "m.ply", "--refinement-time", "short", "--sh-degree", "1", "--optimize-memory", "True")
    model = typed("sugar-ext-refine", *words).model
    assert model.mesh == Path("m.ply") and model.refinement_time == "short" and model.sh_degree == 1
    assert typed("sugar-ext-refine", "--refinement_time", "medium").model.refinement_time == "medium"


def typed(name: str, *arguments: str) -> Any:
    """The pipeline of a method as ns-train makes it of a command line."""
    make = make_config if name in PRESETS else make_splat_config
    pipeline = make(name).pipeline
    return tyro.cli(type(pipeline), default=pipeline, args=list(arguments), config=(tyro.conf.FlagConversionOff,))


def test_presets_do_not_share_state() -> None:
    one, two = make_config("f3rm-ext"), make_config("f3rm-ext")
    one.pipeline.model.grid.num_levels = 3
    one.optimizers["fields"]["optimizer"].lr = 1.0
    assert two.pipeline.model.grid.num_levels == 16
    assert two.optimizers["fields"]["optimizer"].lr == 1e-2
    assert make_config("f3rm-ext-big").pipeline.model.grid.num_levels == 16


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_group_has_an_optimiser(name: str) -> None:
    groups = {"proposal_networks", "fields", "feature_field", "camera_opt", "exposure"}
    assert set(make_config(name).optimizers) == groups


@pytest.mark.parametrize("name", SPLAT_PRESETS)
def test_splats_share_no_state(name: str) -> None:
    config, other = make_splat_config(name), make_splat_config(name)
    assert config.viewer.websocket_host == "127.0.0.1"
    config.pipeline.model.mip.near = 7.0
    if name in SPLATS:
        config.pipeline.model.densify.max_gaussians = 7
    config.optimizers["opacities"]["optimizer"].lr = 1.0
    assert yaml.dump(other) == yaml.dump(make_splat_config(name))


@pytest.mark.parametrize("name", SPLAT_PRESETS)
def test_every_tensor_of_gaussians_has_an_optimiser(name: str) -> None:
    names = {field.name for field in dataclasses.fields(Gaussians)} if name in SPLATS else {*PARAMETERS}
    assert set(make_splat_config(name).optimizers) == {*names, "exposure"}


def test_a_broken_part_gives_a_method_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libfoo.so is missing")

    monkeypatch.setattr("f3rm_ext.method_configs.presets.make_config", broken)
    specification = guarded_method("f3rm-ext", "A method.")
    assert isinstance(specification.config, BrokenMethodConfig)
    assert "libfoo.so is missing" in specification.description
    with pytest.raises(ConfigError, match=r"libfoo\.so is missing.*doctor"):
        specification.config.setup()


def _flags(config: TrainerConfig) -> set[str]:
    parser = tyro.extras.get_parser(type(config), default=config)
    return {flag.removeprefix("--") for action in parser._actions for flag in action.option_strings}


def _options(value: Any, path: str = "") -> Iterator[str]:
    """What fields and the fields in them would be called on the command line."""
    if isinstance(value, dict):
        children = value
    elif isinstance(value, tuple):
        children = {str(index): child for index, child in enumerate(value)}
    elif dataclasses.is_dataclass(value):
        children = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        children = {}
    if not any(dataclasses.is_dataclass(child) or isinstance(child, dict) for child in [value, *children.values()]):
        yield path
        return
    if not children:
        yield path
    for name, child in children.items():
        if name not in ("_target", "dataparser"):  # the dataparser's are those of a subcommand
            inside = path if (path, name) == ("pipeline.model", "memory") else f"{path}.{name}".strip(".")
            yield from _options(child, inside.replace("_", "-"))


WITHOUT_EFFECT = {
    "prompt",
    "viewer.num-rays-per-chunk",
    "pipeline.datamanager.masks-on-gpu",
    "pipeline.model.collider-params",
    "pipeline.model.enable-collider",
    "pipeline.model.loss-coefficients",
    "pipeline.model.prompt",
}
"""Options of nerfstudio's that do nothing in any of our methods."""
OF_FIELDS = {
    *(
        f"pipeline.datamanager.{name}"
        for name in ("camera-optimizer", "eval-image-indices", "patch-size", "pixel-sampler")
    ),
    *(f"pipeline.model.camera-optimizer.{name}" for name in ("optimizer", "scheduler")),
}
OF_SPLATS = {
    *(
        f"pipeline.datamanager.{name}"
        for name in (
            *("cache-images-type", "eval-image-indices", "eval-num-images-to-sample-from"),
            *("eval-num-times-to-repeat-images", "fps-reset-every", "images-on-gpu", "max-thread-workers"),
            *("train-cameras-sampling-seed", "train-cameras-sampling-strategy"),
        )
    ),
    "pipeline.model.eval-num-rays-per-chunk",
    "pipeline.model.surface.mode",
    "optimizers.features-rest.optimizer.moments",
    "optimizers.features-rest.optimizer.reflective-above",
}


OF_REFINEMENT = {
    f"pipeline.model.{name}"
    for name in (
        *("regularization", "surface", "densify", "num-random", "shard-gaussians", "clean"),
        "start-stage",
    )
}


@pytest.mark.parametrize("name", [*PRESETS, *SPLAT_PRESETS])
def test_options_without_effect_are_not_offered(name: str) -> None:
    """Whoever adds an option that is not on the command line, or hides one, says so here."""
    config = make_config(name) if name in PRESETS else make_splat_config(name)
    expected = WITHOUT_EFFECT | (OF_FIELDS if name in PRESETS else OF_SPLATS)
    if name in REFINEMENT:
        expected |= OF_REFINEMENT
    offered = _flags(config)
    hidden = {option for option in _options(config) if option not in offered}
    unknown = {option for option in hidden if not any(f"{option}.".startswith(f"{known}.") for known in expected)}
    assert unknown == set(), "not on the command line, and not known to be without effect"
    useless = {option for option in offered if any(f"{option}.".startswith(f"{known}.") for known in expected)}
    assert useless == set(), "offered, but without effect"


@pytest.mark.parametrize("name", ["f3rm-ext", "sugar-ext"])
def test_a_config_file_with_options_without_effect_still_loads(name: str) -> None:
    config = make_config(name) if name in PRESETS else make_splat_config(name)
    config.viewer = ViewerConfig(num_rays_per_chunk=7)
    config.pipeline.model.enable_collider = False
    config.pipeline.model.collider_params = {"near_plane": 2.0, "far_plane": 6.0}
    config.pipeline.model.eval_num_rays_per_chunk = 512
    loaded = yaml.load(yaml.dump(config), Loader=yaml.Loader)
    assert loaded == config and type(loaded.viewer) is ViewerConfig


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/methods.md"])
def test_every_method_is_introduced(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [name for name in [*PRESETS, *SPLAT_PRESETS] if f"`{name}`" not in text] == []
    if page == "README.md":
        rows = {line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")}
        assert rows >= {*PRESETS, *SPLAT_PRESETS}


def test_the_example_of_windows_is_counted_right() -> None:
    """The page on options counts windows of 32 photos in 120,000 steps."""
    page = (ROOT / "docs" / "options.md").read_text()
    for photos in (100, 200):
        cycle = ImageCycle(photos, 32, 1)
        for _ in range(math.ceil(120_000 / 512)):
            cycle.step()
        counts = cycle.appearances()
        assert (
            f" {sum(counts) // 32} windows" in page and f" {min(counts)} or {max(counts)} for each of {photos}" in page
        )
